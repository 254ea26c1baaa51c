"""Chooses how a plugin runs: its binary, or the built-in of the same name."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, TypeAlias

from multus_daemon.cni.errors import CniError
from multus_daemon.delegates.find import PluginNotFoundError
from multus_daemon.ports import Invocation, PluginRunner

Mode: TypeAlias = Literal["off", "fallback", "prefer"]

Observe: TypeAlias = Callable[[str, str, str, float], None]
"""Called after each run: plugin type, verb, outcome (`success`, a CNI error code, `cancelled` or `crash`), seconds."""


def observe_nothing(plugin_type: str, verb: str, outcome: str, seconds: float) -> None:
    """The default observer."""


class Dispatcher:
    """The PluginRunner that the chain uses.

    `off`: binaries only. `fallback`: the built-in where there is no binary. `prefer`: the built-in where there is one.
    """

    def __init__(
        self, process: PluginRunner, builtin: PluginRunner, mode: Mode, *, observe: Observe = observe_nothing
    ) -> None:
        self._process = process
        self._builtin = builtin
        self._mode: Mode = mode
        self._observe = observe

    def locate(self, plugin_type: str) -> str:
        """As PluginRunner, of the one that would be chosen."""
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
        if self._mode == "prefer" and self._builtin.locate(plugin_type):
            return await self._builtin.run(plugin_type, invocation)
        try:
            return await self._process.run(plugin_type, invocation)
        except PluginNotFoundError:
            # Not looked up first: the search is the runner's, and the file could go in between.
            if self._mode != "fallback" or not self._builtin.locate(plugin_type):
                raise
        return await self._builtin.run(plugin_type, invocation)
