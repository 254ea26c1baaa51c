"""An event loop in a thread of its own, with a bounded share of a core, for what strangers can reach."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent import futures
from typing import Any, Final, TypeVar

from multus_daemon.runtime import threads

T = TypeVar("T")

_PAUSE_MAX_SECONDS: Final = 1.0
"""Longest pause to pay for processor time, so that the loop is soon free again after a long turn."""


class Share:
    """Bounds processor time to a share of one core. Thread-safe."""

    def __init__(self, share: float, reserve: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`reserve`: seconds of processor time that may be spent at once."""
        self._share, self._reserve, self._clock = share, reserve, clock
        self._left, self._since = reserve, clock()
        self._lock = threading.Lock()

    def spend(self, seconds: float) -> float:
        """Note processor time that was used; return the pause that it costs, in seconds."""
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
    begun: futures.Future[Callable[[], object]] = futures.Future()

    async def whole() -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        begun.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        await work()

    def body() -> None:
        with (
            contextlib.suppress(asyncio.CancelledError),
            asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_Selector(share))) as runner,
        ):
            runner.run(whole())

    ended = asyncio.wrap_future(threads.start(body, name=name))
    try:
        await asyncio.shield(ended)
    except asyncio.CancelledError:
        running = asyncio.wrap_future(begun)
        either: list[asyncio.Future[Any]] = [running, ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            # RuntimeError: the loop is closed.
            with contextlib.suppress(RuntimeError):
                running.result()()
        await asyncio.wait([ended])
        raise


async def ask(loop: asyncio.AbstractEventLoop, work: Callable[[], Awaitable[T]]) -> T:
    """Have another thread's loop do the work; return its result or raise its error."""

    async def whole() -> T:
        return await work()

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(whole(), loop))
