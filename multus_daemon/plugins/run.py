"""Run the plugins of one attachment by the rules of libcni: order, prevResult, runtimeConfig, cached result.

Rules: CNI SPEC section 3, libcni `libcni/api.go`. Differences on purpose: a DEL continues past a plugin that fails, the
engine does CHECK below 0.4.0, and an error begins with its cause, followed by the place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins import advice, compare
from multus_daemon.plugins.cache import Entry, ResultCache
from multus_daemon.plugins.find import PluginNotFoundError
from multus_daemon.plugins.plugin import (
    NO_NETNS,
    Difference,
    NothingLeftError,
    Plugin,
    Program,
    Progress,
    ResultLeftError,
)
from multus_daemon.plugins.select import Plugins, require_valid
from multus_daemon.spec.attachment import BUILT_IN, Attachment, Invocation, Sandbox
from multus_daemon.spec.cni import conf, gojson, names, result, versions
from multus_daemon.spec.cni.conf import NetworkConfig, PluginConfig
from multus_daemon.spec.cni.errors import (
    CniError,
    IncompatibleVersionError,
    InvalidNetworkConfigError,
    IoFailureError,
    UnknownContainerError,
)
from multus_daemon.spec.cni.names import ContainerId, IfName
from multus_daemon.spec.cni.result import Result

log = logging.getLogger(__name__)


class ListRunner:
    """Runs lists of plugins. `bin_path` is CNI_PATH, directories joined by `:`."""

    def __init__(self, plugins: Plugins, cache: ResultCache, bin_path: str) -> None:
        self._plugins = plugins
        self._cache = cache
        self._bin_path = bin_path

    def programs(self, configs: Iterable[NetworkConfig]) -> Mapping[str, Program]:
        """Look for the plugins that the configurations name, by type. Reads the disk."""
        return self._plugins.programs(
            (plugin.type, self._without_container("ADD", config, plugin, {}))
            for config in configs
            for plugin in config.plugins
        )

    def plan(self, sandbox: Sandbox, attachment: Attachment, programs: Mapping[str, Program]) -> Attachment:
        """Return the attachment with `served_by`; check names, version, and that every plugin is there. Pure.

        `programs` are those of its configuration. Raises InvalidNetworkConfigError, InvalidEnvironmentError (interface
        name), IncompatibleVersionError, and the refusal of a plugin.
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
        """Return the calls of an ADD, in order, with the plugin type and without prevResult. Touches nothing."""
        plugins = attachment.config.plugins
        return [(plugin.type, self._invocation("ADD", sandbox, attachment, plugin, None)) for plugin in plugins]

    def adds_here(self, attachment: Attachment) -> bool:
        """Return True if the calling thread should run ADD: all plugins are built in, and quick.

        Other attachments wait, for processes or for addresses, and need a thread each to run side by side.
        """
        builtins = map(self._plugins.builtin, attachment.served_by)
        return self.deletes_here(attachment) and all(item is not None and not item.waits for item in builtins)

    def deletes_here(self, attachment: Attachment) -> bool:
        """Return True if the calling thread should run DEL: all plugins are built in."""
        served_by = attachment.served_by
        named = {name for plugin in attachment.config.plugins for name in (plugin.type, plugin.ipam_type) if name}
        return named <= served_by.keys() and all(where == BUILT_IN for where in served_by.values())

    def add(
        self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None
    ) -> Result:
        """Run ADD in the list's order, each plugin with the previous result. The caller has `remember` keep it.

        Raises CniError, the first failure; the caller undoes what was made, with `delete` and the same `progress`.
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
        """Put the attachment's result into libcni's cache; `networks`: how many the container has.

        Raises IoFailureError (5).
        """
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
            raise IoFailureError(
                f"the result could not be stored: {error}",
                f"{_place(attachment)}, ADD; make room or repair the directory",
            ) from error

    def delete(
        self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None
    ) -> None:
        """Run DEL in reverse order, from 0.4.0 on with the stored result as prevResult; can be repeated.

        A failure stops no other plugin. The failures are raised as one CniError with the code of the first, and the
        cached result stays for the next try. Raises NothingLeftError if nothing is left that a later DEL could free
        (`Plugin.may_have_left`): the caller calls `forget`; ResultLeftError as `forget` does.
        """
        config = attachment.config
        previous: Result | None = None
        stored = self._stored(sandbox, attachment)
        if versions.at_least(config.cni_version, "0.4.0"):
            try:
                previous = None if stored is None else _as_seen(stored, config)
            except IncompatibleVersionError as error:
                # As libcni: a result that cannot be converted must not keep a network attached.
                log.warning("DEL of %s goes without the stored result: %s", attachment.name, error)
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
            raise NothingLeftError(failure.msg, failure.details, code=failure.code) from failure
        self.forget(sandbox, attachment)

    def _delete(
        self, attachment: Attachment, position: int, call: Invocation, netns: PodNetns, progress: Progress
    ) -> tuple[list[CniError], bool]:
        """Run the DEL of a plugin, and that of its IPAM plugin if the plugin may not have run it.

        Plugins such as host-device release no address without the namespace. One whose DEL fails may not have come so
        far; but while something else may be left, a pod may use the address. Returns the failures, and whether more
        than the interface may be left.
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
        """Remove the cached result of a network that is detached. Raises ResultLeftError."""
        try:
            self._cache.remove(attachment.config.name, sandbox.container_id, attachment.ifname)
        except OSError as error:
            raise ResultLeftError(f"cached result can't be removed, tried again later: {error}") from error

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
                f"no stored result to CHECK against ({_place(attachment)}, CHECK)",
                "was this network ever attached? if so, delete the pod and let it be made again",
            )
        for plugin in config.plugins:
            invocation = self._invocation("CHECK", sandbox, attachment, plugin, None, netns=netns)
            try:
                call = replace(invocation, prev_result=_as_seen(stored, config))
                self._plugins.recorded(plugin.type, call).run(call, netns)
            except CniError as error:
                raise self._placed(error, attachment, invocation, netns) from error

    def differences(self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns) -> list[Difference]:
        """Return the differences from the record (`compare.differences`). Raises CniError, InvalidNetnsError."""
        if attachment.result is None or not attachment.is_attached or attachment.auxiliary:
            return []
        seen, calls = _as_seen(attachment.result, attachment.config), []
        for plugin in attachment.config.plugins:
            # Every version has DEL, whose call is about the recorded result too.
            call = self._invocation("DEL", sandbox, attachment, plugin, attachment.result, netns=netns)
            found = self._plugins.recorded(plugin.type, call)
            calls.append((found, call, replace(call, verb="CHECK", prev_result=seen)))
        return compare.differences(attachment, calls, netns)

    def status(self, config: NetworkConfig) -> None:
        """Run STATUS in the list's order; the first failure ends it, with its code (50, 51 and any other).

        Skipped if the configuration is older than 1.1.0, which has no such verb.
        """
        if versions.allows(config.cni_version, "STATUS"):
            for plugin in config.plugins:
                try:
                    call = self._without_container("STATUS", config, plugin, {})
                    self._plugins.of(plugin.type, call).run(call, NO_NETNS)
                except CniError as error:
                    raise error.with_context(f'plugin type="{plugin.type}" network="{config.name}", STATUS') from error

    def gc(self, config: NetworkConfig, valid: Sequence[tuple[ContainerId, IfName]]) -> None:
        """Run GC in the list's order, with `valid` under both names of its key. A failure stops no other plugin.

        The failures are raised as one CniError with the code of the first. Skipped below 1.1.0, and if the
        configuration says `disableGC`. Unlike libcni's it deletes nothing by itself.
        """
        if config.disable_gc or not versions.allows(config.cni_version, "GC"):
            return
        pairs = [{"containerID": container_id, "ifname": ifname} for container_id, ifname in valid]
        # The first name is that of libcni and of today's SPEC, the second that of the tag spec-v1.1.0.
        extra = {"cni.dev/valid-attachments": pairs, "cni.dev/attachments": pairs}
        failures: list[CniError] = []
        for plugin in config.plugins:
            try:
                call = self._without_container("GC", config, plugin, extra)
                self._plugins.of(plugin.type, call).run(call, NO_NETNS)
            except CniError as error:
                failures.append(error.with_context(f'plugin type="{plugin.type}" network="{config.name}", GC'))
        if failures:
            raise advice.joined(failures, "GC")

    def _without_container(
        self, verb: str, config: NetworkConfig, plugin: PluginConfig, extra: Mapping[str, Any]
    ) -> Invocation:
        fields = conf.plugin_fields(config, plugin, extra=extra)
        return Invocation(verb, container_id="", netns="", ifname="", args="", path=self._bin_path, fields=fields)

    def _placed(self, error: CniError, attachment: Attachment, call: Invocation, netns: PodNetns) -> CniError:
        """Return the plugin's error with its code, its words first, then the place, and a remedy in the details."""
        place = f'plugin type="{gojson.get_str(call.fields, "type")}" {_place(attachment)}, {call.verb}'
        return advice.explained(error, call, netns, self._cache).with_context(place)

    def _stored(self, sandbox: Sandbox, attachment: Attachment) -> Result | None:
        if attachment.result is not None:
            return attachment.result
        config = attachment.config
        return self._cache.read_result(config.name, sandbox.container_id, attachment.ifname, config.cni_version)

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
            netns_override=netns is not None and netns.may_be_own,
        )


def _as_seen(value: Result, config: NetworkConfig) -> Result | None:
    """Return the result as plugins of the configuration's version see it; None if that version cannot express it.

    0.1.0 and 0.2.0 cannot express a result without addresses. Such a plugin does not fail: the Go library, which passes
    results on as they were printed, never converts there.
    """
    if not versions.at_least(config.cni_version, "0.3.0") and _object(value, config) is None:
        return None
    return result.in_version(value, config.cni_version)


def _object(value: Result, config: NetworkConfig) -> dict[str, Any] | None:
    """Return the result of `_as_seen` as a JSON object."""
    try:
        return result.to_object(value, config.cni_version)
    except IncompatibleVersionError:
        if versions.at_least(config.cni_version, "0.3.0"):
            raise
        return None


def _place(attachment: Attachment) -> str:
    return f'network="{attachment.name}" interface="{attachment.ifname}"'


def _failure(plugin: Plugin, call: Invocation, netns: PodNetns) -> list[CniError]:
    """Run DEL of the plugin, and return its error if it failed."""
    try:
        plugin.run(call, netns)
    except UnknownContainerError as error:
        # Code 3: there is nothing left that a DEL could remove (CNI SPEC section 5).
        log.debug("DEL of %s, %s: %s", call.network, plugin.type, error)
    except CniError as error:
        return [error]
    return []


def _unless_denied(call: Invocation, ask: Callable[[], bool]) -> bool:
    """Return the answer; True if the disk cannot be read."""
    try:
        return ask()
    except IoFailureError as problem:
        log.warning("%s may be left on record: %s", call.network, problem)
        return True


def _may_have_interface(attachment: Attachment, netns: PodNetns) -> bool:
    """Return True if the attachment's interface is in the namespace, or if that cannot be looked into."""
    # An auxiliary chain works on the cluster network's interface.
    if attachment.auxiliary or not netns.path or not netns.exists:
        return False
    try:
        return bool(netns.existing([attachment.ifname]))
    except OSError:
        return netns.exists
