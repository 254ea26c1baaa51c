"""Run the plugins of one attachment by the rules of libcni: order, prevResult, runtimeConfig, cached result.

Rules: CNI SPEC section 3, libcni `libcni/api.go`. Differences on purpose: a DEL continues after a plugin has failed, a
CHECK below 0.4.0 is no error (`pod/check`), and an error begins with its cause, followed by the place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins import advice, compare
from multus_daemon.plugins.cache import Entry, ResultCache
from multus_daemon.plugins.find import PluginNotFoundError, Program
from multus_daemon.plugins.plugin import NO_NETNS, NothingLeftError, Plugin, Progress, ResultLeftError
from multus_daemon.plugins.select import Plugins, require_valid
from multus_daemon.spec.attachment import BUILT_IN, Attachment, Difference, Invocation, Sandbox
from multus_daemon.spec.cni import conf, gojson, names, result, versions
from multus_daemon.spec.cni.conf import NetworkConfig, PluginConfig
from multus_daemon.spec.cni.errors import (
    CniError,
    IncompatibleVersionError,
    InvalidNetworkConfigError,
    IoFailureError,
    Origin,
    UnknownContainerError,
    of_plugin,
)
from multus_daemon.spec.cni.names import ContainerId, IfName
from multus_daemon.spec.cni.result import Result

log = logging.getLogger(__name__)


class ListRunner:
    """Runs lists of plugins. `bin_path` is CNI_PATH, directories joined by `:`."""

    def __init__(self, plugins: Plugins, cache: ResultCache, bin_path: str) -> None:
        self._plugins = plugins
        self.unknown = plugins.unknown
        self._cache = cache
        self._bin_path = bin_path

    def programs(self, configs: Iterable[NetworkConfig]) -> Mapping[str, Program]:
        """Find the programs of the plugins that the configurations name; return them by type. Reads the disk."""
        return self._plugins.programs(
            (plugin.type, self._without_container("ADD", config, plugin, {}))
            for config in configs
            for plugin in config.plugins
        )

    def plan(self, sandbox: Sandbox, attachment: Attachment, programs: Mapping[str, Program]) -> Attachment:
        """Check names, version, and that every plugin exists; return the attachment with its `served_by`. Pure.

        `programs`: those that `programs()` returned for its configuration. Raises InvalidNetworkConfigError,
        InvalidEnvironmentError (interface name), IncompatibleVersionError, and the refusal of a plugin.
        """
        served_by: dict[str, str] = {}
        try:
            require_valid(sandbox, attachment)
            for plugin_type, call in self.invocations(sandbox, attachment):
                served_by |= self._plugins.servers(plugin_type, call, programs)
        except CniError as error:
            raise error.with_context(_place(attachment)) from error
        return replace(attachment, served_by=served_by)

    def invocations(self, sandbox: Sandbox, attachment: Attachment) -> Sequence[tuple[str, Invocation]]:
        """Return the calls of an ADD, in order: plugin type and call, without prevResult. Runs nothing."""
        plugins = attachment.config.plugins
        return [(plugin.type, self._invocation("ADD", sandbox, attachment, plugin, None)) for plugin in plugins]

    def adds_here(self, attachment: Attachment) -> bool:
        """Return True if ADD should run in the calling thread: all plugins are built in, and take milliseconds.

        Other attachments wait for processes or addresses, and need a thread each to run concurrently.
        """
        builtins = map(self._plugins.builtin, attachment.served_by)
        return self.deletes_here(attachment) and all(item is not None and not item.waits for item in builtins)

    def deletes_here(self, attachment: Attachment) -> bool:
        """Return True if DEL should run in the calling thread: all plugins are built in."""
        served_by = attachment.served_by
        named = {name for plugin in attachment.config.plugins for name in (plugin.type, plugin.ipam_type) if name}
        return named <= served_by.keys() and all(where == BUILT_IN for where in served_by.values())

    def add(
        self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None
    ) -> Result:
        """Run ADD in the list's order, each plugin with the previous result. The caller must call `remember` after it.

        Raises CniError, the first failure; the caller must undo the ADD by `delete` with the same `progress`.
        """
        config = attachment.config
        previous: Result | None = None
        current = Result()
        asked = attachment.capability_args.keys() | dict(attachment.cni_args)
        for position, plugin in enumerate(config.plugins):
            invocation = self._invocation("ADD", sandbox, attachment, plugin, previous, netns=netns)
            try:
                if asked & {"mac", "MAC"}:
                    advice.refuse_taken_mac(self._cache, invocation, netns)
                current = self._plugins.recorded(plugin.type, invocation).run(invocation, netns)
                previous = _as_seen(current, config)
            except CniError as error:
                if progress:
                    progress.failed_at, progress.failure = position, error.msg
                raise self._placed(error, attachment, invocation, netns) from error
        return current

    def remember(self, sandbox: Sandbox, attachment: Attachment, networks: int = 0) -> None:
        """Put the result into libcni's cache; `networks`: number of the container's networks. Raises IoFailureError."""
        config = attachment.config
        value = attachment.result or Result()
        entry = Entry(
            container_id=sandbox.container_id,
            config=config.raw,
            ifname=attachment.ifname,
            network=config.name,
            netns=sandbox.netns,
            cni_args=attachment.cni_args,
            capability_args=attachment.capability_args,
            networks=networks,
            # If the version cannot express it, the newest can: nothing is lost, and readers convert anyway.
            result=_object(value, config) or result.to_object(value, versions.CURRENT),
        )
        try:
            self._cache.write(entry)
        except OSError as error:
            problem = f"the result of the ADD could not be written: {error}"
            remedy = "free space, or repair the directory"
            raise IoFailureError(problem, f"{_place(attachment)}, ADD", remedy=remedy) from error

    def delete(
        self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None
    ) -> None:
        """Run DEL in reverse order, from 0.4.0 on with the stored result as prevResult; can be repeated.

        After a failure the other plugins run, too. The failures are raised as one CniError with the code of the first,
        and the cached result stays for the next DEL. Raises NothingLeftError if nothing is left that a later DEL could
        free (`Plugin.may_have_left`): the caller must then call `forget`. Raises ResultLeftError as `forget` does.
        """
        config = attachment.config
        previous: Result | None = None
        stored = self._stored(sandbox, attachment)
        if versions.at_least(config.cni_version, "0.4.0"):
            try:
                previous = None if stored is None else _as_seen(stored, config)
            except IncompatibleVersionError as error:
                # As libcni: a result that cannot be converted must not keep a network attached.
                why = f"as the stored result can't be read: {error}"
                log.warning("DEL of network %s runs without prevResult, %s", attachment.name, why)
        failures: list[CniError] = []
        may_be_left = False
        for position in () if attachment.detached else reversed(range(len(config.plugins))):
            call = self._invocation(
                "DEL", sandbox, attachment, config.plugins[position], previous, netns=netns, recorded=stored
            )
            failed, is_left = self._delete(attachment, position, call, netns, progress or Progress())
            failures += (self._placed(error, attachment, call, netns) for error in failed)
            may_be_left = may_be_left or is_left
        if failures:
            failure = advice.joined(failures, "DEL")
            if may_be_left or _may_have_interface(attachment, netns):
                raise failure
            raise NothingLeftError(
                failure.msg, failure.details, remedy=failure.remedy, origin=failure.origin, code=failure.code
            ) from failure
        self.forget(sandbox, attachment)

    def _delete(
        self, attachment: Attachment, position: int, call: Invocation, netns: PodNetns, progress: Progress
    ) -> tuple[list[CniError], bool]:
        """Run the DEL of a plugin, then that of its IPAM plugin if the plugin may not have called it.

        Plugins such as host-device release no address if the namespace is gone, and a DEL that fails may not have
        called the IPAM plugin. The address stays reserved while something else may be left, as the pod may still use
        it. Returns the failures, and True if more than the interface may be left.
        """
        config = attachment.config.plugins[position]
        plugin = self._plugins.recorded(config.type, call)
        failed = _failure(plugin, call, netns) if netns.exists or not plugin.needs_netns else []

        def leaves(plugin: Plugin, error: CniError) -> bool:
            known = {"is_added": attachment.result is not None, "has_netns": netns.exists}
            return _unless_denied(call, lambda: plugin.may_have_left(call, error, position, progress, **known))

        if any(leaves(plugin, error) for error in failed):
            return failed, True
        calls_ipam = plugin.calls_ipam and config.ipam_type not in ("", config.type)
        if failed and calls_ipam and _may_have_interface(attachment, netns):
            # Some release the address first, and keep the interface if that fails.
            alone = {key: value for key, value in call.fields.items() if key.lower() != "ipam"}
            _failure(plugin, replace(call, fields=alone), netns)
            calls_ipam = not _may_have_interface(attachment, netns)
        is_built_in = call.served_by.get(config.type) == BUILT_IN
        has_released = not failed and (is_built_in or netns.exists)
        if not calls_ipam or has_released:
            return failed, False
        ipam, is_left = self._plugins.recorded(config.ipam_type, call), False
        if _unless_denied(call, lambda: ipam.keeps(call)):
            for error in _failure(ipam, call, netns):
                if failed or not isinstance(error, PluginNotFoundError):
                    is_left = leaves(ipam, error)
                    failed = failed or [error]
        return failed, is_left

    def forget(self, sandbox: Sandbox, attachment: Attachment) -> None:
        """Remove the cached result of a detached network. Raises ResultLeftError."""
        try:
            self._cache.remove(attachment.config.name, sandbox.container_id, attachment.ifname)
        except OSError as error:
            raise ResultLeftError(
                f"the cached result can't be removed now, and will be tried again: {error}", origin=Origin.DISK
            ) from error

    def check(self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns) -> None:
        """Run CHECK in the list's order, each plugin with the stored result. The first failure ends it.

        Skipped if the configuration is older than 0.4.0, which has no such verb, or says `disableCheck`.
        """
        config = attachment.config
        if config.disable_check or not versions.allows(config.cni_version, "CHECK"):
            return
        stored = self._stored(sandbox, attachment)
        if stored is None:
            raise InvalidNetworkConfigError(
                f"the network has no stored result, with which CHECK compares ({_place(attachment)}, CHECK)",
                remedy="delete the pod, so that it is made again with the network",
            )
        for plugin in config.plugins:
            invocation = self._invocation("CHECK", sandbox, attachment, plugin, None, netns=netns)
            try:
                call = replace(invocation, prev_result=_as_seen(stored, config))
                self._plugins.recorded(plugin.type, call).run(call, netns)
            except CniError as error:
                raise self._placed(error, attachment, invocation, netns) from error

    def differences(self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns, *, asks: bool) -> list[Difference]:
        """Return the differences from the record (`compare.differences`). Raises CniError, InvalidNetnsError."""
        if attachment.result is None or not attachment.is_attached or attachment.auxiliary:
            return []
        seen, calls = _as_seen(attachment.result, attachment.config), []
        for plugin in attachment.config.plugins:
            # Every version has DEL, whose call is about the recorded result too.
            call = self._invocation("DEL", sandbox, attachment, plugin, attachment.result, netns=netns)
            found = self._plugins.recorded(plugin.type, call)
            calls.append((found, call, replace(call, verb="CHECK", prev_result=seen)))
            if attachment.served_by.get(plugin.ipam_type) == BUILT_IN:
                calls.append((self._plugins.recorded(plugin.ipam_type, call), *calls[-1][1:]))
        return compare.differences(attachment, calls, netns, asks=asks)

    def foresee(self, sandbox: Sandbox, attachment: Attachment) -> str:
        """Return what built-in IPAM plugins would choose in an ADD now. Raises CniError if one would fail."""
        found = []
        for plugin in attachment.config.plugins:
            builtin = self._plugins.builtin(plugin.ipam_type)
            if builtin and attachment.served_by.get(plugin.ipam_type) == BUILT_IN:
                found.append(builtin.foresee(self._invocation("ADD", sandbox, attachment, plugin, None)))
        return ", ".join(filter(None, found))

    def status(self, config: NetworkConfig) -> None:
        """Run STATUS in the list's order; the first failure ends it, with its code. Skipped below 1.1.0."""
        for failure in self._failures("STATUS", config):
            raise failure from failure.__cause__

    def gc(self, config: NetworkConfig, valid: Sequence[tuple[ContainerId, IfName]]) -> None:
        """Run GC in the list's order, with `valid` under both names of its key. A failure stops no other plugin.

        The failures are raised as one CniError with the code of the first. Skipped below 1.1.0, and if the
        configuration says `disableGC`. Unlike libcni's it deletes nothing by itself.
        """
        if config.disable_gc:
            return
        pairs = [{"containerID": container_id, "ifname": ifname} for container_id, ifname in valid]
        # The first name is that of libcni and of today's SPEC, the second that of the tag spec-v1.1.0.
        extra = {"cni.dev/valid-attachments": pairs, "cni.dev/attachments": pairs}
        if failures := list(self._failures("GC", config, extra)):
            raise advice.joined(failures, "GC")

    def _failures(
        self, verb: str, config: NetworkConfig, extra: Mapping[str, Any] = MappingProxyType({})
    ) -> Iterator[CniError]:
        """Run a verb that is about no container, in the list's order; yield the failures. None below 1.1.0."""
        for plugin in config.plugins if versions.allows(config.cni_version, verb) else ():
            try:
                call = self._without_container(verb, config, plugin, extra)
                self._plugins.of(plugin.type, call).run(call, NO_NETNS)
            except CniError as error:
                failure = error.with_context(f'plugin type="{plugin.type}" network="{config.name}", {verb}')
                failure.__cause__ = error
                yield failure

    def _without_container(
        self, verb: str, config: NetworkConfig, plugin: PluginConfig, extra: Mapping[str, Any]
    ) -> Invocation:
        fields = conf.plugin_fields(config, plugin, extra=extra)
        return Invocation(verb, container_id="", netns="", ifname="", args="", path=self._bin_path, fields=fields)

    def _placed(self, error: CniError, attachment: Attachment, call: Invocation, netns: PodNetns) -> CniError:
        """Return the plugin's error with the same code: its message, then the place, and a remedy in the details."""
        place = f'plugin type="{gojson.get_str(call.fields, "type")}" {_place(attachment)}, {call.verb}'
        error = advice.explained(error, call, netns, self._cache)
        is_open = error.origin is Origin.PLUGIN and not (error.remedy or of_plugin(error.code, error.msg))
        if is_open and (unknown := self.unknown(call)):
            # What the built-in does not know is more often a typing error than a feature of the binary.
            advised = f"look at {unknown} in the network's configuration, which the built-in does not know"
            error = error.changed(remedy=advised)
        return error.with_context(place)

    def _stored(self, sandbox: Sandbox, attachment: Attachment) -> Result | None:
        config, ids = attachment.config, (sandbox.container_id, attachment.ifname)
        return attachment.result or self._cache.read_result(config.name, *ids, config.cni_version)

    def _invocation(
        self,
        verb: str,
        sandbox: Sandbox,
        attachment: Attachment,
        plugin: PluginConfig,
        previous: Result | None,
        *,
        netns: PodNetns | None = None,
        recorded: Result | None = None,
    ) -> Invocation:
        return Invocation(
            verb=verb,
            container_id=sandbox.container_id,
            netns=sandbox.netns,
            ifname=attachment.ifname,
            args=names.render_args(attachment.cni_args),
            path=self._bin_path,
            fields=conf.plugin_fields(attachment.config, plugin, capability_args=attachment.capability_args),
            prev_result=previous,
            served_by=attachment.served_by,
            recorded=recorded,
            observed=attachment.observed,
            pod_namespace=next((value for key, value in attachment.cni_args if key == "K8S_POD_NAMESPACE"), ""),
            network=attachment.name,
            address_claim=attachment.address_claim,
            netns_override=netns is not None and netns.may_be_own,
        )


def _as_seen(value: Result, config: NetworkConfig) -> Result | None:
    """Return the result as plugins of the configuration's version see it; None if that version cannot express it.

    0.1.0 and 0.2.0 cannot express a result without addresses. That is no error: the Go library does not convert such a
    result, but passes on what was printed.
    """
    if not versions.at_least(config.cni_version, "0.3.0") and _object(value, config) is None:
        return None
    return result.in_version(value, config.cni_version)


def _object(value: Result, config: NetworkConfig) -> dict[str, Any] | None:
    try:
        return result.to_object(value, config.cni_version)
    except IncompatibleVersionError:
        if versions.at_least(config.cni_version, "0.3.0"):
            raise
        return None


def _place(attachment: Attachment) -> str:
    return f'network="{attachment.name}" interface="{attachment.ifname}"'


def _failure(plugin: Plugin, call: Invocation, netns: PodNetns) -> list[CniError]:
    try:
        plugin.run(call, netns)
    except UnknownContainerError as error:
        # Code 3: there is nothing left that a DEL could remove (CNI SPEC section 5).
        log.debug("DEL of %s, %s: %s", call.network, plugin.type, error)
    except CniError as error:
        return [error]
    return []


def _unless_denied(call: Invocation, ask: Callable[[], bool]) -> bool:
    """Return `ask()`; True if it cannot read the disk."""
    try:
        return ask()
    except IoFailureError as problem:
        log.warning("network %s: it is not known what is left, so its record may stay: %s", call.network, problem)
        return True


def _may_have_interface(attachment: Attachment, netns: PodNetns) -> bool:
    """Return True if the attachment's interface is in the namespace, or if the namespace cannot be read."""
    # An auxiliary chain works on the cluster network's interface.
    if attachment.auxiliary or not netns.path or not netns.exists:
        return False
    try:
        return bool(netns.existing([attachment.ifname]))
    except OSError:
        return netns.exists
