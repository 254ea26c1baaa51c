"""Chooses how a plugin runs: its binary, or the built-in of the same name.

A built-in that does not know all that a configuration asks for leaves the call to the binary, if there is one. A DEL
of the reference `bridge` or `ptp` in a namespace that is gone is followed by the built-in's, which removes what it
leaves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from multus_daemon.base.aio import in_thread
from multus_daemon.cni.errors import CniError
from multus_daemon.delegates.find import PluginNotFoundError
from multus_daemon.netlink import netns
from multus_daemon.ports import BuiltinPlugins, Invocation, PluginRunner

logger = logging.getLogger(__name__)

# They ask the interface which addresses they masquerade, so a DEL after it leaves the rules of iptables behind. Each
# DEL from the spool comes after it, as the runtime has removed the namespace by then.
_MASQUERADING: Final = frozenset({"bridge", "ptp"})

Mode: TypeAlias = Literal["off", "fallback", "prefer"]

Observe: TypeAlias = Callable[[str, str, str, float], None]
"""Called after each run: plugin type, verb, outcome (`success`, a CNI error code, `cancelled` or `crash`), seconds."""


def observe_nothing(plugin_type: str, verb: str, outcome: str, seconds: float) -> None:
    """The default observer."""


class Dispatcher:
    """The PluginRunner that the chain uses.

    `off`: binaries only. `fallback`: the built-in where there is no binary. `prefer`: the built-in where there is one
    that knows all of the configuration.
    """

    def __init__(
        self, process: PluginRunner, builtin: BuiltinPlugins, mode: Mode, *, observe: Observe = observe_nothing
    ) -> None:
        self._process = process
        self._builtin = builtin
        self._mode: Mode = mode
        self._observe = observe

    def locate(self, plugin_type: str) -> str:
        """As PluginRunner, of the one that would be chosen, for a configuration that both know."""
        match self._mode:
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

    async def _choose(self, plugin_type: str, invocation: Invocation) -> bytes:
        if self._mode == "prefer" and await self._prefers_builtin(plugin_type, invocation):
            return await self._builtin.run(plugin_type, invocation)
        try:
            stdout = await self._process.run(plugin_type, invocation)
        except PluginNotFoundError:
            # Not looked up first: the search is the runner's, and the file could go in between.
            if self._mode != "fallback" or not self._builtin.locate(plugin_type):
                raise
        else:
            await self._remove_rules(plugin_type, invocation)
            return stdout
        return await self._builtin.run(plugin_type, invocation)

    async def _remove_rules(self, plugin_type: str, invocation: Invocation) -> None:
        """After a DEL by a binary. What fails here is logged: the plugin has said that the DEL is done."""
        if invocation.verb != "DEL" or plugin_type not in _MASQUERADING or self._mode == "off":
            return
        if invocation.netns:
            lives = await in_thread(netns.is_netns, invocation.netns)
            if lives:
                return
        try:
            await self._builtin.run(plugin_type, invocation)
        except CniError as error:
            logger.warning(
                "container %s: rules that plugin %s has left can't be removed: %s",
                invocation.container_id,
                plugin_type,
                error,
            )

    async def _prefers_builtin(self, plugin_type: str, invocation: Invocation) -> bool:
        if not self._builtin.locate(plugin_type):
            return False
        unsupported = await self._builtin.unsupported(plugin_type, invocation)
        if not unsupported:
            return True
        # Without a binary the built-in says what is missing, or does the DEL.
        if binary := self._process.locate(plugin_type):
            logger.debug("%s of %s is left to %s: %s", invocation.verb, plugin_type, binary, unsupported)
        return not binary
