"""The formats of a line: `text` (upstream's) and `json`. A record is one line; a field is a key and a value.

Fields come from a context variable, so each line of a request has the fields of the request. Callers cannot forge
lines or fields: control characters are escaped, values that are not one plain word are quoted.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Final

LEVELS: Final[dict[str, int]] = {
    "panic": logging.CRITICAL,
    "error": logging.ERROR,
    "verbose": logging.INFO,
    "debug": logging.DEBUG,
}
_NAMES: Final = {number: name for name, number in LEVELS.items()} | {logging.WARNING: "warning"}
_LONGEST: Final = 32 * 1024
"""Maximum characters of a message, a value and a traceback line, which quote input from outside."""
_TRACEBACK_MAX: Final = 64 * 1024
"""Maximum characters of a traceback in one line, of which the end is kept."""

_fields: ContextVar[tuple[tuple[str, object], ...]] = ContextVar("multus_log_fields", default=())


@contextlib.contextmanager
def fields(**values: object) -> Iterator[None]:
    """Add these fields to every record of the block and of the tasks and threads that it starts.

    Empty and None values are omitted. A float is written with three decimals. Of a mapping each item is a field, in
    `json` an object: `stages={"plan": 0.2}` is `stages_plan=0.200`.
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
            for name, item in _flat(key, value):
                yield f"{name}={quote(item)}"

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
            line["traceback"] = _end_of(lines)
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


def _flat(key: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f"{key}_{name}", item) for name, item in value.items())
    else:
        yield key, value


def _value(value: object) -> object:
    """Return a value that JSON has."""
    if isinstance(value, Mapping):
        return {str(name): _value(item) for name, item in value.items()}
    if isinstance(value, float):
        return round(value, 3)
    return value if isinstance(value, int) else _cut(str(value))


def _end_of(lines: list[str]) -> str:
    return "\n".join(lines)[-_TRACEBACK_MAX:]


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
