"""Readiness as a set of named gates: all open means ready, a closed one says why."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection


class Gates:
    """Named conditions that must all hold before the daemon calls itself ready."""

    def __init__(self, *names: str) -> None:
        self._closed: dict[str, str] = dict.fromkeys(names, "not started")
        self._opened = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, name: str) -> None:
        """The condition `name` holds from now on. From any thread."""
        self._closed.pop(name, None)
        if self._loop is not None:
            # Closed where the daemon has ended: there is nobody to wake.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._opened.set)

    def close(self, name: str, reason: str) -> None:
        """The condition `name` does not hold, because of `reason`. From any thread."""
        self._closed[name] = reason

    async def wait_open(self, *, but: Collection[str] = ()) -> None:
        """Return once every gate is open, those in `but` aside."""
        self._loop = asyncio.get_running_loop()
        while self._closed.keys() - set(but):
            self._opened.clear()
            await self._opened.wait()

    @property
    def closed(self) -> dict[str, str]:
        """The closed gates, name to reason; empty when ready."""
        return dict(self._closed)
