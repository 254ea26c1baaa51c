"""Chooses how a plugin runs: its binary, or the built-in of the same name.

A built-in that does not know all that a configuration asks for leaves the call to the binary, if there is one. CHECK
and DEL are done by the one that did the ADD, whatever has been set or installed since; only `off` means never, and who
is not to be had any more is replaced by the other. A type can be excepted: its binary serves it as with `off`, and the
built-in only checks and removes what it has made itself. A DEL of the reference `bridge` or `ptp` whose interface is
gone is followed by the built-in's, which removes what it leaves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final, Literal, TypeAlias

from multus_daemon.attachment import BUILT_IN, Invocation
from multus_daemon.cni.errors import CniError
from multus_daemon.cni.names import IfName
from multus_daemon.cni.result import Result
from multus_daemon.delegates.find import PluginNotFoundError
from multus_daemon.netlink import netns, ops
from multus_daemon.ports import BinaryRunner, BuiltinPlugins

log = logging.getLogger(__name__)

# They ask the interface which addresses they masquerade, so a DEL after it leaves the rules of iptables behind. Each
# DEL from the spool comes after it, as the runtime has removed the namespace by then; so does one that is repeated
# because the first was killed, with the daemon, between interface and rules.
_MASQUERADING: Final = frozenset({"bridge", "ptp"})

# They are about what an ADD has made.
_FOLLOWING: Final = frozenset({"CHECK", "DEL"})
BINARY: Final = "binary"
"""What `served_by` says for a binary of which no more is known: an upstream daemon ran it."""

Mode: TypeAlias = Literal["off", "fallback", "prefer"]

Observe: TypeAlias = Callable[[str, str, str, float], None]
"""Called after each run: plugin type, verb, outcome (`success`, a CNI error code, `cancelled` or `crash`), seconds."""


def observe_nothing(plugin_type: str, verb: str, outcome: str, seconds: float) -> None:
    """The default observer."""


class Dispatcher:
    """The ChoosingRunner that the chain uses.

    `off`: binaries only. `fallback`: the built-in where there is no binary. `prefer`: the built-in where there is one
    that knows all of the configuration. `excepted`: types of which only the binary is to be had for an ADD.
    """

    def __init__(
        self,
        process: BinaryRunner,
        builtin: BuiltinPlugins,
        mode: Mode,
        *,
        excepted: Collection[str] = (),
        observe: Observe = observe_nothing,
    ) -> None:
        self._process = process
        self._builtin = builtin
        self._mode: Mode = mode
        self._excepted = frozenset(excepted)
        self._observe = observe

    def locate(self, plugin_type: str) -> str:
        """As PluginRunner, of the one that would be chosen, for a configuration that both know."""
        match self._mode_of(plugin_type):
            case "off":
                return self._process.locate(plugin_type)
            case "fallback":
                return self._process.locate(plugin_type) or self._builtin.locate(plugin_type)
            case "prefer":
                return self._builtin.locate(plugin_type) or self._process.locate(plugin_type)

    def waits(self, plugin_type: str) -> bool:
        """See `ports.ChoosingRunner`."""
        return self._builtin.waits(plugin_type)

    def choose(self, plugin_type: str, invocation: Invocation) -> Mapping[str, str]:
        """See `ports.ChoosingRunner`."""
        served_by = {plugin_type: self._server(plugin_type, invocation)}
        if served_by[plugin_type] == BUILT_IN:
            for name, fields in self._builtin.called_by(plugin_type, invocation).items():
                if name not in served_by:
                    served_by |= self.choose(name, replace(invocation, fields=fields))
        return served_by

    def _server(self, plugin_type: str, invocation: Invocation) -> str:
        """Who serves what is attached anew; empty where nobody does."""
        mode = self._mode_of(plugin_type)
        built_in = self._builtin.locate(plugin_type) if mode != "off" else ""
        if built_in and mode == "prefer":
            unsupported = self._builtin.unsupported(plugin_type, invocation)
            if not unsupported:
                return built_in
            # Without a binary the built-in says what is missing.
            if binary := self._process.locate(plugin_type):
                # Without the value, which may be a password.
                key = unsupported.partition(":")[0]
                log.debug("%s of %s is left to %s: %s", invocation.verb, plugin_type, binary, key)
                return binary
            return built_in
        return self._process.locate(plugin_type) or built_in

    def run(self, plugin_type: str, invocation: Invocation) -> Result:
        """As PluginRunner. Raises PluginNotFoundError where neither has it."""
        outcome = "crash"
        began = time.monotonic()
        try:
            if invocation.verb in _FOLLOWING:
                made = self._follow(plugin_type, invocation)
            elif (where := invocation.served_by.get(plugin_type) or self._server(plugin_type, invocation)) == BUILT_IN:
                made = self._builtin.run(plugin_type, invocation)
            else:
                made = self._process.run(plugin_type, invocation, where)
            outcome = "success"
            return made
        except CniError as error:
            outcome = str(error.code)
            raise
        except BaseException as error:
            outcome = "crash" if isinstance(error, Exception) else "cancelled"
            raise
        finally:
            self._observe(plugin_type, invocation.verb, outcome, time.monotonic() - began)

    def shadowed(self, plugin_types: Iterable[str]) -> dict[str, str]:
        """Those of the types that a built-in serves though there is a binary, with its path. May touch the disk."""
        preferred = [name for name in plugin_types if self._mode_of(name) == "prefer" and self._builtin.locate(name)]
        found = {name: self._process.locate(name) for name in preferred}
        return {name: path for name, path in found.items() if path}

    def _mode_of(self, plugin_type: str) -> Mode:
        """The mode for what is attached anew."""
        return "off" if plugin_type in self._excepted else self._mode

    def _follow(self, plugin_type: str, invocation: Invocation) -> Result:
        """By the one that did the ADD; where that is not to be had any more, by the other."""
        if self._follows_builtin(plugin_type, invocation):
            return self._builtin.run(plugin_type, invocation)
        mode = self._mode_of(plugin_type)
        may_leave = invocation.verb == "DEL" and plugin_type in _MASQUERADING and mode != "off"
        had_interface = may_leave and _has_interface(invocation)
        try:
            made = self._process.run(plugin_type, invocation)
        except PluginNotFoundError:
            # Not looked up first: the search is the runner's, and the file could go in between.
            if mode == "off" or not self._builtin.locate(plugin_type):
                raise
            if invocation.served_by.get(plugin_type, "") not in ("", BUILT_IN):
                _log_replaced(plugin_type, invocation, BUILT_IN)
            return self._builtin.run(plugin_type, invocation)
        if may_leave and not (had_interface and netns.is_netns(invocation.netns)):
            self._remove_rules(plugin_type, invocation)
        return made

    def _remove_rules(self, plugin_type: str, invocation: Invocation) -> None:
        """After a DEL by a binary. What fails here is logged: the plugin has said that the DEL is done."""
        try:
            self._builtin.run(plugin_type, invocation)
        except CniError as error:
            log.warning(
                "container %s: rules that plugin %s has left can't be removed: %s",
                invocation.container_id,
                plugin_type,
                error,
            )

    def _follows_builtin(self, plugin_type: str, invocation: Invocation) -> bool:
        added_by = invocation.served_by.get(plugin_type, "")
        if self._mode == "off" or not self._builtin.locate(plugin_type):
            if added_by == BUILT_IN:
                _log_replaced(plugin_type, invocation, BINARY)
            return False
        preferred = BUILT_IN if self._mode_of(plugin_type) == "prefer" else BINARY
        if (added_by or preferred) != BUILT_IN:
            return False
        unsupported = self._builtin.unsupported(plugin_type, invocation)
        # Without a binary the built-in says what is missing, or does the DEL.
        return not (unsupported and self._process.locate(plugin_type))


def _has_interface(invocation: Invocation) -> bool:
    """Whether the interface is there; also where its namespace can't be entered."""
    if not invocation.netns:
        return False
    try:
        return bool(ops.KernelLinks().existing_links(invocation.netns, [IfName(invocation.ifname)]))
    except OSError:
        return True


def _log_replaced(plugin_type: str, invocation: Invocation, other: str) -> None:
    log.warning(
        "container %s, interface %s: %s of %s by the %s, as what did the ADD (%s) is not to be had",
        invocation.container_id,
        invocation.ifname,
        invocation.verb,
        plugin_type,
        other,
        invocation.served_by[plugin_type],
    )
