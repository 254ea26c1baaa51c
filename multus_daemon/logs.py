"""Log lines: `<RFC 3339 time> [<level>] <message> key=value …`, one record a line, to stderr, a file, or both.

The shape and the level names are upstream's, so that what reads its log reads ours. Fields come from a context
variable: what is set around a request stands on every line that is logged for it, tasks it starts included.
Nothing that a caller passes can begin a line of its own; a traceback follows its line, indented.

Who logs never waits: standard error and the file each have a queue of bounded size and a thread that writes. A reader
of standard error that has stopped reading, or a disk that hangs, costs lines, which are counted, and nothing else.
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
from typing import Any, Final, Protocol

from multus_daemon import deadlines

LEVELS: Final[dict[str, int]] = {
    "panic": logging.CRITICAL,
    "error": logging.ERROR,
    "verbose": logging.INFO,
    "debug": logging.DEBUG,
}
_NAMES: Final = {
    logging.CRITICAL: "panic",
    logging.ERROR: "error",
    logging.WARNING: "warning",
    logging.INFO: "verbose",
    logging.DEBUG: "debug",
}
DEFAULT_OPTIONS: Final[dict[str, Any]] = {"maxSize": 100, "maxBackups": 5}
_PACKAGE: Final = "multus_daemon"
_LONGEST: Final = 32 * 1024
"""Characters of a message, of a value and of a line of a traceback: they quote what came from outside."""
_QUEUE_BYTES: Final = 4 * 1024 * 1024
"""Of lines that wait to be written, for each of the two ways; what comes beyond is dropped. Some 20,000 lines."""
_STDERR: Final = 2
_MISSING: Final = "%d lines are missing here, they could not be written"

_fields: ContextVar[tuple[tuple[str, object], ...]] = ContextVar("multus_log_fields", default=())


@contextlib.contextmanager
def fields(**values: object) -> Iterator[None]:
    """Every record of the block, and of the tasks it starts, has these fields. Empty and None values are left out."""
    kept = tuple((key, value) for key, value in _fields.get() if key not in values)
    token = _fields.set(kept + tuple((key, value) for key, value in values.items() if value not in ("", None)))
    try:
        yield
    finally:
        _fields.reset(token)


def configure(
    level: str = "verbose",
    to_stderr: bool = True,
    *,
    file: str = "",
    options: Mapping[str, Any] | None = None,
) -> None:
    """Set up logging for the process, in place of any earlier set-up.

    `level`: a key of `LEVELS`, in any case. `file`: empty for none; a new one gets mode 0600. `options`: upstream's
    `logOptions`, of which two count: `maxSize` in MB before the file is put aside (default 100, 0: never), and
    `maxBackups`, how many old ones stay (default 5; `<file>.1` is the newest).

    Other packages log from warnings upwards only. Raises ValueError for an unknown level, OSError for the file;
    the earlier set-up stays then.
    """
    level = level.lower()
    if level not in LEVELS:
        raise ValueError(f"log level {level!r}: one of {', '.join(LEVELS)} is needed")
    handlers: list[logging.Handler] = []
    if file:
        limits = DEFAULT_OPTIONS | dict(options or {})
        handlers.append(
            QueueHandler(
                RotatingFile(file, maxBytes=limits["maxSize"] * 1024 * 1024, backupCount=limits["maxBackups"]), "file"
            )
        )
    if to_stderr:
        handlers.append(QueueHandler(Stderr(), "stderr"))
    if not handlers:
        # Without any handler, logging prints warnings on stderr after all.
        handlers.append(logging.NullHandler())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.setFormatter(LineFormatter())
        root.addHandler(handler)
    root.setLevel(max(LEVELS[level], logging.WARNING))
    logging.getLogger(_PACKAGE).setLevel(LEVELS[level])


def dropped() -> dict[str, int]:
    """How many lines could not be written, by the way: `stderr`, `file`; those that are in use."""
    return {handler.name or "": handler.dropped for handler in _queues()}


def flush(seconds: float = deadlines.LOG_FLUSH_SECONDS) -> bool:
    """Wait until all that was logged is written, as long as that; whether it is."""
    return all(handler.drain(seconds) for handler in _queues())


def close() -> None:
    """Write what waits, for LOG_FLUSH_SECONDS at most; what is logged later is lost.

    Standard error that takes nothing in that time leads nowhere from then on: whoever still writes to it, the
    interpreter at its end above all, must not wait for ever.
    """
    for handler in _queues():
        handler.close()


def _queues() -> list[QueueHandler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, QueueHandler)]


class LineFormatter(logging.Formatter):
    """The format that the module's docstring describes."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the lines of the traceback if there is one."""
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
    """`value` as it stands where it is one plain word, else as a JSON string in ASCII."""
    text = _cut(str(value))
    if text and all(character.isprintable() and character not in ' "=\\' for character in text):
        return text
    return _escape(text, '"')


def _one_line(text: str) -> str:
    """`text` with everything escaped that could end the line or steer a terminal."""
    text = _cut(text)
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else _escape(character) for character in text)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def _escape(text: str, quotes: str = "") -> str:
    # JSON leaves DEL as it is, a control character all the same.
    return quotes + json.dumps(text)[1:-1].replace("\x7f", "\\u007f") + quotes


class Sink(Protocol):
    """Where lines go; used by one thread."""

    def write(self, line: bytes) -> None:
        """Write the whole line; blocks. Raises OSError."""
        ...

    def close(self) -> None:
        """Nothing more is written. May block."""
        ...

    def abandon(self) -> None:
        """The program ends while the thread hangs in `write` or `close`."""
        ...


class QueueHandler(logging.Handler):
    """Lines through a bounded queue to the thread that writes them. Logging neither blocks nor raises.

    Where lines are lost, it says how many once there is room again, or the sink can be written to.
    """

    def __init__(self, sink: Sink, name: str) -> None:
        """`name`: `stderr` or `file`."""
        super().__init__()
        self.name = name
        self.sink = sink
        self._lines: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        # Each number is changed by one side only: those who log, under the handler's lock, or the thread.
        self._put = self._overflowed = self._told = 0
        self._taken = self._failed = self._missing = 0
        self._closed = False
        self._thread = threading.Thread(target=self._write_all, name=f"log {name}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """How many lines could not be written."""
        return self._overflowed + self._failed

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one record, or count it as dropped. The caller holds the handler's lock."""
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
        """Wait until what is in the queue has been written, or lost; whether that was so in time."""
        reached = threading.Event()
        self._lines.put(reached)
        return self._closed or reached.wait(seconds)

    def close(self) -> None:
        """Write what waits, for LOG_FLUSH_SECONDS at most; what is logged later is lost."""
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
            if self._missing == 1 and isinstance(self.sink, RotatingFile):
                self._complain(self.sink.baseFilename, error)

    def _complain(self, path: str, error: OSError) -> None:
        """Tell standard error of the first line that the file has lost."""
        text = "log file %s: %s; lines are lost until it can be written again"
        with contextlib.suppress(OSError):
            Stderr().write(self._note(logging.ERROR, text, path, error.strerror))

    def _line(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode("utf-8", "backslashreplace")

    def _note(self, level: int, text: str, *arguments: object) -> bytes:
        # In a context of its own: what is missing is not of the request that happens to log now.
        return Context().run(self._line, logging.LogRecord(_PACKAGE, level, "", 0, text, arguments, None))


class Stderr:
    """Standard error, past Python's own buffer: the interpreter waits for that one's lock when it ends."""

    def write(self, line: bytes) -> None:
        """See `Sink`."""
        view = memoryview(line)
        while view:
            try:
                view = view[os.write(_STDERR, view) :]
            except BlockingIOError:
                # Somebody who has the same pipe made it non-blocking.
                select.select((), (_STDERR,), ())

    def close(self) -> None:
        """See `Sink`. Whoever writes to it next will not wait: it is seen here whether it takes anything."""
        select.select((), (_STDERR,), ())

    def abandon(self) -> None:
        """See `Sink`. Who writes to it from now on, a traceback at the end above all, must not hang too."""
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, _STDERR)
            os.close(nowhere)


class RotatingFile(RotatingFileHandler):
    """A rotating file that only its owner can read: pod names, addresses and paths stand in it.

    Only the base class's rotation is used: no record is handled by it.
    """

    # Neither buffered nor decoded, other than the base class has it: a buffer that can't be emptied fails again when
    # the file is closed, and the base class never recovers from that.
    stream: Any
    _is_torn = False

    def _open(self) -> Any:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return open(descriptor, "ab", buffering=0)

    def write(self, line: bytes) -> None:
        """Append a whole line. Raises OSError."""
        if self.stream is None:
            self.stream = self._open()
        status = os.fstat(self.stream.fileno())
        if 0 < self.maxBytes <= status.st_size + len(line) and self.backupCount and stat.S_ISREG(status.st_mode):
            # Where it can't be put aside it grows on: better too long than silent.
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
        """See `Sink`. Nothing waits for the thread."""
