"""Readiness as a set of named gates, each open or closed with a reason."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping


class Gates:
    """Named conditions of readiness; all must be open. Thread-safe."""

    def __init__(self, *names: str) -> None:
        self._closed: dict[str, str] = dict.fromkeys(names, "not started")
        self.closed: Mapping[str, str] = dict(self._closed)
        """The closed gates with their reasons; empty when ready. Each change replaces it, so any thread may read it."""
        self._names = dict.fromkeys(names)
        self._opened = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, name: str) -> None:
        """Open the gate `name`."""
        self._closed.pop(name, None)
        self.closed = dict(self._closed)
        if self._loop is not None:
            # The loop is closed after the daemon's end.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._opened.set)

    @property
    def conditions(self) -> dict[str, bool]:
        """Each gate, and whether it is open."""
        closed = self.closed
        return {name: name not in closed for name in tuple(self._names)}

    def close(self, name: str, reason: str) -> None:
        """Close the gate `name` because of `reason`."""
        self._names[name] = None
        self._closed[name] = reason
        self.closed = dict(self._closed)

    async def wait_open(self, *, but: Collection[str] = ()) -> None:
        """Wait until all gates except `but` are open."""
        self._loop = asyncio.get_running_loop()
        while self._closed.keys() - set(but):
            self._opened.clear()
            await self._opened.wait()
