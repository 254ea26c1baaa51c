"""Choose how a plugin runs: its binary, or the built-in of the same name.

A built-in that does not support all of a configuration leaves the call to the binary, if there is one. CHECK and DEL
use the implementation that ran ADD, whatever was set or installed since; if it is missing, they use the other one,
except with mode `off`. A type can be excepted: its binary serves it as with `off`, and the built-in only checks and
removes what it made itself. If a DEL of the reference `bridge` or `ptp` did not find the interface as ADD made it, the
rules that the plugin leaves behind are removed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.metrics.declared import Outcome
from multus_daemon.plugins import outcome
from multus_daemon.plugins.builtin.contract import Aspect
from multus_daemon.plugins.builtin.runner import BuiltinRunner
from multus_daemon.plugins.find import PluginIsMultusError, PluginNotFoundError
from multus_daemon.plugins.plugin import BinaryRunner, Difference, Program
from multus_daemon.runtime import timeline
from multus_daemon.spec.attachment import BUILT_IN, Invocation
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError, IoFailureError
from multus_daemon.spec.cni.result import Result
from multus_daemon.spec.netconf.primary import OWN_TYPES

log = logging.getLogger(__name__)

# These ask the interface which addresses they masquerade, so a DEL that does not find them leaves the rules behind: a
# DEL from the spool, since the runtime has removed the namespace; a DEL after one that was killed, with the daemon,
# between interface and rules; and a DEL of an interface whose address a guest has now.
_MASQUERADING: Final = frozenset({"bridge", "ptp"})
_DELEGATING: Final = "flannel"
# These verbs are about the result of an ADD.
_FOLLOWING: Final = frozenset({"CHECK", "DEL"})
_NO_PROGRAM: Final = Program()
_TYPES_DEPTH: Final = 4
"""Levels of a plugin's configuration in which another plugin can be named."""
BINARY: Final = "binary"
"""Value of `served_by` for a binary without a known path: an upstream daemon ran it."""

Mode: TypeAlias = Literal["off", "fallback", "prefer"]

Observe: TypeAlias = Callable[[str, str, Outcome, float], None]
"""Called after each run: plugin type, verb, outcome, seconds."""


class Dispatcher:
    """Chooses an implementation for each plugin and runs it.

    `off`: binaries only. `fallback`: the built-in if there is no binary. `prefer`: the built-in if there is one that
    supports all of the configuration. `excepted`: types for which ADD uses only the binary.
    """

    def __init__(
        self,
        process: BinaryRunner,
        builtin: BuiltinRunner,
        mode: Mode,
        *,
        excepted: Collection[str] = (),
        observe: Observe | None = None,
    ) -> None:
        self._process = process
        self._builtin = builtin
        self._mode: Mode = mode
        self._excepted = frozenset(excepted)
        self._observe = observe

    def locate(self, plugin_type: str) -> str:
        """Return `built-in` or the binary's path, for a configuration that both support; empty if there is neither.

        Raises IoFailureError if the disk hangs.
        """
        return self._server(plugin_type, self._process.locate)

    def chosen(self, plugin_type: str, programs: Mapping[str, Program]) -> str:
        """Do the work of `locate` with the binaries that `programs` found, without waiting."""
        return self._server(plugin_type, lambda name: programs.get(name, _NO_PROGRAM).path)

    def waits(self, plugin_type: str) -> bool:
        """Report whether an ADD by the built-in may wait for seconds."""
        return self._builtin.waits(plugin_type)

    def shadowed(self, plugin_types: Iterable[str]) -> dict[str, str]:
        """Return the paths of binaries that a preferred built-in shadows, by type. Raises IoFailureError."""
        preferred = [name for name in plugin_types if self._mode_of(name) == "prefer" and self._builtin.locate(name)]
        found = {name: self._process.locate(name) for name in preferred}
        return {name: path for name, path in found.items() if path}

    def programs(self, calls: Iterable[tuple[str, Invocation]]) -> Mapping[str, Program]:
        """Return the binaries that the choice for these calls depends on, by type. Raises IoFailureError."""
        return {name: self._program(name) for name in {name for call in calls for name in self._needed(*call)}}

    def _needed(self, plugin_type: str, invocation: Invocation) -> Iterator[str]:
        """Yield the types whose binary counts; a built-in that certainly serves a call saves the look at the disk."""
        is_built_in = self._mode_of(plugin_type) == "prefer" and self._builtin.locate(plugin_type)
        if not is_built_in or self._builtin.unsupported(plugin_type, invocation):
            yield plugin_type
            yield from _named(invocation.fields)
            return
        # For a configuration that cannot be read no binary counts.
        with contextlib.suppress(CniError):
            for name, called in self._builtin.called_by(plugin_type, invocation).items():
                if name != plugin_type:
                    yield from self._needed(name, called)

    def _program(self, plugin_type: str) -> Program:
        path = self._process.locate(plugin_type)
        try:
            if path:
                self._process.refuse_multus(plugin_type, path)
        except PluginIsMultusError as error:
            return Program(path, error)
        return Program(path)

    def choose(self, plugin_type: str, invocation: Invocation, programs: Mapping[str, Program]) -> Mapping[str, str]:
        """Return, by type, what serves the plugin and those that a built-in calls: `built-in`, a path, or empty.

        Raises CniError for a configuration that ADD would certainly refuse, PluginIsMultusError.
        """
        if plugin_type in OWN_TYPES:
            raise PluginIsMultusError(plugin_type)
        program = programs.get(plugin_type, _NO_PROGRAM)
        served_by = {plugin_type: self._server(plugin_type, lambda _: program.path, invocation)}
        if served_by[plugin_type] == BUILT_IN:
            for name, called in self._builtin.validate(plugin_type, invocation).items():
                if name not in served_by:
                    served_by |= self.choose(name, called, programs)
        elif served_by[plugin_type]:
            if program.refusal:
                raise program.refusal
            _refuse_ipam(invocation, programs)
        return served_by

    def _server(self, plugin_type: str, locate: Callable[[str], str], invocation: Invocation | None = None) -> str:
        """Return `built-in` or the path that serves an ADD; empty if there is neither.

        `invocation`: None if both support the configuration.
        """
        mode = self._mode_of(plugin_type)
        built_in = self._builtin.locate(plugin_type) if mode != "off" else ""
        if not built_in or mode != "prefer":
            return locate(plugin_type) or built_in
        unsupported = self._builtin.unsupported(plugin_type, invocation) if invocation else ""
        if not unsupported:
            return built_in
        if invocation and (binary := locate(plugin_type)):
            log.debug("%s of %s is left to %s: %s", invocation.verb, plugin_type, binary, unsupported)
            return binary
        # Without a binary the built-in says what is missing.
        return built_in

    def _mode_of(self, plugin_type: str) -> Mode:
        return "off" if plugin_type in self._excepted else self._mode

    def kept(self, plugin_type: str, invocation: Invocation) -> bool:
        """Report whether the plugin may keep something on the node, such as an address. Raises IoFailureError."""
        if plugin_type in _MASQUERADING:
            return _masquerading(plugin_type, invocation) is not None
        try:
            return self._builtin.kept(plugin_type, invocation)
        except IoFailureError:
            raise
        except CniError:
            # It cannot read its configuration, so no ADD came past it.
            return False

    def run(self, plugin_type: str, invocation: Invocation, netns: PodNetns) -> Result:
        """Run the plugin as `PluginRunner.run` does. Raises PluginNotFoundError if there is neither."""
        how: Outcome = "error"
        shown = "crash"
        began = time.monotonic()
        try:
            where = self._where(plugin_type, invocation)
            if where == BUILT_IN:
                result = self._builtin.run(plugin_type, invocation, netns)
            elif invocation.verb in _FOLLOWING:
                result = self._follow(plugin_type, invocation, netns)
            else:
                result = self._process.run(plugin_type, invocation, path=where)
            how = shown = "success"
            return result
        except BaseException as error:
            how = outcome.of(error)
            shown = str(error.code) if isinstance(error, CniError) else "crash" if isinstance(error, Exception) else how
            raise
        finally:
            seconds = time.monotonic() - began
            if self._observe:
                self._observe(plugin_type, invocation.verb, how, seconds)
            timeline.note(f"plugin {plugin_type}: {invocation.verb} {shown}", seconds)

    def _where(self, plugin_type: str, invocation: Invocation) -> str:
        """Return `built-in`, or the path of the binary; empty: the binary must be searched."""
        added_by = invocation.served_by.get(plugin_type, "")
        if invocation.verb not in _FOLLOWING:
            return added_by or self._server(plugin_type, self._process.locate, invocation)
        if self._mode == "off" or not self._builtin.locate(plugin_type):
            if added_by == BUILT_IN:
                _log_replaced(plugin_type, invocation, BINARY)
            return ""
        preferred = BUILT_IN if self._mode_of(plugin_type) == "prefer" else BINARY
        if (added_by or preferred) != BUILT_IN:
            return ""
        unsupported = self._builtin.unsupported(plugin_type, invocation)
        # Without a binary the built-in says what is missing, or does the DEL.
        return "" if unsupported and self._process.locate(plugin_type) else BUILT_IN

    def differences(
        self, plugin_type: str, invocation: Invocation, netns: PodNetns, not_compared: frozenset[Aspect] = frozenset()
    ) -> list[Difference] | None:
        """Compare the kernel with the recorded result by the built-in, as `BuiltinRunner.differences` does.

        None if a binary did the ADD, or is not known not to have done it, or if no built-in may run. Raises CniError.
        """
        if invocation.served_by.get(plugin_type) != BUILT_IN or self._where(plugin_type, invocation) != BUILT_IN:
            return None
        if delegated := self._builtin.delegate(plugin_type, invocation, netns):
            return self.differences(*delegated, netns, not_compared)
        return self._builtin.differences(plugin_type, invocation, netns, not_compared)

    def _follow(self, plugin_type: str, invocation: Invocation, netns: PodNetns) -> Result:
        """Run a CHECK or DEL by the binary, or by the built-in if there is no binary any more."""
        mode = self._mode_of(plugin_type)
        masquerading = _masquerading(plugin_type, invocation) if invocation.verb == "DEL" and mode != "off" else None
        had_addresses = masquerading is not None and _has_addresses(invocation, netns)
        try:
            result = self._process.run(plugin_type, invocation)
        except PluginNotFoundError:
            # Not looked up before: the runner searches, and the file could disappear in between.
            if mode == "off" or not self._builtin.locate(plugin_type):
                raise
            if invocation.served_by.get(plugin_type, "") not in ("", BUILT_IN):
                _log_replaced(plugin_type, invocation, BUILT_IN)
            return self._builtin.run(plugin_type, invocation, netns)
        if masquerading is not None and not (had_addresses and netns.exists):
            try:
                self._builtin.remove_rules(*masquerading, netns)
            except CniError as error:
                raise error.with_context(f"rules that the binary of {plugin_type} has left") from error
        return result


def _named(value: Mapping[str, Any], depth: int = 1) -> Iterator[str]:
    """Yield the types that a configuration names wherever a plugin may look for another one to call."""
    plugin_type = gojson.get(value, "type")
    if isinstance(plugin_type, str) and plugin_type:
        yield plugin_type
    for item in value.values():
        if isinstance(item, dict) and depth < _TYPES_DEPTH:
            yield from _named(item, depth + 1)


def _refuse_ipam(invocation: Invocation, programs: Mapping[str, Program]) -> None:
    """Raise PluginIsMultusError if the IPAM plugin that a binary will call is Multus."""
    try:
        ipam_type = gojson.get_str(gojson.get_object(invocation.fields, "ipam") or {}, "type") or ""
    except gojson.JsonError:
        return
    if ipam_type in OWN_TYPES:
        raise PluginIsMultusError(ipam_type)
    if refusal := programs.get(ipam_type, _NO_PROGRAM).refusal:
        raise refusal


def _masquerading(plugin_type: str, invocation: Invocation) -> tuple[str, Invocation] | None:
    """Return the plugin that makes rules, this one or its delegate, with its invocation; None if there is none."""
    try:
        fields = dict(invocation.fields)
        if plugin_type == _DELEGATING:
            # Unless the delegate says so, flanneld decided at the time of the ADD whether it masquerades.
            fields = {"ipMasq": True, **(gojson.get_object(fields, "delegate") or {})}
            fields |= {key: invocation.fields[key] for key in ("cniVersion", "name") if key in invocation.fields}
            plugin_type = fields.get("type", "bridge")
        makes_rules = gojson.get_bool(fields, "ipMasq") or gojson.get_bool(fields, "macspoofchk")
    except gojson.JsonError:
        return None
    if not makes_rules or plugin_type not in _MASQUERADING:
        return None
    return plugin_type, replace(invocation, fields=fields)


def _has_addresses(invocation: Invocation, netns: PodNetns) -> bool:
    """Report whether the interface has the addresses that ADD gave it; True if its namespace cannot be entered."""
    if not netns.path:
        return False
    try:
        found = netns.addresses(invocation.ifname)
    except OSError:
        return True
    added = invocation.prev_result or invocation.recorded
    wanted = {ipaddress.ip_address(ip.ip) for ip in added.ips} if added else set()
    has = {item.ip for item in found or () if not item.ip.is_link_local}
    return wanted <= has if wanted else bool(has)


def _log_replaced(plugin_type: str, invocation: Invocation, other: str) -> None:
    log.warning(
        "container %s, interface %s: %s of %s by the %s: the one that did the ADD (%s) is not available",
        invocation.container_id,
        invocation.ifname,
        invocation.verb,
        plugin_type,
        other,
        invocation.served_by[plugin_type],
    )
