"""Undo the steps of an ADD that fails or is interrupted, in reverse order."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from multus_daemon import deadlines
from multus_daemon.runtime import deadline, fs

log = logging.getLogger(__name__)


class Undo:
    """Run the armed steps in reverse if the `with` block raises; forget them if it succeeds.

    Arm a step before the action that it undoes; the step must succeed if there is nothing to undo. Each step has a
    deadline of its own. A step that fails is logged, and the others still run.
    """

    def __init__(self, *, seconds_for_each: float = deadlines.BUILTIN_UNDO_SECONDS) -> None:
        self._stack = contextlib.ExitStack()
        self._seconds = seconds_for_each

    def arm(self, what: str, step: Callable[[], object]) -> None:
        """Add a step; `what` names it in the log."""
        self._stack.callback(self._run, what, step)

    def _run(self, what: str, step: Callable[[], object]) -> None:
        try:
            with deadline.shielded(self._seconds):
                step()
        except deadline.ExpiredError:
            log.warning("undo of a failed ADD: %s: did not end within %g s", what, self._seconds)
        except Exception as error:
            log.warning("undo of a failed ADD: %s: %s", what, str(error) or type(error).__name__)

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        steps = self._stack.pop_all()
        if error is not None:
            steps.close()


def read_file(path: Path, *, limit: int = fs.DEFAULT_READ_LIMIT) -> bytes | None:
    """Return the content of a file that ADD keeps for DEL, None if there is none. Raises OSError."""
    try:
        return fs.read_limited(path, limit=limit)
    except FileNotFoundError:
        return None


def write_file(path: Path, content: bytes | None, *, fsync: bool = True) -> None:
    """Write such a file with its directory, or remove it if `content` is None. Raises OSError."""
    if content is None:
        fs.remove(path)
        return
    fs.ensure_directory(path.parent)
    fs.write_atomic(path, content, fsync=fsync)
