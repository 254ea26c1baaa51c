"""Log lines, one record a line, to stderr, a file, or both. `lines` has the formats, `sinks` the threads that write.

Logging never blocks: standard error and the file each have a bounded queue and a thread that writes. When a reader
stops reading or a disk hangs, lines are dropped and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from multus_daemon import deadlines
from multus_daemon.logs.lines import FORMATS, LEVELS, fields
from multus_daemon.logs.sinks import QueueHandler, RotatingFile, Stderr

__all__ = ["DEFAULT_OPTIONS", "FORMATS", "LEVELS", "close", "configure", "dropped", "fields", "flush"]

DEFAULT_OPTIONS: Final[dict[str, Any]] = {"maxSize": 100, "maxBackups": 5, "maxAge": 5, "compress": True}
"""Those of upstream."""
_PACKAGES: Final = ("multus_daemon", "multus_tools")
_MB: Final = 1024 * 1024


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
            raise ValueError(f"log {what} {value!r}: one of {', '.join(known)} is needed")
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
