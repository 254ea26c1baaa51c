"""The destinations of log lines, each with a bounded queue and a thread that writes."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import stat
import threading
import time
from contextvars import Context
from typing import Final

from multus_daemon import deadlines
from multus_daemon.logs.backups import Backups

_PACKAGE: Final = "multus_daemon"
_QUEUE_BYTES: Final = 4 * 1024 * 1024
"""Capacity of each queue, some 20,000 lines; lines beyond it are dropped."""
_STDERR: Final = 2
_MISSING: Final = "%d lines are missing here, they could not be written"
_AGE_SECONDS: Final = 3600.0
"""Interval for removing old files by their age while none is rotated."""


class QueueHandler(logging.Handler):
    """Pass lines through a bounded queue to a thread that writes them to a sink. Logging neither blocks nor raises.

    After a loss, a line says how many lines are missing.
    """

    def __init__(self, sink: Stderr | RotatingFile, name: str) -> None:
        """`name`: of the destination in `dropped`, `stderr` or `file`."""
        super().__init__()
        self.name = name
        self.sink = sink
        self._lines: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        # Each number has one writer: the logging threads, under the handler's lock, or the writing thread.
        self._put = self._overflowed = self._told = 0
        self._taken = self._failed = self._missing = 0
        self._closed = False
        self._thread = threading.Thread(target=self._write_all, name=f"log {name}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Number of lost lines."""
        return self._overflowed + self._failed

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one record, or count it as lost. The caller holds the handler's lock."""
        try:
            line = self._line(record)
        except Exception as error:
            line = self._note(logging.ERROR, "a line of %s can't be formatted: %r", record.name, error)
        if self._closed or self._put - self._taken + len(line) > _QUEUE_BYTES:
            self._overflowed += 1
            return
        if missing := self._overflowed - self._told:
            self._told = self._overflowed
            line = self._note(logging.WARNING, _MISSING, missing) + line
        self._put += len(line)
        self._lines.put(line)

    def drain(self, seconds: float) -> bool:
        """Wait until the queue is written or lost; return False after `seconds`."""
        reached = threading.Event()
        self._lines.put(reached)
        return self._closed or reached.wait(seconds)

    def close(self) -> None:
        """Write the waiting lines, for LOG_FLUSH_SECONDS at most, and drop later ones."""
        if not self._closed:
            self._closed = True
            self._lines.put(None)
            self._thread.join(deadlines.LOG_FLUSH_SECONDS)
            if self._thread.is_alive():
                self.sink.abandon()
        super().close()

    def _write_all(self) -> None:
        while (item := self._next()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._write(item)
                self._taken += len(item)
        self.sink.close()

    def _next(self) -> bytes | threading.Event | None:
        """Wait for the next item; meanwhile do the sink's other work, a few milliseconds at a time."""
        while self.sink.is_busy:
            with contextlib.suppress(queue.Empty):
                return self._lines.get_nowait()
            self.sink.work()
        return self._lines.get()

    def _write(self, line: bytes) -> None:
        try:
            if self._missing:
                self.sink.write(self._note(logging.WARNING, _MISSING, self._missing))
                self._missing = 0
            self.sink.write(line)
        except OSError as error:
            self._failed += 1
            self._missing += 1
            if self._missing == 1 and isinstance(self.sink, RotatingFile):
                text = "log file %s: %s; lines are lost until it can be written again"
                with contextlib.suppress(OSError):
                    Stderr().write(self._note(logging.ERROR, text, self.sink.path, error.strerror))

    def _line(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode("utf-8", "backslashreplace")

    def _note(self, level: int, text: str, *arguments: object) -> bytes:
        # In an empty context: the missing lines do not belong to the request that logs now.
        return Context().run(self._line, logging.LogRecord(_PACKAGE, level, "", 0, text, arguments, None))


# A sink has `write`, which writes a whole line, blocks and raises OSError; `is_busy` and `work`, one piece of its other
# work; `close`, which may block; and `abandon`, for the end of the program while the writing thread hangs in one of
# these.


class Stderr:
    """Standard error without Python's buffer, whose lock the interpreter waits for when it ends."""

    is_busy = False

    def work(self) -> None:
        """There is none."""

    def write(self, line: bytes) -> None:
        """Write a whole line. Blocks; raises OSError."""
        view = memoryview(line)
        while view:
            try:
                view = view[os.write(_STDERR, view) :]
            except BlockingIOError:
                # Another process with the same pipe made it non-blocking.
                select.select((), (_STDERR,), ())

    def close(self) -> None:
        """Wait while standard error is blocked: `abandon` then protects the next writer."""
        select.select((), (_STDERR,), ())

    def abandon(self) -> None:
        """Redirect it to /dev/null: later writers must not hang, such as a traceback at the end."""
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, _STDERR)
            os.close(nowhere)


class RotatingFile:
    """A file that only its owner can read, as it has pod names, addresses and paths; it is rotated by its size."""

    def __init__(self, path: str, *, max_bytes: int, backups: int, days: int, compress: bool) -> None:
        """`max_bytes` and `days`: 0 for no limit; `backups`: with 0 it is never rotated. Raises OSError."""
        self.path = os.path.abspath(path)
        self.max_bytes = max_bytes
        self.old = Backups(self.path, most=backups, days=days, compress=compress)
        self._descriptor = -1
        self._is_torn = False
        self._looked = time.monotonic()
        self._open()
        self.old.tidy()

    @property
    def is_busy(self) -> bool:
        """True while an old file is to be compressed."""
        return self.old.is_busy

    def work(self) -> None:
        """Compress one piece of an old file."""
        self.old.work()

    def write(self, line: bytes) -> None:
        """Write a whole line. Blocks; raises OSError."""
        if self._descriptor < 0 or self._is_moved():
            self._open()
        status = os.fstat(self._descriptor)
        if 0 < self.max_bytes <= status.st_size + len(line) and self.old.most and stat.S_ISREG(status.st_mode):
            # If the rotation fails, the file grows: better too long than silent.
            with contextlib.suppress(OSError):
                self.old.take()
                self._open()
        elif time.monotonic() - self._looked > _AGE_SECONDS:
            self._looked = time.monotonic()
            self.old.tidy()
        view = memoryview(b"\n" + line if self._is_torn else line)
        while view:
            written = os.write(self._descriptor, view)
            self._is_torn = view[written - 1] != ord("\n")
            view = view[written:]

    def _is_moved(self) -> bool:
        """Report whether another program has renamed or removed the file: the shim, another daemon, logrotate."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def _open(self) -> None:
        """Open the file at the path in place of the one that is open, which stays if that fails. Raises OSError."""
        # A FIFO without a reader is ENXIO then; without the flag it would stop the daemon.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        descriptor = os.open(self.path, flags, 0o600)
        os.set_blocking(descriptor, True)
        self._close()
        self._descriptor = descriptor

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._is_torn = -1, False

    def close(self) -> None:
        """Close the file; what is half compressed stays as it was."""
        self.old.stop()
        self._close()

    def abandon(self) -> None:
        """Nothing else writes to it."""
