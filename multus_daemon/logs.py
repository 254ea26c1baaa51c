"""Log lines: `<RFC 3339 time> [<level>] <message> key=value …`, one record a line, to stderr, a file, or both.

Format and level names are upstream's. Fields come from a context variable, so each line of a request has the fields of
the request, and so has each line of the tasks that it starts. Callers cannot forge lines: control characters are
escaped, and a traceback follows its line, indented.

Logging never blocks: standard error and the file each have a bounded queue and a thread that writes. When a reader
stops reading or a disk hangs, lines are dropped and counted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import stat
import threading
from collections.abc import Iterator, Mapping
from contextvars import Context, ContextVar
from datetime import datetime
from logging.handlers import RotatingFileHandler
from typing import Any, Final

from multus_daemon import deadlines

LEVELS: Final[dict[str, int]] = {
    "panic": logging.CRITICAL,
    "error": logging.ERROR,
    "verbose": logging.INFO,
    "debug": logging.DEBUG,
}
_NAMES: Final = {number: name for name, number in LEVELS.items()} | {logging.WARNING: "warning"}
DEFAULT_OPTIONS: Final[dict[str, Any]] = {"maxSize": 100, "maxBackups": 5}
_PACKAGE: Final = "multus_daemon"
_LONGEST: Final = 32 * 1024
"""Maximum characters of a message, a value and a traceback line, which quote input from outside."""
_QUEUE_BYTES: Final = 4 * 1024 * 1024
"""Capacity of each queue, some 20,000 lines; lines beyond it are dropped."""
_STDERR: Final = 2
_MISSING: Final = "%d lines are missing here, they could not be written"

_fields: ContextVar[tuple[tuple[str, object], ...]] = ContextVar("multus_log_fields", default=())


@contextlib.contextmanager
def fields(**values: object) -> Iterator[None]:
    """Add these fields to every record of the block and of the tasks that it starts; omit empty and None values."""
    kept = tuple((key, value) for key, value in _fields.get() if key not in values)
    token = _fields.set(kept + tuple((key, value) for key, value in values.items() if value not in ("", None)))
    try:
        yield
    finally:
        _fields.reset(token)


def configure(
    level: str = "verbose", to_stderr: bool = True, *, file: str = "", options: Mapping[str, Any] | None = None
) -> None:
    """Set up logging for the process, in place of any earlier set-up; other packages log warnings and above.

    `level`: a key of `LEVELS`, in any case. `file`: empty for none; a new one gets mode 0600. `options`: upstream's
    `logOptions`, of which two are used: `maxSize` in MB before rotation (default 100, 0: never), and `maxBackups`, the
    number of old files (default 5; `<file>.1` is the newest). Raises ValueError for an unknown level, OSError for the
    file, and keeps the earlier set-up then.
    """
    level = level.lower()
    if level not in LEVELS:
        raise ValueError(f"log level {level!r}: one of {', '.join(LEVELS)} is needed")
    handlers: list[logging.Handler] = []
    if file:
        limits = DEFAULT_OPTIONS | dict(options or {})
        sink = _RotatingFile(file, maxBytes=limits["maxSize"] * 1024 * 1024, backupCount=limits["maxBackups"])
        handlers.append(QueueHandler(sink, "file"))
    if to_stderr:
        handlers.append(QueueHandler(_Stderr(), "stderr"))
    # Without any handler, logging prints warnings on stderr after all.
    handlers = handlers or [logging.NullHandler()]
    root = logging.getLogger()
    for old in tuple(root.handlers):
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.setFormatter(LineFormatter())
        root.addHandler(handler)
    root.setLevel(max(LEVELS[level], logging.WARNING))
    logging.getLogger(_PACKAGE).setLevel(LEVELS[level])


def dropped() -> dict[str, int]:
    """Return the number of lost lines by destination in use: `stderr`, `file`."""
    return {handler.name or "": handler.dropped for handler in _queues()}


def flush(seconds: float = deadlines.LOG_FLUSH_SECONDS) -> bool:
    """Wait until all lines are written; return False after `seconds`."""
    return all(handler.drain(seconds) for handler in _queues())


def close() -> None:
    """Write the waiting lines, for LOG_FLUSH_SECONDS at most, and drop later ones.

    If standard error is still blocked then, redirect it to /dev/null: the interpreter must not hang when it ends.
    """
    for handler in _queues():
        handler.close()


def _queues() -> list[QueueHandler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, QueueHandler)]


class LineFormatter(logging.Formatter):
    """The line format of the module's docstring."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, followed by the lines of the traceback."""
        time = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        level = _NAMES.get(record.levelno, record.levelname.lower())
        line = f"{time} [{level}] {_one_line(record.getMessage())}"
        for key, value in _fields.get():
            line += f" {key}={quote(value)}"
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        for text in (record.exc_text, self.formatStack(record.stack_info) if record.stack_info else ""):
            for part in (text or "").splitlines():
                line += f"\n    {_one_line(part)}"
        return line


def quote(value: object) -> str:
    """Return `value` unchanged if it is one plain word, else as a JSON string in ASCII."""
    text = _cut(str(value))
    if text and all(character.isprintable() and character not in ' "=\\' for character in text):
        return text
    return _escape(text, '"')


def _one_line(text: str) -> str:
    """Escape control characters, which could end the line or control a terminal."""
    text = _cut(text)
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else _escape(character) for character in text)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def _escape(text: str, quotes: str = "") -> str:
    # JSON does not escape DEL, which is a control character.
    return quotes + json.dumps(text)[1:-1].replace("\x7f", "\\u007f") + quotes


class QueueHandler(logging.Handler):
    """Pass lines through a bounded queue to a thread that writes them to a sink. Logging neither blocks nor raises.

    After a loss, a line says how many lines are missing.
    """

    def __init__(self, sink: _Stderr | _RotatingFile, name: str) -> None:
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
        while (item := self._lines.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._write(item)
                self._taken += len(item)
        self.sink.close()

    def _write(self, line: bytes) -> None:
        try:
            if self._missing:
                self.sink.write(self._note(logging.WARNING, _MISSING, self._missing))
                self._missing = 0
            self.sink.write(line)
        except OSError as error:
            self._failed += 1
            self._missing += 1
            if self._missing == 1 and isinstance(self.sink, _RotatingFile):
                text = "log file %s: %s; lines are lost until it can be written again"
                with contextlib.suppress(OSError):
                    _Stderr().write(self._note(logging.ERROR, text, self.sink.baseFilename, error.strerror))

    def _line(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode("utf-8", "backslashreplace")

    def _note(self, level: int, text: str, *arguments: object) -> bytes:
        # In an empty context: the missing lines do not belong to the request that logs now.
        return Context().run(self._line, logging.LogRecord(_PACKAGE, level, "", 0, text, arguments, None))


# A sink has `write`, which writes a whole line, blocks and raises OSError; `close`, which may block; and `abandon`, for
# the end of the program while the writing thread hangs in one of these.


class _Stderr:
    """Standard error without Python's buffer, whose lock the interpreter waits for when it ends."""

    def write(self, line: bytes) -> None:
        view = memoryview(line)
        while view:
            try:
                view = view[os.write(_STDERR, view) :]
            except BlockingIOError:
                # Another process with the same pipe made it non-blocking.
                select.select((), (_STDERR,), ())

    def close(self) -> None:
        # Blocks while standard error is blocked: `abandon` then protects the next writer.
        select.select((), (_STDERR,), ())

    def abandon(self) -> None:
        # Later writers must not hang, such as a traceback at the end.
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, _STDERR)
            os.close(nowhere)


class _RotatingFile(RotatingFileHandler):
    """A rotating file that only its owner can read, as it has pod names, addresses and paths.

    Only the rotation of the base class is used; it handles no records.
    """

    # Binary and unbuffered, unlike in the base class: a buffer that can't be flushed fails again when the file is
    # closed, and the base class never recovers from that.
    stream: Any
    _is_torn = False

    def _open(self) -> Any:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return open(descriptor, "ab", buffering=0)

    def write(self, line: bytes) -> None:
        if self.stream is None:
            self.stream = self._open()
        status = os.fstat(self.stream.fileno())
        if 0 < self.maxBytes <= status.st_size + len(line) and self.backupCount and stat.S_ISREG(status.st_mode):
            # If the rotation fails, the file grows: better too long than silent.
            with contextlib.suppress(OSError):
                self.doRollover()
            if self.stream is None:
                self.stream = self._open()
        view = memoryview(b"\n" + line if self._is_torn else line)
        while view:
            written = self.stream.write(view)
            self._is_torn = view[written - 1] != ord("\n")
            view = view[written:]

    def abandon(self) -> None:
        pass
