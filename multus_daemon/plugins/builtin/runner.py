"""Run built-in plugins: check a call as every CNI plugin does, then run it in this process."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, ParamSpec, TypeVar, cast

from multus_daemon import deadlines
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin.contract import Aspect, Call, Plugin, called_by
from multus_daemon.plugins.plugin import NO_NETNS, Difference, HostTools, PluginRunner
from multus_daemon.runtime import deadline
from multus_daemon.runtime.threads import NoThreadError
from multus_daemon.spec.attachment import BUILT_IN, Invocation
from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    InternalError,
    InvalidNetworkConfigError,
    TryAgainLaterError,
    UnsupportedFieldError,
    from_code,
)
from multus_daemon.spec.cni.result import Result, from_object, in_version

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

# Imported at first use: the command `host-local` must not load the netlink code.
PLUGINS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bridge": "multus_daemon.plugins.builtin.bridge.plugin",
        "flannel": "multus_daemon.plugins.builtin.flannel",
        "host-local": "multus_daemon.plugins.builtin.host_local.plugin",
        "loopback": "multus_daemon.plugins.builtin.loopback",
        "macvlan": "multus_daemon.plugins.builtin.macvlan",
        "passthru": "multus_daemon.plugins.builtin.passthru",
        "ptp": "multus_daemon.plugins.builtin.ptp",
        "static": "multus_daemon.plugins.builtin.static",
        "tuning": "multus_daemon.plugins.builtin.tuning",
    }
)
# An ADD waits one or two seconds for duplicate address detection of IPv6 on a real segment. The networks of a pod wait
# at the same time if each has a thread.
WAITING: Final = frozenset({"macvlan"})


class _Guard:
    """Turn every error of a plugin into a CniError, with paths as the host has them; `what` is for messages.

    A class: a generator takes four times as long.
    """

    __slots__ = ("_plugin_type", "_prefix", "_timeout", "_what")

    def __init__(self, plugin_type: str, what: str, prefix: str, timeout: float) -> None:
        self._plugin_type = plugin_type
        self._what = what
        self._prefix = prefix
        self._timeout = timeout

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, Exception):
            return
        if isinstance(error, CniError):
            if self._prefix not in str(error):
                return
            msg, details = (text.replace(self._prefix, "/") for text in (error.msg, error.details))
            raise from_code(error.code, msg, details) from error
        if isinstance(error, NoThreadError):
            raise TryAgainLaterError(str(error), f'{BUILT_IN} "{self._plugin_type}", {self._what}') from error
        if isinstance(error, deadline.ExpiredError):
            raise TryAgainLaterError(
                f'plugin "{self._plugin_type}" did not end within {self._timeout:g} s and was ended',
                f"{BUILT_IN}, {self._what}",
            ) from error
        raise InternalError(str(error).replace(self._prefix, "/") or type(error).__name__) from error


class BuiltinRunner:
    """Runs the plugins of PLUGINS, for many calls at a time."""

    def __init__(
        self,
        host_root: Path,
        *,
        ipam: PluginRunner | None = None,
        tools: HostTools | None = None,
        timeout: float = deadlines.DELEGATE_SECONDS,
        plugins: Mapping[str, Plugin] | None = None,
    ) -> None:
        """`host_root`: root of the host's files; `timeout` of one call in seconds.

        `ipam` runs the IPAM plugins that configurations name; None: this runner. `tools` are needed for masquerading.
        `plugins` adds to PLUGINS and replaces some of them.
        """
        self.ipam: PluginRunner = self if ipam is None else ipam
        """Replaced later by the composition root, which makes the dispatcher over this runner after it."""
        self._host_root = host_root
        # Errors show paths as the host has them. No error has a NUL.
        self._prefix = f"{host_root}/" if host_root != host_root.parent else "\0"
        self._tools = tools
        self._timeout = timeout
        self._plugins: dict[str, Plugin] = dict(plugins or {})

    def locate(self, plugin_type: str) -> str:
        """Return `built-in`, or empty for a type without a built-in."""
        return BUILT_IN if plugin_type in PLUGINS or plugin_type in self._plugins else ""

    def waits(self, plugin_type: str) -> bool:
        """Report whether an ADD may wait for seconds."""
        return plugin_type in WAITING

    def unsupported(self, plugin_type: str, invocation: Invocation) -> str:
        """Return a part of the configuration that the built-in does not support (`Plugin.unsupported`); empty if none.

        Empty also for a configuration that cannot be read, which `run` refuses.
        """
        try:
            return self._call(plugin_type, invocation)[2]
        except CniError:
            return ""

    def validate(self, plugin_type: str, invocation: Invocation) -> Mapping[str, Invocation]:
        """Raise CniError if ADD would refuse the configuration; return `called_by`."""
        plugin, call, unsupported = self._call(plugin_type, invocation)
        try:
            if unsupported:
                _refuse(plugin_type, call, unsupported)
            plugin.validate(call)
        except CniError as error:
            raise error.with_context(f'plugin "{plugin_type}"') from error
        return _called_by(plugin, call)

    def called_by(self, plugin_type: str, invocation: Invocation) -> Mapping[str, Invocation]:
        """Return the calls of other plugins that an ADD makes, by type. Raises CniError."""
        plugin, call, _ = self._call(plugin_type, invocation)
        return _called_by(plugin, call)

    def kept(self, plugin_type: str, invocation: Invocation) -> bool:
        """Report whether the plugin may keep something on the node for the container. Raises CniError."""
        if self.locate(plugin_type):
            plugin, call, _ = self._call(plugin_type, invocation)
            if keeper := getattr(plugin, "kept", None):
                return bool(keeper(call))
        return True

    def run(self, plugin_type: str, invocation: Invocation, netns: PodNetns) -> Result:
        """Check the configuration and run the verb; return the result as the configuration's version can express it.

        Raises CniError: those of `conf.checked`, InvalidNetworkConfigError for a type without a built-in,
        UnsupportedFieldError for a key that the plugin does not support, TryAgainLaterError after the timeout, and the
        plugin's own. Any other exception of the plugin is chained to an InternalError (999) with its text.
        """
        with self._guard(plugin_type, invocation.verb), deadline.within(self._timeout):
            plugin, call, unsupported = self._call(plugin_type, invocation, netns)
            if unsupported:
                _refuse(plugin_type, call, unsupported)
            match invocation.verb:
                case "ADD":
                    return in_version(plugin.add(call, netns), call.cni_version)
                case "DEL":
                    plugin.delete(call, netns)
                case "CHECK":
                    plugin.check(call, netns)
                case "STATUS":
                    plugin.status(call)
                case _:
                    # GC: the reference plugins have no handler, which is success.
                    pass
            return Result()

    def differences(
        self, plugin_type: str, invocation: Invocation, netns: PodNetns, not_compared: frozenset[Aspect] = frozenset()
    ) -> list[Difference]:
        """Compare the kernel with the recorded result, which is the invocation's previous result; `verb` is DEL.

        `not_compared`: see `Call`. The repairs raise CniError, and have the timeout of a call each. Raises as `run`.
        """
        with self._guard(plugin_type, "comparison"), deadline.within(self._timeout):
            plugin, call, unsupported = self._call(plugin_type, invocation, netns)
            if unsupported:
                raise _not_supported(plugin_type, call, unsupported)
            compare = getattr(plugin, "differences", None)
            found = compare(replace(call, not_compared=not_compared), netns) if compare else []
        return [
            item
            if item.repair is None
            else replace(item, repair=functools.partial(self._repair, plugin_type, item.repair))
            for item in found
        ]

    def _repair(self, plugin_type: str, repair: Callable[[], object]) -> None:
        with self._guard(plugin_type, "repair"), deadline.within(self._timeout):
            repair()

    def delegate(self, plugin_type: str, invocation: Invocation, netns: PodNetns) -> tuple[str, Invocation] | None:
        """Return the plugin that does this one's work, with its call; None if there is none. Raises CniError."""
        plugin, call, _ = self._call(plugin_type, invocation, netns)
        delegate = getattr(plugin, "delegate", None)
        return delegate(call) if delegate else None

    def _guard(self, plugin_type: str, what: str) -> _Guard:
        return _Guard(plugin_type, what, self._prefix, self._timeout)

    def remove_rules(self, plugin_type: str, invocation: Invocation, netns: PodNetns) -> None:
        """Remove the rules that a DEL by the binary of `bridge` or `ptp` left behind. Raises CniError."""
        from multus_daemon.plugins.builtin import masquerade, spoofing  # the kernel: a program does without

        _, call, _ = self._call(plugin_type, invocation, netns)
        if call.tools is None:
            return
        try:
            with deadline.within(self._timeout):
                masquerade.forget(call, masquerade.remove_link(call, netns))
                if gojson.get_bool(call.fields, "macspoofchk"):
                    spoofing.remove(call)
        except gojson.JsonError:
            # Every ADD refuses this configuration.
            return
        except deadline.ExpiredError as error:
            raise TryAgainLaterError(f"the removal of rules did not end within {self._timeout:g} s") from error

    def _call(
        self, plugin_type: str, invocation: Invocation, netns: PodNetns | None = None
    ) -> tuple[Plugin, Call, str]:
        """Read a configuration once; return the plugin, its call, and a part that it does not support (`key: value`).

        `netns`: None to read only the configuration, without the previous result. Raises CniError.
        """
        plugin = self._plugins.get(plugin_type) or self._load(plugin_type)
        verb, fields = invocation.verb, invocation.fields
        memory = fields.read if isinstance(fields, conf.PluginFields) else None
        key = (plugin.unsupported, verb, self._tools is None)
        if memory is not None and key in memory:
            name, version, unsupported = memory[key]
        else:
            config, unsupported = conf.checked(verb, fields), None
            name, version = config.name, config.cni_version
        previous = None if netns is None else _prev_result(invocation, name, version)
        netns = netns or NO_NETNS
        call = Call(invocation, name, version, previous, self._host_root, self.ipam, netns, self._tools)
        if unsupported is None:
            try:
                unsupported = plugin.unsupported(call)
            except gojson.JsonError:
                unsupported = ""
            if memory is not None:
                memory[key] = name, version, unsupported
        return plugin, call, unsupported

    def _load(self, plugin_type: str) -> Plugin:
        if plugin_type not in PLUGINS:
            known = ", ".join(sorted({*PLUGINS, *self._plugins}))
            raise InvalidNetworkConfigError(
                f'failed to find plugin "{plugin_type}" among the built-in ones', f"those are {known}"
            )
        module = cast(Plugin, importlib.import_module(PLUGINS[plugin_type]))
        self._plugins[plugin_type] = module
        return module


def _called_by(plugin: Plugin, call: Call) -> Mapping[str, Invocation]:
    called: Mapping[str, Invocation] = getattr(plugin, "called_by", called_by)(call)
    return called


def _refuse(plugin_type: str, call: Call, found: str) -> None:
    """Raise UnsupportedFieldError; but let a DEL and a GC do what they can, since they would be repeated for ever."""
    if call.invocation.verb in ("DEL", "GC"):
        log.warning(
            "network %s: %s by the built-in %s, to which %s means nothing",
            call.name,
            call.invocation.verb,
            plugin_type,
            found,
        )
        return
    raise _not_supported(plugin_type, call, found)


def _not_supported(plugin_type: str, call: Call, found: str) -> UnsupportedFieldError:
    return UnsupportedFieldError(
        f"{found} is not supported by the built-in {plugin_type}",
        f"network {call.name!r}: correct the key, or install the binary of {plugin_type} in the CNI bin directory",
    )


def _prev_result(invocation: Invocation, name: str, version: str) -> Result | None:
    """Return the previous result; for a DEL the result of the ADD. Raises DecodingFailureError for an ADD and a CHECK.

    A DEL continues without a result that cannot be parsed: the reference plugins ignore it then, and a DEL that fails
    leaks what it should remove.
    """
    if (known := invocation.prev_result or invocation.recorded) is not None:
        return known
    try:
        fields = gojson.get_object(invocation.fields, "prevResult")
        return None if fields is None else from_object(fields, version)
    except (gojson.JsonError, CniError) as error:
        if invocation.verb not in ("ADD", "CHECK"):
            log.warning("network %s: %s goes on without prevResult: %s", name, invocation.verb, error)
            return None
        raise DecodingFailureError(f"could not parse prevResult: {error}") from error
