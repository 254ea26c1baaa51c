"""An event loop in a thread of its own, with a bounded share of a core, for servers that any client can reach."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from multus_daemon.runtime import portal
from multus_daemon.runtime.deadline import Deadline

T = TypeVar("T")

_PAUSE_MAX_SECONDS: Final = 1.0
"""Longest pause of the loop after it used too much processor time."""


class Share:
    """Bounds processor time to a share of one core. Thread-safe."""

    def __init__(self, share: float, reserve: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`reserve`: seconds of processor time that may be spent at once."""
        self._share, self._reserve, self._clock = share, reserve, clock
        self._left, self._since = reserve, clock()
        self._lock = threading.Lock()

    def spend(self, seconds: float) -> float:
        """Count `seconds` of processor time; return how many seconds to pause for it."""
        with self._lock:
            now = self._clock()
            self._left = min(self._reserve, self._left + (now - self._since) * self._share) - seconds
            self._since = now
            # What is not paid with the longest pause is forgiven.
            self._left = max(self._left, -_PAUSE_MAX_SECONDS * self._share)
            return max(0.0, -self._left / self._share)


class _Selector(selectors.DefaultSelector):
    """Pauses its loop's thread while the share is used up."""

    def __init__(self, share: Share) -> None:
        super().__init__()
        self._pay, self._used = share, 0.0

    def select(self, timeout: float | None = None) -> Any:
        used = time.thread_time()
        if pause := self._pay.spend(used - self._used):
            time.sleep(pause)
        self._used = used
        return super().select(timeout)


async def run(work: Callable[[], Coroutine[Any, Any, None]], share: Share, *, name: str) -> None:
    """Run the coroutine in a loop of its own, in a thread called `name`.

    If the caller is cancelled, the coroutine is cancelled, and CancelledError is raised when it has ended. Raises
    NoThreadError, and what the coroutine raises.
    """
    limit = Deadline()

    async def whole() -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        limit.when_stopped(functools.partial(loop.call_soon_threadsafe, task.cancel))
        await work()

    def body() -> None:
        with (
            contextlib.suppress(asyncio.CancelledError),
            asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_Selector(share))) as runner,
        ):
            runner.run(whole())

    await portal.run(limit, body, name=name)


async def ask(loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `work` in the event loop of another thread; return its result or raise its error."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), loop))
