"""Threads for blocking work, locks by key, and reads of a disk that may hang.

Every wait ends with Interrupted at the deadline of the calling context (`runtime.deadline`).
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import errno
import fcntl
import functools
import hashlib
import logging
import os
import queue
import struct
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from multus_daemon.runtime import deadline

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_SHARED_PAUSE: Final = 0.02
"""Seconds between two attempts at a key that another process holds."""
_IDLE_SECONDS: Final = 5.0
"""How long an idle thread waits for the next read before it ends."""
_FLOCK: Final = struct.Struct("@hhqqi0q")
"""struct flock of fcntl(2)."""


class NoThreadError(OSError, RuntimeError):
    """The kernel starts no more threads: a limit is reached (EAGAIN, pthread_create(3)), or memory is short."""

    def __init__(self) -> None:
        super().__init__(errno.EAGAIN, "can't start new thread")


def start(work: Callable[[], T], *, name: str = "") -> futures.Future[T]:
    """Run `work` in a new thread, in a copy of the calling context; return its future. Raises NoThreadError.

    The program can end while the thread runs: a thread that hangs in the kernel must not keep the daemon.
    """
    done: futures.Future[T] = futures.Future()
    body = functools.partial(_settle, done, work)
    thread = threading.Thread(target=contextvars.copy_context().run, args=(body,), name=name or None, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThreadError from error
    return done


def _settle(done: futures.Future[T], work: Callable[[], T], before: Callable[[], None] | None = None) -> None:
    """Call `work`, then `before`, then set the result or exception of `done`."""
    try:
        finish = functools.partial(done.set_result, work())
    except BaseException as error:
        finish = functools.partial(done.set_exception, error)
    if before:
        before()
    # The waiting thread may have cancelled it.
    with contextlib.suppress(futures.InvalidStateError):
        finish()


class KeyedLock:
    """One lock per key, fair within a key, forgotten when no thread holds or awaits it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        # For each key that is held, the threads that wait for it, in their order.
        self._waiting: dict[str, collections.deque[futures.Future[None]]] = {}

    @property
    def keys(self) -> frozenset[str]:
        """The keys that are held or awaited now."""
        with self._guard:
            return frozenset(self._waiting)

    @contextlib.contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Hold the lock of `key` for the duration of the block. Raises Interrupted."""
        turn: futures.Future[None] | None = None
        with self._guard:
            if key in self._waiting:
                turn = futures.Future()
                self._waiting[key].append(turn)
            else:
                self._waiting[key] = collections.deque()
        try:
            if turn is not None:
                deadline.current().wait(turn)
            yield
        finally:
            with self._guard:
                line = self._waiting[key]
                if turn is not None and not turn.done():
                    # Interrupted while it waited.
                    line.remove(turn)
                elif line:
                    line.popleft().set_result(None)
                else:
                    del self._waiting[key]


class SharedKeyedLock(KeyedLock):
    """A lock that processes share: a key is locked for all processes with the same file.

    Each key is a byte of the file, locked for the open file (fcntl(2), open file description locks), so the end of a
    process releases its keys. If the file cannot be opened or locked, the lock is not shared.
    """

    def __init__(self, path: Path) -> None:
        """`path`: the file, which is made if it does not exist. Its directory must exist when a key is locked."""
        super().__init__()
        self._path = path
        self._file = -1
        self._has_failed = False

    @contextlib.contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Hold the lock of `key`, in all processes, for the duration of the block. Raises Interrupted."""
        place = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 2
        with super().hold(key):
            while not self._set(fcntl.F_WRLCK, place):
                deadline.pause(_SHARED_PAUSE)
            try:
                yield
            finally:
                self._set(fcntl.F_UNLCK, place)

    def _set(self, kind: int, place: int) -> bool:
        """Lock or unlock a byte of the file; False if another process holds it."""
        try:
            with self._guard:
                if self._file < 0:
                    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                    self._file = os.open(self._path, flags, 0o600)
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            if not self._has_failed:
                self._has_failed = True
                log.error(
                    "%s can't be locked, another process may do the same work: %s",
                    self._path,
                    error,
                )
        return True


class Reads:
    """Reads of files with a bounded wait, each in a thread.

    A thread that a hanging disk holds cannot be ended. Further reads of the same key wait for it, so that one file
    holds one thread. An idle thread takes the next read (30 us; a new thread takes 150 us).
    """

    def __init__(self, seconds: float, *, shared: bool = False) -> None:
        """`seconds`: longest wait for one read, with the earlier reads of the same key.

        `shared`: a caller takes the outcome of the read that runs, if there is one, instead of its own read after it.
        """
        self._seconds = seconds
        self._shared = shared
        self._guard = threading.Lock()
        self._running: dict[Hashable, futures.Future[Any]] = {}
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []

    def of(self, key: Hashable, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in a thread; return its result or raise its error. Unless `shared`, each call runs its own work.

        Raises TimeoutError, an OSError, if it takes too long. The work continues after that: it must change nothing.
        """
        own: futures.Future[T] = futures.Future()
        try:
            with deadline.within(self._seconds) as limit:
                while True:
                    with self._guard:
                        running = self._running.setdefault(key, own)
                    if running is own:
                        self._begin(key, own, functools.partial(work, *args, **kwargs))
                    limit.wait(running)
                    if running is own or self._shared:
                        break
        except deadline.ExpiredError as error:
            raise TimeoutError(errno.ETIMEDOUT, f"the disk did not answer within {self._seconds:g} s") from error
        outcome: T = running.result()
        return outcome

    def _begin(self, key: Hashable, own: futures.Future[T], work: Callable[[], T]) -> None:
        context = contextvars.copy_context()
        job = functools.partial(context.run, _settle, own, work, functools.partial(self._forget, key))
        with self._guard:
            jobs = self._idle.pop() if self._idle else None
        if jobs is not None:
            jobs.put(job)
            return
        try:
            start(functools.partial(self._work, job), name="read")
        except BaseException as error:
            # No thread is available, so no caller may wait for it.
            self._forget(key)
            own.set_exception(error)
            raise

    def _work(self, job: Callable[[], None]) -> None:
        """Call `job`, then each further job that arrives within `_IDLE_SECONDS` after the last."""
        jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        while True:
            job()
            with self._guard:
                self._idle.append(jobs)
            try:
                job = jobs.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._guard:
                    if jobs in self._idle:
                        self._idle.remove(jobs)
                        return
                job = jobs.get()

    def _forget(self, key: Hashable) -> None:
        with self._guard:
            del self._running[key]
