"""Run a coroutine in virtual time: a pause ends at once, and the loop's clock says that it has passed."""

from __future__ import annotations

import asyncio
import functools
import random
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _Selector(selectors.DefaultSelector):
    """Never waits: it adds to the clock what it would have waited. Only work in threads takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.in_threads = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.in_threads:
            return super().select(0.05 if timeout is None else min(timeout, 0.05))
        found: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if not found:
            assert timeout is not None, "nothing will ever happen: every task waits for another"
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock goes to the next timer as soon as nothing else is left to do."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._clock.in_threads += 1
        future.add_done_callback(self._thread_done)
        return future

    def _thread_done(self, _: Any) -> None:
        self._clock.in_threads -= 1

    async def shutdown_default_executor(self, *arguments: Any) -> None:
        # From Python 3.12 on it waits with a time-out, of which nothing may pass.
        self._clock.in_threads += 1
        await super().shutdown_default_executor(*arguments)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine to its end; return its result. Jitter is the same each time."""
    random.seed(7)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Make of a coroutine function an ordinary test, with its fixtures, that runs in virtual time."""

    @functools.wraps(test)
    def work(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(test(*args, **kwargs))

    return work
