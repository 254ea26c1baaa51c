"""Log lines: `<RFC 3339 time> [<level>] <message> key=value …`, one record a line, to stderr, a file, or both.

The shape and the level names are upstream's, so that what reads its log reads ours. Fields come from a context
variable: what is set around a request stands on every line that is logged for it, tasks it starts included.
Nothing that a caller passes can begin a line of its own; a traceback follows its line, indented.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from logging.handlers import RotatingFileHandler
from typing import Any, Final

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
            _PrivateFileHandler(
                file, maxBytes=limits["maxSize"] * 1024 * 1024, backupCount=limits["maxBackups"], encoding="utf-8"
            )
        )
    if to_stderr:
        handlers.append(logging.StreamHandler())
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


class _PrivateFileHandler(RotatingFileHandler):
    """A rotating file that only its owner can read: pod names, addresses and paths stand in it.

    A disk that is full, or takes no writes, costs lines and nothing else: standard error is told of the first one that
    is lost, and the file, once it can be written again, how many there were.
    """

    # Neither buffered nor decoded, other than the base class has it: a buffer that can't be emptied fails again when
    # the file is closed, and the base class never recovers from that.
    stream: Any
    _lost = 0
    _is_torn = False

    def _open(self) -> Any:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return open(descriptor, "ab", buffering=0)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, or count it as lost."""
        try:
            data = self._line(record)
        except Exception:
            self.handleError(record)
            return
        try:
            if self._lost:
                text = "%d lines are missing here, they could not be written"
                note = logging.LogRecord(_PACKAGE, logging.WARNING, "", 0, text, (self._lost,), None)
                self._write(self._line(note))
                self._lost = 0
            self._write(data)
        except OSError as error:
            self._lost += 1
            if self._lost == 1:
                self._complain(record, error)

    def _line(self, record: logging.LogRecord) -> bytes:
        return (self.format(record) + self.terminator).encode("utf-8", "backslashreplace")

    def _write(self, data: bytes) -> None:
        """Append whole lines. Raises OSError."""
        if self.stream is None:
            self.stream = self._open()
        status = os.fstat(self.stream.fileno())
        if 0 < self.maxBytes <= status.st_size + len(data) and self.backupCount and stat.S_ISREG(status.st_mode):
            # Where it can't be put aside it grows on: better too long than silent.
            with contextlib.suppress(OSError):
                self.doRollover()
            if self.stream is None:
                self.stream = self._open()
        view = memoryview(b"\n" + data if self._is_torn else data)
        while view:
            written = self.stream.write(view)
            self._is_torn = view[written - 1] != ord("\n")
            view = view[written:]

    def _complain(self, record: logging.LogRecord, error: OSError) -> None:
        text = "log file %s: %s; lines are lost until it can be written again"
        note = logging.LogRecord(_PACKAGE, logging.ERROR, "", 0, text, (self.baseFilename, error.strerror), None)
        note.created = record.created
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(self.format(note) + "\n")
            sys.stderr.flush()
