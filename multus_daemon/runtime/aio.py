"""asyncio pieces: locks by key, shared calls, work that is never cut in half."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Iterable
from typing import Any, ParamSpec, TypeVar

from multus_daemon import deadlines

P = ParamSpec("P")
T = TypeVar("T")


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


async def side_by_side(items: Iterable[T], work: Callable[[T], Awaitable[None]], *, at_once: int) -> None:
    """`work` for each of the items, in their order, `at_once` at a time. What one raises ends the others."""
    rest = iter(items)

    async def some() -> None:
        for item in rest:
            await work(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(some())


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`asyncio.to_thread`, but a cancelled caller gets its CancelledError only when `work` has ended.

    So what comes after the call, the undoing of it above all, never runs beside it. What the work of a cancelled
    caller returns or raises is dropped.
    """
    call = functools.partial(contextvars.copy_context().run, functools.partial(work, *args, **kwargs))
    # A future of the executor and no task: the end of the event loop, which cancels all tasks, does not cancel it.
    running = asyncio.get_running_loop().run_in_executor(None, call)
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
