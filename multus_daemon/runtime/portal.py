"""Cross between the event loop and blocking threads: a thread for each request, and calls back into the loop.

The thread is made for one piece of work and ends with it. It never comes from a pool: a thread that has entered a
network namespace would do the next work in the wrong place. Therefore these are not anyio's portals, which reuse
threads. Measured: 0.1 ms for a start and an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine
from concurrent import futures
from typing import Any, ParamSpec, TypeVar

from multus_daemon.runtime import deadline, threads
from multus_daemon.runtime.deadline import Deadline, ExpiredError, Interrupted

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

_STILL_RUNNING_SECONDS = 10.0


async def run(limit: Deadline, work: Callable[[], T], *, name: str = "") -> T:
    """Run blocking `work` in a thread called `name`, with `limit` as the deadline of its context; return its result.

    If the caller is cancelled, the deadline is stopped, and CancelledError is raised when the work has ended: code
    after the call, above all an undo, never runs while the work does. A thread that the kernel holds is logged every 10
    s. Raises ExpiredError if the deadline has interrupted the work.
    """
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    with deadline.given(limit):
        running = threads.start(work, name=name)
    running.add_done_callback(functools.partial(_tell_loop, loop, ended))
    try:
        await ended
    except asyncio.CancelledError:
        limit.stop()
        await _ended(asyncio.wrap_future(running), name)
        raise
    try:
        return running.result()
    except Interrupted as interruption:
        raise (asyncio.CancelledError if limit.stopped else ExpiredError) from interruption


def _tell_loop(loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None], _: futures.Future[Any]) -> None:
    # The loop is closed if the daemon has ended.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_wake, ended)


def _wake(ended: asyncio.Future[None]) -> None:
    # The waiting task may have been cancelled.
    if not ended.done():
        ended.set_result(None)


async def _ended(done: asyncio.Future[Any], name: str) -> None:
    """Wait for the end of a thread whose result is no longer wanted; ignore further cancellations."""
    while not done.done():
        try:
            finished, _ = await asyncio.wait({done}, timeout=_STILL_RUNNING_SECONDS)
        except asyncio.CancelledError:
            continue
        if not finished:
            log.error("%s: was told to stop, but the kernel has not let go of its thread yet", name)
    # Retrieved, so that asyncio does not report the Interrupted.
    done.exception()


class LoopPortal:
    """Lets blocking code in another thread use what runs on the event loop, such as the API client."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop`: None for the running event loop."""
        self._loop = loop or asyncio.get_running_loop()

    def call(self, work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Have the loop run the coroutine; return its result or raise its error.

        If the caller's deadline ends first, the coroutine is cancelled, and Interrupted is raised when it has ended.
        Raises Interrupted if the loop is closed.
        """
        limit = deadline.current()
        limit.check()
        done: futures.Future[T] = futures.Future()
        task: asyncio.Task[T] | None = None

        def begin() -> None:
            nonlocal task
            task = self._loop.create_task(work(*args, **kwargs))
            task.add_done_callback(end)

        def end(ended: asyncio.Task[T]) -> None:
            if ended.cancelled():
                done.set_exception(Interrupted())
            elif error := ended.exception():
                done.set_exception(error)
            else:
                done.set_result(ended.result())

        def give_up() -> None:
            if task is not None:
                task.cancel()

        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:
            # The loop is closed: the daemon has ended.
            raise Interrupted from None
        try:
            limit.wait(done)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(give_up)
            futures.wait((done,))
            raise
        return done.result()

    def tell(self, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have the loop call `work`, which neither blocks nor raises, without waiting for it."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(functools.partial(work, *args, **kwargs))

    def calling(self, work: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
        """Return a blocking function that runs the coroutine function `work` by `call`."""
        return lambda *args, **kwargs: self.call(work, *args, **kwargs)

    def telling(self, work: Callable[P, None]) -> Callable[P, None]:
        """Return a function that passes `work` to `tell`."""
        return lambda *args, **kwargs: self.tell(work, *args, **kwargs)
