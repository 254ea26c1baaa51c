"""Blocking work beside the test: in a thread and with a deadline of its own, as the server has each verb run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from typing import Generic, ParamSpec, TypeVar

from multus_daemon.runtime import deadline, threads
from multus_daemon.runtime.deadline import Deadline

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = 30.0
"""Seconds until a test that hangs fails."""


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
