"""Log lines: `<RFC 3339 time> [<level>] <message> key=value …`, one record a line, to stderr, a file, or both.

The shape and the level names are upstream's, so that what reads its log reads ours. Fields come from a context
variable: what is set around a request stands on every line that is logged for it, tasks it starts included.
Nothing that a caller passes can begin a line of its own; a traceback follows its line, indented.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
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
    text = str(value)
    if text and all(character.isprintable() and character not in ' "=\\' for character in text):
        return text
    return _escape(text, '"')


def _one_line(text: str) -> str:
    """`text` with everything escaped that could end the line or steer a terminal."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else _escape(character) for character in text)


def _escape(text: str, quotes: str = "") -> str:
    # JSON leaves DEL as it is, a control character all the same.
    return quotes + json.dumps(text)[1:-1].replace("\x7f", "\\u007f") + quotes


class _PrivateFileHandler(RotatingFileHandler):
    """A rotating file that only its owner can read: pod names, addresses and paths stand in it."""

    def _open(self) -> io.TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return open(descriptor, "a", encoding="utf-8", errors="backslashreplace")
