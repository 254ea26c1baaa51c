"""Run one child process from start to reaping, with limited pipes and a deadline, and leave no process behind.

The child leads a session and a process group of its own. To end it, the whole group is ended, and what it has started
in other sessions (`strays.of_call`). A pidfd reports its exit, and it is reaped last: no other process can get the
number of a zombie, so signals always reach the right group. asyncio reaps earlier, so they could reach another one.

Started with vfork: no preexec_fn, which would make CPython fork the whole daemon (see the architecture page).
"""

# The one module that starts processes (style rule 24). Not asyncio's own starter: its watcher reaps the child before
# its group can be ended.
# ruff: noqa: TID251

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Final

from multus_daemon import deadlines
from multus_daemon.plugins import strays
from multus_daemon.runtime import deadline, threads
from multus_daemon.runtime.deadline import ExpiredError, Interrupted

_CHUNK: Final = 64 * 1024
STDERR_TAIL: Final = 8 * 1024
_LATE_SECONDS: Final = 0.5
"""After the deadline, time to read what is in the pipes."""
_LOOK_SECONDS: Final = 0.1
"""Interval for checking whether the work must stop."""
_SHORT_LOOK_SECONDS: Final = 0.001
"""Interval for checking whether a process without a pidfd has ended (kernels before 5.3, old seccomp profiles)."""

_calls = itertools.count(1)
_any_started: Final = threading.Event()
_running: dict[int, str] = {}
"""The mark of each running call (`strays.mark`), by process id."""


def running() -> frozenset[int]:
    """Return the process ids of the programs that run now; each leads a session."""
    return frozenset(_running)


def has_started_any() -> bool:
    """Return True if this process has ever started a program."""
    return _any_started.is_set()


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
    """The last `STDERR_TAIL` bytes of standard error."""


class DeadlineExceededError(Exception):
    """The child did not end in time and was ended; `stderr` is the end of its stderr."""

    def __init__(self, stderr: bytes = b"") -> None:
        super().__init__()
        self.stderr = stderr


class OutputTooLargeError(Exception):
    """The child wrote too much to stdout and was ended."""


FAILURES: Final = (OSError, DeadlineExceededError, OutputTooLargeError)
"""The exceptions of `run`, but for Interrupted."""


def run(argv: Sequence[str], environ: Mapping[str, str], stdin: bytes, limits: Limits) -> Exit:
    """Run a program to its end, in `/`, with `environ` and one more variable, the daemon's mark (`strays`). Blocks.

    Raises OSError (NoThreadError too) if it cannot be started, DeadlineExceededError, OutputTooLargeError, Interrupted.
    On return, the child is reaped. All processes that it started have received SIGKILL, except if the child ended by
    itself and all its pipes are closed: then detached processes continue.
    """
    end = time.monotonic() + limits.timeout
    # In a thread of its own, since exec waits for a disk, which may hang.
    started = threads.start(functools.partial(_popen, list(argv), dict(environ)), name="starting a plugin process")
    try:
        with deadline.within(limits.timeout) as limit:
            limit.wait(started)
    except (Interrupted, ExpiredError) as reason:
        # Nearly always it starts in a moment; then nothing is left when the caller continues.
        futures.wait((started,), deadlines.KILLED_SECONDS)
        started.add_done_callback(_end_unwanted)
        if isinstance(reason, ExpiredError):
            raise DeadlineExceededError from reason
        raise
    child = _Child(started.result(), stdin, limits)
    try:
        return child.result(end)
    finally:
        child.end()


def _popen(argv: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
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
    return popen


def _end_unwanted(started: futures.Future[subprocess.Popen[bytes]]) -> None:
    if not started.exception():
        _Child(started.result(), b"", Limits(0, 0, 0)).end()


class _Child:
    """A started process and its pipes. `end` must be called, whatever happens."""

    def __init__(self, popen: subprocess.Popen[bytes], stdin: bytes, limits: Limits) -> None:
        assert popen.stdin is not None
        assert popen.stdout is not None
        assert popen.stderr is not None
        self._popen, self._limits = popen, limits
        self._rest = memoryview(stdin)
        self._stdout, self._stderr = bytearray(), bytearray()
        self._outputs = {popen.stdout.fileno(): self._stdout, popen.stderr.fileno(): self._stderr}
        """By descriptor, of those pipes that are open."""
        self._too_much = self._exited = False
        self._poll = select.poll()
        os.set_blocking(popen.stdin.fileno(), False)
        self._poll.register(popen.stdin, select.POLLOUT)
        for descriptor in self._outputs:
            self._poll.register(descriptor, select.POLLIN)
        self._pidfd = -1
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(popen.pid)
            self._poll.register(self._pidfd, select.POLLIN)

    def result(self, end: float) -> Exit:
        """Wait for the process until `end` on the monotonic clock; return how it ended. Raises as `run` does."""
        limit = deadline.current()
        self._serve(lambda: self._exited or self._too_much or limit.stopped, min(end, limit.end))
        if not (self._exited or self._too_much):
            limit.check()
            raise DeadlineExceededError(bytes(self._stderr))
        if not self._too_much:
            end = time.monotonic() + deadlines.PIPES_AFTER_EXIT_SECONDS
            self._serve(lambda: self._too_much or not self._outputs, end)
        if self._too_much:
            raise OutputTooLargeError
        if self._outputs:
            self._signal(signal.SIGKILL)
        return Exit(self._popen.wait(), bytes(self._stdout), bytes(self._stderr))

    def _serve(self, until: Callable[[], bool], end: float) -> None:
        """Read and write the pipes until `until` is true, or until `end` has passed and the pipes are empty."""
        while not until() and (left := end - time.monotonic()) > -_LATE_SECONDS:
            longest = _LOOK_SECONDS if self._outputs or self._pidfd >= 0 else _SHORT_LOOK_SECONDS
            ready = self._poll.poll(min(max(left, 0.0), longest) * 1000)
            for descriptor, _ in ready:
                if descriptor in self._outputs:
                    self._read(descriptor)
                elif descriptor == self._pidfd:
                    self._exited = True
                    self._poll.unregister(descriptor)
                else:
                    self._write(descriptor)
            if self._pidfd < 0 and not self._exited:
                # WNOWAIT leaves a zombie.
                self._exited = bool(os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG))
            if not ready and left <= 0:
                return

    def _read(self, descriptor: int) -> None:
        chunk = os.read(descriptor, _CHUNK)
        kept = self._outputs[descriptor]
        kept += chunk
        if kept is self._stderr:
            del kept[:-STDERR_TAIL]
        else:
            self._too_much = len(kept) > self._limits.max_output
        if not chunk or self._too_much:
            self._poll.unregister(descriptor)
            del self._outputs[descriptor]

    def _write(self, descriptor: int) -> None:
        """Write to the child's stdin. It is no error if the child closes it: a plugin need not read it."""
        assert self._popen.stdin is not None
        try:
            self._rest = self._rest[os.write(descriptor, self._rest) :]
        except BlockingIOError:
            return
        except OSError:
            self._rest = memoryview(b"")
        if not self._rest:
            self._poll.unregister(descriptor)
            self._popen.stdin.close()

    def end(self) -> None:
        """End the processes that still run, reap the child, close the pipes."""
        popen = self._popen
        try:
            if popen.returncode is None:
                self._stop_group()
        finally:
            if popen.returncode is None:
                self._signal(signal.SIGKILL)
            _running.pop(popen.pid, None)
            for pipe in (popen.stdin, popen.stdout, popen.stderr):
                if pipe:
                    pipe.close()
            if self._pidfd >= 0:
                os.close(self._pidfd)
            if popen.poll() is None:
                # The kernel holds it (state D).
                threads.start(popen.wait, name="reaping a plugin process")

    def _stop_group(self) -> None:
        pid = self._popen.pid
        elsewhere: list[int] = []
        try:
            if not self._exited:
                # Before it ends: its children get another parent then. And after that: it may have started more.
                elsewhere += strays.of_call(_running[pid], pid)
                self._signal(signal.SIGTERM)
                self._serve(lambda: self._exited, time.monotonic() + self._limits.grace)
                self._signal(signal.SIGKILL)
                elsewhere += strays.of_call(_running[pid], pid)
        finally:
            self._signal(signal.SIGKILL)
            for pidfd in elsewhere:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)
        self._serve(lambda: self._exited, time.monotonic() + deadlines.KILLED_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        # Only while its leader is not reaped. An empty group is fine.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, number)
