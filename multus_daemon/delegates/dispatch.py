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
from collections.abc import Callable, Collection, Iterable
from typing import Final, Literal, TypeAlias

from multus_daemon.base.aio import in_thread
from multus_daemon.cni.errors import CniError
from multus_daemon.cni.names import IfName
from multus_daemon.delegates.find import PluginNotFoundError
from multus_daemon.netlink import netns, ops
from multus_daemon.ports import BUILT_IN, BuiltinPlugins, Invocation, PluginRunner

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
    """The PluginRunner that the chain uses.

    `off`: binaries only. `fallback`: the built-in where there is no binary. `prefer`: the built-in where there is one
    that knows all of the configuration. `excepted`: types of which only the binary is to be had for an ADD.
    """

    def __init__(
        self,
        process: PluginRunner,
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

    async def run(self, plugin_type: str, invocation: Invocation) -> bytes:
        """As PluginRunner. Raises PluginNotFoundError where neither has it."""
        outcome = "crash"
        began = time.monotonic()
        try:
            stdout = await self._choose(plugin_type, invocation)
            outcome = "success"
            return stdout
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

    async def _choose(self, plugin_type: str, invocation: Invocation) -> bytes:
        if await self._is_for_builtin(plugin_type, invocation):
            return await self._run_builtin(plugin_type, invocation)
        if invocation.verb == "ADD" and (binary := self._process.locate(plugin_type)):
            # Also where it fails: what it has made by then is for its own DEL.
            invocation.served_by[plugin_type] = binary
        mode = self._mode_of(plugin_type)
        may_leave = invocation.verb == "DEL" and plugin_type in _MASQUERADING and mode != "off"
        had_interface = may_leave and await _has_interface(invocation)
        try:
            stdout = await self._process.run(plugin_type, invocation)
        except PluginNotFoundError:
            # Not looked up first: the search is the runner's, and the file could go in between.
            if mode == "off" or not self._builtin.locate(plugin_type):
                raise
            if _added_by(plugin_type, invocation) not in ("", BUILT_IN):
                _log_replaced(plugin_type, invocation, BUILT_IN)
            return await self._run_builtin(plugin_type, invocation)
        if may_leave and not (had_interface and await in_thread(netns.is_netns, invocation.netns)):
            await self._remove_rules(plugin_type, invocation)
        return stdout

    async def _remove_rules(self, plugin_type: str, invocation: Invocation) -> None:
        """After a DEL by a binary. What fails here is logged: the plugin has said that the DEL is done."""
        try:
            await self._builtin.run(plugin_type, invocation)
        except CniError as error:
            log.warning(
                "container %s: rules that plugin %s has left can't be removed: %s",
                invocation.container_id,
                plugin_type,
                error,
            )

    async def _is_for_builtin(self, plugin_type: str, invocation: Invocation) -> bool:
        added_by = _added_by(plugin_type, invocation)
        if self._mode == "off" or not self._builtin.locate(plugin_type):
            if added_by == BUILT_IN:
                _log_replaced(plugin_type, invocation, BINARY)
            return False
        preferred = BUILT_IN if self._mode_of(plugin_type) == "prefer" else BINARY
        if (added_by or preferred) != BUILT_IN:
            return False
        unsupported = await self._builtin.unsupported(plugin_type, invocation)
        if not unsupported:
            return True
        # Without a binary the built-in says what is missing, or does the DEL.
        if binary := self._process.locate(plugin_type):
            log.debug("%s of %s is left to %s: %s", invocation.verb, plugin_type, binary, unsupported)
        return not binary

    async def _run_builtin(self, plugin_type: str, invocation: Invocation) -> bytes:
        if invocation.verb == "ADD":
            invocation.served_by[plugin_type] = BUILT_IN
        return await self._builtin.run(plugin_type, invocation)


async def _has_interface(invocation: Invocation) -> bool:
    """Whether the interface is there; also where its namespace can't be entered."""
    if not invocation.netns:
        return False
    try:
        return bool(await ops.KernelLinks().existing_links(invocation.netns, [IfName(invocation.ifname)]))
    except OSError:
        return True


def _added_by(plugin_type: str, invocation: Invocation) -> str:
    """Who did the ADD that the call is about; empty where it is about none, or nobody knows."""
    return invocation.served_by.get(plugin_type, "") if invocation.verb in _FOLLOWING else ""


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
