"""asyncio pieces: root tasks, locks by key, shared calls, connections, and tasks of requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from multus_daemon import deadlines
from multus_daemon.runtime.deadline import backoff

T = TypeVar("T")

log = logging.getLogger(__name__)


# --- root tasks ------------------------------------------------------------------------------------------------------


class StartError(Exception):
    """The program can't start; the message says why and what to do."""


async def until_signal(tasks: Mapping[str, Coroutine[Any, Any, Any]]) -> list[asyncio.Task[Any]]:
    """Run root tasks until SIGTERM, SIGINT, or the end of one task; return all, which the caller must `end`."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    named = {"signals": stopping.wait(), **tasks}
    running = [asyncio.create_task(work, name=name) for name, work in named.items()]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    return running


async def end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the running tasks and wait for them. Raises the first failure of a task; the others are logged."""
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    failed: list[Exception] = []
    for task, result in zip(tasks, results, strict=True):
        if isinstance(result, Exception):
            if failed:
                log.error("%s: %s (root task %s)", type(result).__name__, result, task.get_name(), exc_info=result)
            result.add_note(f"root task {task.get_name()}")
            failed.append(result)
    if failed:
        raise failed[0]


# --- calls -----------------------------------------------------------------------------------------------------------


class KeyedLock:
    """One fair lock for each key that has holders or waiters."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: dict[str, int] = {}

    @contextlib.asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        """Hold the lock of `key` during the block."""
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
    """Concurrent calls with the same key share one run of their work."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Task[Any]] = {}
        self._waiting: dict[asyncio.Task[Any], int] = {}

    async def of(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the running work with this key; without one, start `work` in a task of its own.

        Raises the error of the work. If the last waiter is cancelled, so is the task, and the waiter waits for its end.
        """
        task = self._running.get(key)
        if task is None or task.done():
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
                # Later callers must not share a cancelled task.
                self._forget(key, task)
                task.cancel()
                while not task.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([task])
            raise
        finally:
            if task in self._waiting:
                self._waiting[task] -= 1

    def _forget(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        if self._running.get(key) is task:
            del self._running[key]
        self._waiting.pop(task, None)
        _retrieve(task)


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Keep asyncio from reporting the exception as never retrieved."""
    if task.done() and not task.cancelled():
        task.exception()


# --- connections -----------------------------------------------------------------------------------------------------


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return it.

    The usual soft limit of 1024 is too low for 256 requests with sockets, a namespace and a plugin's pipes each.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Refused if the hard limit exceeds fs.nr_open.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return hard
    return soft


class Acceptor:
    """Passes the connections to a listening socket to a function, until it is closed.

    Without a free descriptor, connections wait in the kernel, and the log says so once a minute. (asyncio's own server
    then calls accept 1024 times a second, with a traceback each time.)
    """

    def __init__(
        self, listener: socket.socket, name: str, take: Callable[[socket.socket], object], *, spares: bool = False
    ) -> None:
        """`name`: for the log. `spares`: connections also wait while only the last quarter of descriptors is free."""
        self._listener, self._name, self._take, self._spares = listener, name, take, spares
        self._loop, self._silent_until = asyncio.get_running_loop(), 0.0
        self._retry: asyncio.TimerHandle | None = None
        self.resume()

    def resume(self) -> None:
        """Accept connections, unless the socket is closed."""
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self.accept)

    def pause(self) -> None:
        """Let new connections wait in the kernel until `resume`."""
        self._loop.remove_reader(self._listener)
        if self._retry:
            self._retry.cancel()

    def close(self) -> None:
        """Close the socket."""
        self.pause()
        self._listener.close()

    def accept(self) -> bool:
        """Accept one connection and pass it on; return False if none waits, or none can be accepted."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            # The kernel uses the lowest free descriptor.
            is_last = soft != resource.RLIM_INFINITY and connection.fileno() >= soft - soft // 4
            if not (self._spares and is_last):
                self._take(connection)
                return True
            connection.close()
            reason = "descriptors are scarce"
        if self._loop.time() >= self._silent_until:
            self._silent_until = self._loop.time() + 60
            log.error("%s: can't accept a connection: %s; raise the daemon's limit of open files", self._name, reason)
        self.pause()
        self._retry = self._loop.call_later(deadlines.ACCEPT_PAUSE_SECONDS, self.resume)
        return False


async def readable(descriptor: int) -> None:
    """Wait until the descriptor can be read."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(descriptor)


# --- work ------------------------------------------------------------------------------------------------------------


async def once_possible(work: Callable[[], T], missing: str) -> T:
    """Return the result of blocking `work` once it raises no OSError; until then log what is `missing`, and why."""
    for pause in backoff(1, 60, jitter=0.1):
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            log.error("%s: %s; next attempt in %.0f s", missing, error.strerror or error, pause)
            await asyncio.sleep(pause)
    raise AssertionError  # pauses do not end


async def at_most(seconds: float, work: Awaitable[object]) -> None:
    """Await `work`; cancel it after `seconds`."""
    # Not `wait_for`, which before Python 3.12 swallows a cancellation that comes with the end of the work.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work


class TaskGroupOfRequests:
    """Tasks that continue when the waiting request is cancelled, so that no verb is interrupted."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, work: Coroutine[Any, Any, T], *, name: str) -> T:
        """Run `work` in its own task and return or raise its result; a cancelled waiter leaves it running.

        Without a waiter, an exception is dropped: `work` itself logs it.
        """
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_retrieve)
        return await asyncio.shield(task)

    async def drain(self, timeout: float) -> int:
        """Wait up to `timeout` seconds for the running tasks, then cancel them; return how many were cancelled."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)
        left = [task for task in self._tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=deadlines.CANCELLED_SECONDS)
        return len(left)
