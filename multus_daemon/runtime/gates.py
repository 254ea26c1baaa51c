"""Readiness as a set of named gates, each open or closed with a reason."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection


class Reasons:
    """Named conditions, each of which holds, or does not for a reason. Thread-safe."""

    def __init__(self, *names: str) -> None:
        self._reasons: dict[str, str | None] = dict.fromkeys(names, "not started")
        """For each condition, the reason why it does not hold; None if it holds."""

    def open(self, name: str) -> None:
        """Note that the condition `name` holds."""
        self._reasons[name] = None

    def close(self, name: str, reason: str) -> None:
        """Note that the condition `name` does not hold because of `reason`."""
        self._reasons[name] = reason

    @property
    def closed(self) -> dict[str, str]:
        """Reason of each condition that does not hold."""
        return {name: reason for name, reason in self._reasons.copy().items() if reason is not None}

    @property
    def conditions(self) -> dict[str, bool]:
        """Each condition, and whether it holds."""
        return {name: reason is None for name, reason in self._reasons.copy().items()}


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
        while self.closed.keys() - set(but):
            self._opened.clear()
            await self._opened.wait()
