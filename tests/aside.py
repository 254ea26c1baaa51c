"""Work beside the test: blocking in a thread with a deadline of its own, as the server has each verb run; or a task."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent import futures
from typing import Any, Generic, ParamSpec, TypeVar

from multus_daemon import logs
from multus_daemon.runtime import deadline, threads
from multus_daemon.runtime.deadline import Deadline
from tests.waiting import PATIENCE

P = ParamSpec("P")
T = TypeVar("T")


class Aside(Generic[T]):
    """`work` in a thread, begun at once."""

    def __init__(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> None:
        self.limit = Deadline()
        with deadline.given(self.limit):
            self._done: futures.Future[T] = threads.start(lambda: work(*args, **kwargs))

    @property
    def done(self) -> bool:
        """Return whether the work has ended."""
        return self._done.done()

    def stop(self) -> None:
        """Stop the work, as a server does when no client waits for it any more."""
        self.limit.stop()

    def result(self) -> T:
        """Return the result of the work, or raise its exception."""
        return self._done.result(PATIENCE)


def together(*works: Callable[[], T]) -> list[T]:
    """Run `works` side by side and return their results; when all have ended, raise the first exception."""
    running = [Aside(work) for work in works]
    futures.wait([item._done for item in running], PATIENCE)
    return [item.result() for item in running]


@contextlib.asynccontextmanager
async def running(work: Coroutine[Any, Any, object]) -> AsyncIterator[asyncio.Task[object]]:
    """The work runs during the block, and is cancelled at its end."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def logged(seconds: float = PATIENCE) -> bool:
    """Wait until all lines of the log are written or lost; return False after `seconds`."""
    end = time.monotonic() + seconds
    while any(queue._put > queue._taken for queue in logs._queues()):
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True
