"""Taking back the steps of an ADD that fails, in reverse, whether it fails by an error or is interrupted."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from types import TracebackType

from multus_daemon import deadlines
from multus_daemon.runtime import deadline

log = logging.getLogger(__name__)


class Undo:
    """`with`: what was armed runs in reverse where the block raises, and not at all where it ends well.

    A step is armed before what it takes back is tried, so it must count "was never done" as done. It has a deadline
    of its own, whatever has become of the request's; one that fails is logged, the others still run.
    """

    def __init__(self, *, seconds_for_each: float = deadlines.BUILTIN_UNDO_SECONDS) -> None:
        self._stack = contextlib.ExitStack()
        self._seconds = seconds_for_each

    def arm(self, what: str, step: Callable[[], object]) -> None:
        """Have `step` run if the block raises from here on; `what` names it in the log."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        steps = self._stack.pop_all()
        if error is not None:
            steps.close()
