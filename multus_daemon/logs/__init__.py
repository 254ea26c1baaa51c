"""Log lines, one record a line, to stderr, a file, or both; `sinks` has the threads that write.

A line is `text` (upstream's) or `json`; a field is a key and a value. Fields come from a context variable, so each line
of a request has the fields of the request. Callers cannot forge lines or fields: control characters are escaped, values
that are not one plain word are quoted.

Logging never blocks: standard error and the file each have a bounded queue and a thread that writes. When a reader
stops reading or a disk hangs, lines are dropped and counted.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Final

from multus_daemon.logs.sinks import QueueHandler, RotatingFile, Stderr

DEFAULT_OPTIONS: Final[dict[str, Any]] = {"maxSize": 100, "maxBackups": 5, "maxAge": 5, "compress": True}
"""Defaults of `logOptions`, as upstream's."""
_PACKAGES: Final = ("multus_daemon", "multus_tools")
_MB: Final = 1024 * 1024
LEVELS: Final[dict[str, int]] = {
    "panic": logging.CRITICAL,
    "error": logging.ERROR,
    "verbose": logging.INFO,
    "debug": logging.DEBUG,
}
_NAMES: Final = {number: name for name, number in LEVELS.items()} | {logging.WARNING: "warning"}
_LONGEST: Final = 32 * 1024
"""Maximum characters of a message, of a value and of a traceback's line: each may quote input from outside."""
_TRACEBACK_MAX: Final = 64 * 1024
"""Maximum characters of a traceback in `json`; the beginning is cut."""

_fields: ContextVar[tuple[tuple[str, object], ...]] = ContextVar("multus_log_fields", default=())


# --- set-up ----------------------------------------------------------------------------------------------------------


def configure(
    level: str = "verbose",
    to_stderr: bool = True,
    *,
    file: str = "",
    options: Mapping[str, Any] | None = None,
    line_format: str = "text",
) -> None:
    """Set up logging for the process, in place of any earlier set-up; other packages log warnings and above.

    `level`: a key of `LEVELS`, in any case. `file`: empty for none; a new one gets mode 0600. `options`: upstream's
    `logOptions`: `maxSize` in MB before rotation (0: never), `maxBackups`, the number of old files (`<file>.1` is the
    newest), `maxAge` in days after which an old file is removed (0: never), `compress` old files with gzip.
    `line_format`: a key of `FORMATS`. Raises ValueError for an unknown level or format, OSError for the file, and keeps
    the earlier set-up then.
    """
    level = level.lower()
    for what, value, known in (("level", level, LEVELS), ("format", line_format, FORMATS)):
        if value not in known:
            raise ValueError(f"log {what} {value!r} is none of {', '.join(known)}")
    handlers: list[logging.Handler] = []
    if file:
        limits = DEFAULT_OPTIONS | dict(options or {})
        sink = RotatingFile(
            file,
            max_bytes=limits["maxSize"] * _MB,
            backups=limits["maxBackups"],
            days=limits["maxAge"],
            compress=limits["compress"],
        )
        handlers.append(QueueHandler(sink, "file"))
    if to_stderr:
        handlers.append(QueueHandler(Stderr(), "stderr"))
    # Without any handler, logging prints warnings on stderr after all.
    handlers = handlers or [logging.NullHandler()]
    root = logging.getLogger()
    for old in tuple(root.handlers):
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.setFormatter(FORMATS[line_format]())
        root.addHandler(handler)
    root.setLevel(max(LEVELS[level], logging.WARNING))
    for package in _PACKAGES:
        logging.getLogger(package).setLevel(LEVELS[level])


def dropped() -> dict[str, int]:
    """Return the number of lost lines of each destination in use: `stderr`, `file`."""
    return {handler.name or "": handler.dropped for handler in _queues()}


def close() -> None:
    """Write the waiting lines, for LOG_FLUSH_SECONDS at most, and drop later ones.

    If standard error is blocked after that, redirect it to /dev/null: the interpreter must not hang when it ends.
    """
    for handler in _queues():
        handler.close()


def _queues() -> list[QueueHandler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, QueueHandler)]


# --- lines -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fields(**values: object) -> Iterator[None]:
    """Add the fields to every log record of the block, and of the tasks and threads that the block starts.

    Empty and None values are omitted. A float has three decimals. A mapping becomes an object in `json`, and a field
    for each item in `text`: `stages={"plan": 0.2}` is `stages_plan=0.200`.
    """
    kept = tuple((key, value) for key, value in _fields.get() if key not in values)
    token = _fields.set(kept + tuple((key, value) for key, value in values.items() if value not in ("", None, {})))
    try:
        yield
    finally:
        _fields.reset(token)


class _Lines(logging.Formatter):
    def words(self) -> Iterator[str]:
        """Yield the fields as `key=value`."""
        for key, value in _fields.get():
            items = (
                {f"{key}_{name}": item for name, item in value.items()} if isinstance(value, Mapping) else {key: value}
            )
            yield from (f"{name}={quote(item)}" for name, item in items.items())

    def traceback(self, record: logging.LogRecord) -> list[str]:
        """Return the lines of the record's traceback and stack, with their indentation."""
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        parts = (record.exc_text, self.formatStack(record.stack_info) if record.stack_info else "")
        return [_one_line(line) for part in parts for line in (part or "").splitlines()]


class LineFormatter(_Lines):
    """`text`: `<RFC 3339 time> [<level>] <message> key=value …`, as upstream; a traceback follows, indented."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, followed by the lines of the traceback."""
        line = " ".join([f"{_time(record)} [{_level(record)}] {_one_line(record.getMessage())}", *self.words()])
        return "\n    ".join([line, *self.traceback(record)])


class JsonFormatter(_Lines):
    """`json`: one object with `time`, `level`, `msg`, the fields and, for a fault of the program, `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        line: dict[str, object] = {
            "time": _time(record),
            "level": _level(record),
            "msg": _cut(record.getMessage()),
            **{key: _value(value) for key, value in _fields.get()},
        }
        if lines := self.traceback(record):
            line["traceback"] = "\n".join(lines)[-_TRACEBACK_MAX:]
        return _ascii(line)


FORMATS: Final[Mapping[str, type[logging.Formatter]]] = {
    "text": LineFormatter,
    "json": JsonFormatter,
}


def quote(value: object) -> str:
    """Return `value` unchanged if it is one plain word, else as a JSON string in ASCII."""
    text = _cut(f"{value:.3f}" if isinstance(value, float) else str(value))
    if text and all(character.isprintable() and character not in ' "=\\' for character in text):
        return text
    return _escape(text, '"')


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def _level(record: logging.LogRecord) -> str:
    return _NAMES.get(record.levelno, record.levelname.lower())


def _value(value: object) -> object:
    """Return the value as a type that JSON has."""
    if isinstance(value, Mapping):
        return {str(name): _value(item) for name, item in value.items()}
    if isinstance(value, float):
        return round(value, 3)
    return value if isinstance(value, int) else _cut(str(value))


def _one_line(text: str) -> str:
    """Escape control characters, which could end the line or control a terminal."""
    text = _cut(text)
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else _escape(character) for character in text)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def _escape(text: str, quotes: str = "") -> str:
    return quotes + _ascii(text)[1:-1] + quotes


def _ascii(value: object) -> str:
    # JSON does not escape DEL, which is a control character.
    return json.dumps(value).replace("\x7f", "\\u007f")
