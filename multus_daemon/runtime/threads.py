"""Threads that block: starting one, locks and barriers by key, reads of a disk that may hang.

Every wait here ends with the deadline of the calling context (`runtime.deadline`), by Interrupted.
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
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from multus_daemon.runtime import deadline

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_SHARED_PAUSE: Final = 0.02
"""Seconds between two attempts at a key that another process has."""
_IDLE_SECONDS: Final = 5.0
"""How long a thread waits for the next read."""
_FLOCK: Final = struct.Struct("@hhqqi0q")
"""struct flock of fcntl(2)."""


class NoThreadError(OSError, RuntimeError):
    """The kernel starts no more threads: a limit is reached (EAGAIN, pthread_create(3)), or memory is short."""

    def __init__(self) -> None:
        super().__init__(errno.EAGAIN, "can't start new thread")


def start(work: Callable[[], T], *, name: str = "") -> futures.Future[T]:
    """Run `work` in a new thread, in a copy of the calling context; what it returns or raises. Raises NoThreadError.

    Nothing waits for the thread at the end of the program: one that the kernel holds must not hold the daemon.
    """
    done: futures.Future[T] = futures.Future()
    body = functools.partial(_settle, done, work)
    thread = threading.Thread(target=contextvars.copy_context().run, args=(body,), name=name or None, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThreadError from error
    return done


def _settle(done: futures.Future[T], work: Callable[[], T], before: Callable[[], None] = lambda: None) -> None:
    """Do the work and have its outcome in `done`; `before` is called just before it is there."""
    result, failure = None, None
    try:
        result = work()
    except BaseException as error:
        # StopIteration can't be put into a future; nothing here has a reason to raise it.
        failure = RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
    before()
    # Who waited for it may have cancelled it.
    with contextlib.suppress(futures.InvalidStateError):
        if failure is not None:
            done.set_exception(failure)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # without a failure there is a result


class KeyedLock:
    """One lock per key, fair within a key, forgotten when nobody holds or awaits it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        # For each key that is held, those who wait for it, the first of them first.
        self._waiting: dict[str, collections.deque[futures.Future[None]]] = {}

    def __len__(self) -> int:
        """How many keys are held or awaited now."""
        return len(self._waiting)

    @property
    def keys(self) -> frozenset[str]:
        """The keys that are held or awaited now."""
        with self._guard:
            return frozenset(self._waiting)

    @contextlib.contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Hold the lock of `key` for the duration of the block. Raises Interrupted."""
        self._take(key)
        try:
            yield
        finally:
            self._give(key)

    def _take(self, key: str) -> None:
        with self._guard:
            line = self._waiting.get(key)
            if line is None:
                self._waiting[key] = collections.deque()
                return
            turn: futures.Future[None] = futures.Future()
            line.append(turn)
        try:
            deadline.current().wait(turn)
        except BaseException:
            with self._guard:
                if not turn.done():
                    line.remove(turn)
                    raise
            self._give(key)
            raise

    def _give(self, key: str) -> None:
        with self._guard:
            if line := self._waiting[key]:
                line.popleft().set_result(None)
            else:
                del self._waiting[key]


class SharedKeyedLock(KeyedLock):
    """One that processes share: who has a key here has it for all that have the same file.

    Each key is a byte of the file, locked for the file as opened here (fcntl(2), open file description locks), so that
    whatever ends the process gives its keys back. Where the file can't be opened or locked it is as if nobody shared.
    """

    def __init__(self, path: Path) -> None:
        """`path`: need not be there, its directory does once a key is taken."""
        super().__init__()
        self._path = path
        self._file = -1
        self._told = False

    def _take(self, key: str) -> None:
        super()._take(key)
        try:
            while not self._set(fcntl.F_WRLCK, key):
                deadline.pause(_SHARED_PAUSE)
        except BaseException:
            super()._give(key)
            raise

    def _give(self, key: str) -> None:
        self._set(fcntl.F_UNLCK, key)
        super()._give(key)

    def _set(self, kind: int, key: str) -> bool:
        """False where another process has the key."""
        place = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 2
        try:
            fcntl.fcntl(self._opened(), fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            if not self._told:
                self._told = True
                log.error("%s can't be locked, other processes may do the same work: %s", self._path, error)
        return True

    def _opened(self) -> int:
        """Its descriptor. Raises OSError."""
        with self._guard:
            if self._file < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                self._file = os.open(self._path, flags, 0o600)
            return self._file


class Barriers:
    """One barrier per key, open unless somebody keeps it closed; who passes holds nothing, so nobody waits for them.

    For a worker that reads what there is and then acts on everything else: whoever first writes down what they are
    about to make, then passes, then makes it, is either read or begins when the worker is done.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._closed: dict[str, futures.Future[None]] = {}

    @contextlib.contextmanager
    def closed(self, key: str) -> Iterator[None]:
        """Keep the barrier of `key` closed for the duration of the block; waits for whoever keeps it closed now."""
        reopened: futures.Future[None] = futures.Future()
        while (before := self._close(key, reopened)) is not reopened:
            deadline.current().wait(before)
        try:
            yield
        finally:
            with self._guard:
                del self._closed[key]
            reopened.set_result(None)

    def _close(self, key: str, reopened: futures.Future[None]) -> futures.Future[None]:
        with self._guard:
            return self._closed.setdefault(key, reopened)

    def passed(self, keys: Iterable[str]) -> None:
        """Return when the barrier of each of `keys` has been open once since the call; at once where all are."""
        for key in keys:
            while closed := self._closed.get(key):
                deadline.current().wait(closed)


class Reads:
    """Reads of files that nobody has to wait for for ever: each on a thread, the wait for it with an end.

    The thread of a disk that hangs can't be ended. Who asks for the same key again waits for it to come back, however
    often that is, so that one file costs one thread.
    """

    def __init__(self, seconds: float, *, shared: bool = False) -> None:
        """`seconds`: how long to wait for one read, those of the same key that are before it included.

        `shared`: reads are cheap and frequent. A caller takes the outcome of the read that runs, where one does, in
        place of reading anew after it; and a thread that has come back takes the next read (30 us, a new one 150 us).
        """
        self._seconds = seconds
        self._shared = shared
        self._guard = threading.Lock()
        self._running: dict[Hashable, futures.Future[Any]] = {}
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []

    def of(self, key: Hashable, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns or raises; unless `shared`, never what it found for an earlier caller.

        Raises TimeoutError, an OSError, where it does not do so in time.

        The work of a caller who waits no more goes on: it must change nothing.
        """
        mine: futures.Future[T] = futures.Future()
        try:
            with deadline.within(self._seconds) as limit:
                while (running := self._take(key, mine)) is not mine and not self._shared:
                    limit.wait(running)
                if running is mine:
                    self._begin(key, mine, functools.partial(work, *args, **kwargs))
                limit.wait(running)
        except deadline.ExpiredError as error:
            raise TimeoutError(errno.ETIMEDOUT, f"the disk did not answer within {self._seconds:g} s") from error
        outcome: T = running.result()
        return outcome

    def _take(self, key: Hashable, mine: futures.Future[Any]) -> futures.Future[Any]:
        """The read of the key that runs; `mine`, which is that from now on, where none does."""
        with self._guard:
            return self._running.setdefault(key, mine)

    def _begin(self, key: Hashable, mine: futures.Future[T], work: Callable[[], T]) -> None:
        context = contextvars.copy_context()
        job = functools.partial(context.run, _settle, mine, work, lambda: self._forget(key))
        with self._guard:
            jobs = self._idle.pop() if self._idle else None
        if jobs is not None:
            jobs.put(job)
            return
        try:
            start(functools.partial(self._work, job), name="read")
        except BaseException as error:
            # No thread is to be had now, and nobody may wait for one that is not there.
            self._forget(key)
            mine.set_exception(error)
            raise

    def _work(self, job: Callable[[], None]) -> None:
        """Do `job`, then what comes within `_IDLE_SECONDS` of the one before."""
        jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        while True:
            job()
            if not self._shared:
                return
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
