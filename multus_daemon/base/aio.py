"""asyncio pieces: locks and barriers by key, shared calls, exponential backoff, work that is never cut in half."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import functools
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

from multus_daemon import deadlines

P = ParamSpec("P")
T = TypeVar("T")

# Disks serve many syncs at once. Threads are made when they are needed.
_DISK: Final = ThreadPoolExecutor(16, thread_name_prefix="disk")
# What reads does not queue behind what syncs.
_READS: Final = ThreadPoolExecutor(16, thread_name_prefix="read")


class KeyedLock:
    """One lock per key, fair within a key, forgotten when nobody holds or awaits it."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: dict[str, int] = {}

    def __len__(self) -> int:
        """How many keys are held or awaited now."""
        return len(self._locks)

    @property
    def keys(self) -> frozenset[str]:
        """The keys that are held or awaited now."""
        return frozenset(self._locks)

    @contextlib.asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        """Hold the lock of `key` for the duration of the block."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._users[key] = self._users.get(key, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._locks[key]


class Barriers:
    """One barrier per key, open unless somebody keeps it closed; who passes holds nothing, so nobody waits for them.

    For a worker that reads what there is and then acts on everything else: whoever first writes down what they are
    about to make, then passes, then makes it, is either read or begins when the worker is done.
    """

    def __init__(self) -> None:
        self._closed: dict[str, asyncio.Event] = {}

    @contextlib.asynccontextmanager
    async def closed(self, key: str) -> AsyncIterator[None]:
        """Keep the barrier of `key` closed for the duration of the block; waits for whoever keeps it closed now."""
        await self.passed([key])
        self._closed[key] = reopened = asyncio.Event()
        try:
            yield
        finally:
            del self._closed[key]
            reopened.set()

    async def passed(self, keys: Iterable[str]) -> None:
        """Return when the barrier of each of `keys` has been open once since the call; at once where all are."""
        for key in keys:
            while closed := self._closed.get(key):
                await closed.wait()


class SharedCalls:
    """Work that all who ask for it while it runs share."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Task[Any]] = {}
        self._waiting: dict[asyncio.Task[Any], int] = {}

    async def of(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `work` returns or raises: that of the call with the same key that runs already, if one does.

        The work has a task of its own. It is cancelled with the last of those who wait for it, whose CancelledError
        comes after its end.
        """
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(work())
            self._running[key] = task
            self._waiting[task] = 0
            task.add_done_callback(functools.partial(self._forget, key))
        self._waiting[task] += 1
        try:
            result: T = await asyncio.shield(task)
            return result
        except asyncio.CancelledError:
            if self._waiting.get(task) == 1:
                # Nobody who comes now may share what is being ended.
                self._forget(key, task)
                await ended(task)
            raise
        finally:
            if task in self._waiting:
                self._waiting[task] -= 1

    def _forget(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        if self._running.get(key) is task:
            del self._running[key]
        self._waiting.pop(task, None)
        if task.done() and not task.cancelled():
            # Retrieved, so that asyncio does not report it as never retrieved.
            task.exception()


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel `tasks` and wait for their end; another cancellation changes nothing. What they raise is dropped."""
    for task in tasks:
        task.cancel()
    while running := [task for task in tasks if not task.done()]:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(running)
    for task in tasks:
        if not task.cancelled():
            # Retrieved, so that asyncio does not report it as never retrieved.
            task.exception()


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`asyncio.to_thread`, but a cancelled caller gets its CancelledError only when `work` has ended.

    So what comes after the call, the undoing of it above all, never runs beside it. What the work of a cancelled
    caller returns or raises is dropped.
    """
    return await _in_thread_of(None, functools.partial(work, *args, **kwargs))


async def on_disk(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `in_thread`, for what waits for the disk, on threads of its own.

    There are few threads in all: where each fsync takes half a second, nobody else's work, the starting of plugins and
    a STATUS among it, may stand in a queue behind them.
    """
    return await _in_thread_of(_DISK, functools.partial(work, *args, **kwargs))


async def _in_thread_of(pool: ThreadPoolExecutor | None, work: Callable[[], T]) -> T:
    call = functools.partial(contextvars.copy_context().run, work)
    # A future of the executor and no task: the end of the event loop, which cancels all tasks, does not cancel it.
    running = asyncio.get_running_loop().run_in_executor(pool, call)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return running.result()
    if not running.cancelled():
        # Retrieved, so that asyncio does not report it as never retrieved.
        running.exception()
    raise cancelled


class Reads:
    """Reads of files that nobody has to wait for for ever: each on a thread, the wait for it with an end.

    The thread of a disk that hangs can't be ended. Who asks for the same key again waits for it to come back, however
    often that is, so that one file costs one thread.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds`: how long to wait for one read, those of the same key that are before it included."""
        self._seconds = seconds
        self._running: dict[Hashable, asyncio.Future[Any]] = {}

    async def of(self, key: Hashable, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns or raises; never what it found for an earlier caller. Raises TimeoutError, an OSError.

        The work of a caller who waits no more, cancelled or not, goes on: it must change nothing.
        """
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                while before := self._running.get(key):
                    await asyncio.wait([before])
                return await self._read(key, functools.partial(work, *args, **kwargs))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(errno.ETIMEDOUT, f"the disk did not answer within {self._seconds:g} s") from error

    async def _read(self, key: Hashable, work: Callable[[], T]) -> T:
        call = _READS.submit(contextvars.copy_context().run, work)
        running: asyncio.Future[T] = asyncio.wrap_future(call)
        self._running[key] = running
        running.add_done_callback(functools.partial(self._forget, key))
        try:
            await asyncio.wait([running])
        finally:
            # What has no thread yet needs none any more.
            call.cancel()
        return running.result()

    def _forget(self, key: Hashable, running: asyncio.Future[Any]) -> None:
        del self._running[key]
        if not running.cancelled():
            # Retrieved, so that asyncio does not report it as never retrieved.
            running.exception()


def backoff(first: float, last: float, *, jitter: float = 0.0) -> Iterator[float]:
    """Delays in seconds that double from `first` to `last` and stay there; each off by up to `jitter` of itself."""
    delay = first
    while True:
        yield delay * (1 + random.uniform(-jitter, jitter))
        delay = min(delay * 2, last)


class TaskGroupOfRequests:
    """Tasks that outlive the request that began them, so that a client which hangs up never cuts a verb in half."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        """How many tasks are still running."""
        return len(self._tasks)

    async def run(self, work: Coroutine[Any, Any, T], *, name: str) -> T:
        """Run `work` in a task of its own and wait for it; cancelling the waiter leaves the work running.

        Raises what the work raises. If the waiter has gone, an exception of the work is dropped here: the work
        itself has logged it.
        """
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Retrieved so that asyncio does not report it as never retrieved when nobody waits any more.
            task.exception()

    async def drain(self, timeout: float) -> int:
        """Wait up to `timeout` seconds for what runs, then cancel the rest; the number of those cancelled."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)
        left = [task for task in self._tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=deadlines.CANCELLED_SECONDS)
        return len(left)
