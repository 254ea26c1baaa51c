"""The destinations of log lines, each with a bounded queue and a thread that writes."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import io
import logging
import os
import queue
import select
import shutil
import threading
import time
from contextvars import Context
from logging.handlers import RotatingFileHandler, WatchedFileHandler
from pathlib import Path
from typing import Any, Final

from multus_daemon import deadlines

_PACKAGE: Final = "multus_daemon"
_QUEUE_MAX: Final = 4 * 1024 * 1024
"""Maximum characters in each queue, some 20,000 lines. When it is full, lines are dropped."""
_STDERR: Final = 2
_MISSING: Final = "%d lines are missing here, they could not be written"
_AGE_SECONDS: Final = 3600.0
"""Interval for removing files by their age, even if no file is rotated."""
_DAY: Final = 86400
_CHUNK: Final = 256 * 1024


class QueueHandler(logging.Handler):
    """Pass lines through a bounded queue to a thread that writes them to a sink. Logging neither blocks nor raises.

    After lines were lost, a line says how many.
    """

    def __init__(self, sink: Stderr | RotatingFile, name: str) -> None:
        """`name`: of the destination, as in `logs.dropped`: `stderr` or `file`."""
        super().__init__()
        self.name = name
        self.sink = sink
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
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
        if self._closed or self._put - self._taken + len(line) > _QUEUE_MAX:
            self._overflowed += 1
            return
        if missing := self._overflowed - self._told:
            self._told = self._overflowed
            line = self._note(logging.WARNING, _MISSING, missing) + line
        self._put += len(line)
        self._lines.put(line)

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
        while (line := self._lines.get()) is not None:
            self._write(line)
            self._taken += len(line)
        self.sink.close()

    def _write(self, line: str) -> None:
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
                    Stderr().write(self._note(logging.ERROR, text, self.sink.baseFilename, error.strerror))

    def _line(self, record: logging.LogRecord) -> str:
        return f"{self.format(record)}\n"

    def _note(self, level: int, text: str, *arguments: object) -> str:
        # In an empty context: the missing lines do not belong to the request that logs now.
        return Context().run(self._line, logging.LogRecord(_PACKAGE, level, "", 0, text, arguments, None))


# A sink has `write`, which writes a whole line, blocks and raises OSError; `close`, which may block; and `abandon`, for
# the end of the program while the writing thread hangs in one of these.


class Stderr:
    """Standard error without Python's buffer: the interpreter, when it ends, would wait for the lock of that buffer."""

    def write(self, line: str) -> None:
        """Write a whole line. Blocks; raises OSError."""
        view = memoryview(_encoded(line))
        while view:
            try:
                view = view[os.write(_STDERR, view) :]
            except BlockingIOError:
                # Another process with the same pipe made it non-blocking.
                select.select((), (_STDERR,), ())

    def close(self) -> None:
        """Wait while standard error is blocked; the caller limits this wait, and then calls `abandon`."""
        select.select((), (_STDERR,), ())

    def abandon(self) -> None:
        """Redirect standard error to /dev/null, so that a traceback at the interpreter's end does not hang."""
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, _STDERR)
            os.close(nowhere)


class RotatingFile(RotatingFileHandler, WatchedFileHandler):
    """A file that only its owner can read, as it has pod names, addresses and paths; it is rotated by its size.

    Other programs may rename or remove it: the shim, another daemon, logrotate.
    """

    terminator = ""

    def __init__(self, path: str, *, max_bytes: int, backups: int, days: int, compress: bool) -> None:
        """`max_bytes` and `days`: 0 for no limit; `backups`: 0 for no rotation. Raises OSError.

        Old files are `<path>.1`, the newest, to `<path>.<backups>`, compressed `<path>.1.gz` and so on.
        """
        RotatingFileHandler.__init__(self, path, maxBytes=max_bytes if backups else 0, backupCount=backups)
        # WatchedFileHandler compares the open file by them.
        self.dev = self.ino = -1
        self._statstream()
        self.rotator = self._rotate
        self.days = days
        self.compresses = compress
        self._tidied = 0.0
        self._compressing = threading.Thread()
        self._tidy()

    def write(self, line: str) -> None:
        """Write a whole line. Blocks; raises OSError."""
        self.reopenIfNeeded()
        if time.monotonic() - self._tidied > _AGE_SECONDS:
            self._tidy()
        self.emit(logging.makeLogRecord({"msg": line}))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Raise the error of `emit`, so that `write` raises it."""
        raise

    def abandon(self) -> None:
        """Do nothing: no other code writes to the file."""

    def doRollover(self) -> None:  # noqa: N802
        """Rotate: rename the file to the newest old file, and begin a new one."""
        if self._compressing.is_alive():
            self._compressing.join()
        # If that fails, the file grows: better too long than silent.
        with contextlib.suppress(OSError):
            super().doRollover()
            self._tidy()

    def _open(self) -> Any:
        return _Lines(self.baseFilename, "a", opener=_private)

    def _rotate(self, source: str, newest: str) -> None:
        """Rename `source` to `newest`, and compressed old files to the next number. Raises OSError."""
        for number in range(self.backupCount - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{source}.{number}.gz", f"{source}.{number + 1}.gz")
        os.replace(source, newest)

    def _tidy(self) -> None:
        """Remove old files by their age, and compress the others in a thread, so that log lines do not wait."""
        self._tidied = time.monotonic()
        plain = []
        for number in range(1, self.backupCount + 1):
            path = f"{self.baseFilename}.{number}"
            for old in (path, f"{path}.gz"):
                with contextlib.suppress(OSError):
                    if self.days and time.time() - os.lstat(old).st_mtime > self.days * _DAY:
                        os.unlink(old)
            if os.path.isfile(path) and not os.path.lexists(f"{path}.gz"):
                plain.append(path)
        if self.compresses and plain and not self._compressing.is_alive():
            self._compressing = threading.Thread(target=_compress, args=(plain,), name="log gzip", daemon=True)
            self._compressing.start()


class _Lines(io.FileIO):
    """A file without a buffer. If a full disk has cut off a line, the next line begins on a new one."""

    is_torn = False

    def tell(self) -> int:
        """Return the position; 0 for a FIFO, which has none: Python 3.13 asks for it, too."""
        return super().tell() if self.seekable() else 0

    def write(self, line: str) -> int:  # type: ignore[override]
        view = memoryview(_encoded("\n" * self.is_torn + line))
        while view:
            written = super().write(view) or 0
            self.is_torn = view[written - 1] != ord("\n")
            view = view[written:]
        return len(line)


def _encoded(line: str) -> bytes:
    return line.encode("utf-8", "backslashreplace")


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner can read. Raises OSError."""
    # A FIFO without a reader is ENXIO then; without the flag it would stop the daemon.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
    os.set_blocking(descriptor, True)
    return descriptor


def _compress(paths: list[str]) -> None:
    """Compress old files. A file that can't be compressed is tried again after the next rotation."""
    for path in paths:
        with contextlib.suppress(OSError):
            _compress_one(path, f"{path}.gz.tmp")


def _compress_one(path: str, beside: str) -> None:
    """Compress `path` into a temporary file, rename that, then remove `path`: a crash loses nothing. Raises OSError."""
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(open(path, "rb"))
        # Several daemons may write the same log during a roll-out.
        fcntl.flock(source, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stack.callback(Path(beside).unlink, missing_ok=True)
        with open(beside, "wb", opener=lambda name, flags: _private(name, flags | os.O_NOFOLLOW)) as target:
            with gzip.GzipFile(fileobj=target, mode="wb") as packed:
                shutil.copyfileobj(source, packed, _CHUNK)
            target.flush()
            status = os.fstat(source.fileno())
            # Its age is that of its lines.
            os.utime(target.fileno(), (status.st_atime, status.st_mtime))
            os.fsync(target.fileno())
        # Another daemon may have rotated or compressed it meanwhile.
        if os.path.samestat(status, os.lstat(path)):
            os.replace(beside, f"{path}.gz")
            os.unlink(path)
