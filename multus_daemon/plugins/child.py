"""Run one child process from start to reaping: pipes with limits, a deadline, no leftovers.

The child leads a session and a process group of its own. Ending it means the group, and what it has started in other
sessions (`strays.of_call`). A pidfd reports its exit and it is reaped last: no other process can get the number of a
zombie, so signals always reach the right group. With an earlier reaper, as asyncio's, they could reach a stranger's.

Started with vfork: no preexec_fn, which would make CPython fork the whole daemon (see the architecture page).
"""

# The one module that starts processes (style rule 24). Not asyncio's own starter: its watcher reaps the child before
# its group can be ended.
# ruff: noqa: TID251

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from multus_daemon import deadlines
from multus_daemon.plugins import strays
from multus_daemon.runtime import threads

_CHUNK = 64 * 1024
STDERR_TAIL = 8 * 1024

_calls = itertools.count(1)
_any_started: Final = threading.Event()
_running: dict[int, str] = {}
"""Marks of the calls by process id."""


def running() -> frozenset[int]:
    """Return the process ids of the programs that run now; each leads a session."""
    return frozenset(_running)


def has_started_any() -> bool:
    """Report whether a program was started since this process began."""
    return _any_started.is_set()


_Started: TypeAlias = tuple[subprocess.Popen[bytes], int]
"""The process and its pidfd, -1 if the kernel refuses one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`timeout` and `grace` (between SIGTERM and SIGKILL) in seconds, `max_output` in bytes of stdout."""

    timeout: float
    grace: float
    max_output: int


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a plugin process. `returncode` as in subprocess: negative is the signal that ended it."""

    returncode: int
    stdout: bytes = b""
    stderr: bytes = b""
    """Its last `STDERR_TAIL` bytes."""


class DeadlineExceededError(Exception):
    """The child did not end in time and was ended; `stderr` is the end of its stderr."""

    def __init__(self, stderr: bytes = b"") -> None:
        super().__init__()
        self.stderr = stderr


class OutputTooLargeError(Exception):
    """The child wrote too much to stdout and was ended."""


async def run(argv: Sequence[str], environ: Mapping[str, str], stdin: bytes, limits: Limits) -> Exit:
    """Run a program to its end, in `/`, with exactly `environ` and the daemon's mark (`strays`).

    Raises OSError (NoThreadError too) if it cannot be started, DeadlineExceededError, OutputTooLargeError. On return,
    also after a cancellation, the child is reaped, and all that it has started has received SIGKILL, unless it ended by
    itself with its pipes closed: processes that detached themselves properly continue then.
    """
    deadline = asyncio.get_running_loop().time() + limits.timeout
    popen, pidfd = await _start(argv, environ, deadline, limits)
    child = _Child(popen, pidfd, stdin, limits)
    try:
        return await child.result(deadline)
    finally:
        await _uncut(child.end())


async def _start(argv: Sequence[str], environ: Mapping[str, str], deadline: float, limits: Limits) -> _Started:
    """Start the process in a thread of its own, since exec waits for a disk, which may hang.

    A process that starts after the deadline or a cancellation is ended at once.
    """
    work = functools.partial(_popen, list(argv), dict(environ))
    started = asyncio.wrap_future(threads.start(work, name="starting a plugin process"))
    try:
        async with asyncio.timeout_at(deadline):
            return await asyncio.shield(started)
    except (TimeoutError, asyncio.CancelledError) as reason:
        await _uncut(_end_unwanted(started, limits))
        if isinstance(reason, TimeoutError):
            raise DeadlineExceededError from reason
        raise


def _popen(argv: list[str], environ: dict[str, str]) -> _Started:
    mark = f"{strays.mark()}-{next(_calls)}"
    _any_started.set()
    popen = subprocess.Popen(  # noqa: S603 - argv is ours, no shell
        argv,
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env={**environ, strays.VARIABLE: mark},
        start_new_session=True,
    )
    _running[popen.pid] = mark
    try:
        return popen, os.pidfd_open(popen.pid)
    except OSError:
        return popen, -1


async def _end_unwanted(started: asyncio.Future[_Started], limits: Limits) -> None:
    # Nearly always it starts in a moment; then nothing is left when the caller continues.
    await asyncio.wait((started,), timeout=deadlines.KILLED_SECONDS)
    if not started.done():
        started.add_done_callback(_end_late)
    elif not started.cancelled() and not started.exception():
        await _Child(*started.result(), b"", limits).end()


def _end_late(started: asyncio.Future[_Started]) -> None:
    if not started.cancelled() and not started.exception():
        popen, pidfd = started.result()
        _signal_group(popen.pid, signal.SIGKILL)
        _Child(popen, pidfd, b"", Limits(0, 0, 0)).close()


def _signal_group(pid: int, number: signal.Signals) -> None:
    # Only while its leader is not reaped. An empty group is fine.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


async def _uncut(work: Coroutine[Any, Any, None]) -> None:
    """Finish `work`, which must be short; raise a cancellation after it."""
    task = asyncio.create_task(work, name="ending a plugin process")
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled:
        raise cancelled


class _Reader:
    """The reading end of a pipe. Keeps the data, up to a limit: all of it, or its end."""

    def __init__(self, fd: int, limit: int, *, keep_end: bool, on_change: Callable[[], None]) -> None:
        self.data = bytearray()
        self.closed = False
        self.too_much = False
        self._fd, self._limit, self._keep_end, self._on_change = fd, limit, keep_end, on_change
        os.set_blocking(fd, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._read)

    def _read(self) -> None:
        try:
            chunk = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        self.data += chunk
        if self._keep_end:
            del self.data[: -self._limit]
        elif len(self.data) > self._limit:
            self.too_much = True
        if not chunk or self.too_much:
            self.stop()
            self._on_change()

    def stop(self) -> None:
        """Stop reading."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._fd)


class _Writer:
    """Feeds a pipe and closes it. A reader that goes away is not an error: a plugin need not read its stdin."""

    def __init__(self, popen: subprocess.Popen[bytes], data: bytes) -> None:
        assert popen.stdin is not None
        self._pipe = popen.stdin
        self._rest = memoryview(data)
        os.set_blocking(self._pipe.fileno(), False)
        self._loop = asyncio.get_running_loop()
        self._waiting = False
        self._write()

    def _write(self) -> None:
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._pipe.fileno(), self._rest) :]
        except BlockingIOError:
            if not self._waiting:
                self._waiting = True
                self._loop.add_writer(self._pipe.fileno(), self._write)
            return
        except OSError:
            pass
        self.stop()

    def stop(self) -> None:
        """Stop writing, and close the pipe."""
        if self._waiting:
            self._waiting = False
            self._loop.remove_writer(self._pipe.fileno())
        self._pipe.close()


class _Child:
    """A started process and its pipes. `end` must be awaited, whatever happens."""

    def __init__(self, popen: subprocess.Popen[bytes], pidfd: int, stdin: bytes, limits: Limits) -> None:
        assert popen.stdout is not None
        assert popen.stderr is not None
        self._popen, self._pidfd, self._limits = popen, pidfd, limits
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._exited = False
        self._clean = False
        self._stdout = _Reader(popen.stdout.fileno(), limits.max_output, keep_end=False, on_change=self._changed.set)
        self._stderr = _Reader(popen.stderr.fileno(), STDERR_TAIL, keep_end=True, on_change=self._changed.set)
        self._stdin = _Writer(popen, stdin)
        if pidfd >= 0:
            self._loop.add_reader(pidfd, self._on_exit)
        else:
            # A kernel before 5.3, or a seccomp profile from then. Not a thread of the loop's executor: waiting threads
            # would exhaust it.
            threading.Thread(target=self._wait, name="waiting for a plugin process", daemon=True).start()

    def _on_exit(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
        self._exited = True
        self._changed.set()

    def _wait(self) -> None:
        # WNOWAIT leaves a zombie. It may have been reaped, or the loop closed, in between.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_exit)

    async def _until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait for `condition` until `deadline`; report whether it holds."""
        try:
            async with asyncio.timeout_at(deadline):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return condition()
        return True

    def _drained(self) -> bool:
        return self._stdout.closed and self._stderr.closed

    async def result(self, deadline: float) -> Exit:
        """Return how it ended. Raises DeadlineExceededError, OutputTooLargeError; the caller calls `end`."""
        if not await self._until(lambda: self._exited or self._stdout.too_much, deadline):
            raise DeadlineExceededError(bytes(self._stderr.data))
        if not self._stdout.too_much:
            await self._until(self._drained, self._loop.time() + deadlines.PIPES_AFTER_EXIT_SECONDS)
        if self._stdout.too_much:
            raise OutputTooLargeError
        self._clean = self._drained()
        if not self._clean:
            _signal_group(self._popen.pid, signal.SIGKILL)
        self._popen.poll()
        assert self._popen.returncode is not None
        return Exit(self._popen.returncode, bytes(self._stdout.data), bytes(self._stderr.data))

    async def end(self) -> None:
        """End the processes that still run, reap the child, close the pipes."""
        try:
            if self._popen.returncode is None and not self._clean:
                await self._stop_group()
        finally:
            # Also reached while the loop closes: no await from here on.
            if self._popen.returncode is None:
                _signal_group(self._popen.pid, signal.SIGKILL)
            self.close()

    async def _stop_group(self) -> None:
        loop, pid = self._loop, self._popen.pid
        elsewhere: list[int] = []
        try:
            if not self._exited:
                # Before it ends: its children get another parent then. And after that: it may have started more.
                elsewhere += await asyncio.to_thread(strays.of_call, _running[pid], pid)
                _signal_group(pid, signal.SIGTERM)
                await self._until(lambda: self._exited, loop.time() + self._limits.grace)
                _signal_group(pid, signal.SIGKILL)
                elsewhere += await asyncio.to_thread(strays.of_call, _running[pid], pid)
        finally:
            _signal_group(pid, signal.SIGKILL)
            for pidfd in elsewhere:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)
        await self._until(lambda: self._exited, loop.time() + deadlines.KILLED_SECONDS)

    def close(self) -> None:
        """Close the pipes and reap the child, at once or as soon as it ends. It must have received SIGKILL."""
        _running.pop(self._popen.pid, None)
        self._stdin.stop()
        self._stdout.stop()
        self._stderr.stop()
        for pipe in (self._popen.stdout, self._popen.stderr):
            assert pipe is not None
            pipe.close()
        if self._popen.poll() is None:
            # The kernel holds it: reap it when it ends.
            self._reap_later()
        elif self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)

    def _reap_later(self) -> None:
        popen, pidfd, loop = self._popen, self._pidfd, self._loop
        if pidfd < 0:
            threading.Thread(target=popen.wait, name="reaping a plugin process", daemon=True).start()
            return

        def reap() -> None:
            loop.remove_reader(pidfd)
            popen.wait()
            os.close(pidfd)

        loop.add_reader(pidfd, reap)
