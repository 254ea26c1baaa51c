"""A thread for the work of one caller, which ends with it: the only kind that may enter a network namespace.

Never a thread of a pool: one whose namespace has changed would do the next piece of work in the wrong place.
Measured: 0.1 ms for a start and an end. What a request costs in the kernel is the other reason: every change of links
waits for one lock (rtnl), and taking away a veth holds it for 20 ms; `send` on a netlink socket returns when that is
over, so sent from the event loop it would hold up every other request of the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

_STILL_RUNNING_SECONDS = 10.0
AT_ONCE = 256
"""Threads at work at a time, for each event loop. Measured: each has 17 KiB. Not fewer, as some wait a second for
addresses."""

_places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


class AbandonedError(Exception):
    """Nobody waits for the work any more; raised in its thread, at its next pause."""


class Worker:
    """A thread that does pieces of work, one after the other; `worker` makes one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pieces: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_started = False

    async def run(self, work: Callable[[threading.Event], T]) -> T:
        """Run `work` in the thread; its result, or what it raises.

        `work` is given an event that is set when the caller is cancelled; it should look at it where it waits. A
        cancelled call still waits for the end of the work before it raises CancelledError, so that whoever undoes the
        work finds the kernel at rest. A thread that the kernel holds is logged every 10 s. Where AT_ONCE of them are at
        work it waits for one to be done, not for one that waits for its next piece: `work` must not wait for another
        call of this function.
        """
        async with _places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(AT_ONCE)):
            return await self._run(work)

    async def _run(self, work: Callable[[threading.Event], T]) -> T:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        abandoned = threading.Event()
        context = contextvars.copy_context()

        def settle(result: T | None, error: BaseException | None) -> None:
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # without an error there is a result

        def piece() -> None:
            result, failure = None, None
            try:
                result = context.run(work, abandoned)
            except BaseException as error:
                # StopIteration can't be put into a future; nothing here has a reason to raise it.
                failure = RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
            # The loop is closed where the daemon has ended meanwhile: there is nobody to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result, failure)

        self._pieces.put(piece)
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            abandoned.set()
            await _ended(done, self._name)
            raise

    def _serve(self) -> None:
        while (piece := self._pieces.get()) is not None:
            piece()

    def end(self) -> None:
        """Let the thread end."""
        self._pieces.put(None)


@contextlib.asynccontextmanager
async def worker(name: str) -> AsyncIterator[Worker]:
    """A new thread called `name` for the pieces of work of the block, which ends with it."""
    made = Worker(name)
    try:
        yield made
    finally:
        made.end()


async def run(work: Callable[[threading.Event], T], *, name: str) -> T:
    """Run `work` in a new thread called `name`, which ends with it. As `Worker.run`."""
    async with worker(name) as made:
        return await made.run(work)


async def _ended(done: asyncio.Future[T], name: str) -> None:
    """Wait for the end of an abandoned thread; another cancellation changes nothing."""
    while not done.done():
        try:
            finished, _ = await asyncio.wait({done}, timeout=_STILL_RUNNING_SECONDS)
        except asyncio.CancelledError:
            continue
        if not finished:
            log.error("%s: cancelled, but the kernel has not let go of its thread yet", name)
    # Retrieved, so that asyncio does not report an AbandonedError that nobody was to see.
    done.exception()
