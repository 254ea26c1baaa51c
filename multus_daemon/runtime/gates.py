"""Readiness as a set of named gates, each open or closed with a reason."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping


class Reasons:
    """Named conditions, each of which holds, or does not for a reason. Thread-safe."""

    def __init__(self, *names: str) -> None:
        self._closed: dict[str, str] = dict.fromkeys(names, "not started")
        self.closed: Mapping[str, str] = dict(self._closed)
        """Reason of each condition that does not hold. Each change replaces the mapping, so any thread may read it."""
        self._names = dict.fromkeys(names)

    def open(self, name: str) -> None:
        """Note that the condition `name` holds."""
        self._names[name] = None
        self._closed.pop(name, None)
        self.closed = dict(self._closed)

    @property
    def conditions(self) -> dict[str, bool]:
        """Each condition, and whether it holds."""
        closed = self.closed
        return {name: name not in closed for name in tuple(self._names)}

    def close(self, name: str, reason: str) -> None:
        """Note that the condition `name` does not hold because of `reason`."""
        self._names[name] = None
        self._closed[name] = reason
        self.closed = dict(self._closed)


class Gates(Reasons):
    """Conditions of readiness; all must be open. Thread-safe."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.degraded = Reasons()
        """What the daemon promises and can't do now, although it is ready: loss and cause, `; `, remedy."""
        self._opened = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, name: str) -> None:
        """Open the gate `name`."""
        super().open(name)
        if self._loop is not None:
            # The loop is closed after the daemon's end.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._opened.set)

    async def wait_open(self, *, but: Collection[str] = ()) -> None:
        """Wait until all gates except `but` are open."""
        self._loop = asyncio.get_running_loop()
        while self._closed.keys() - set(but):
            self._opened.clear()
            await self._opened.wait()
