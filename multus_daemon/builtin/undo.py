"""Taking back the steps of an ADD that fails, in reverse, whether it fails by an error or by cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType

from multus_daemon import deadlines

log = logging.getLogger(__name__)


class Undo:
    """`async with`: what was armed runs in reverse where the block raises, and not at all where it ends well.

    A step is armed before what it takes back is tried, so it must count "was never done" as done. It has a deadline
    of its own and is shielded from the cancellation of the request; one that fails is logged, the others still run.
    """

    def __init__(self, *, seconds_for_each: float = deadlines.BUILTIN_UNDO_SECONDS) -> None:
        self._stack = contextlib.AsyncExitStack()
        self._seconds = seconds_for_each

    def arm(self, what: str, step: Callable[[], Awaitable[None]]) -> None:
        """Have `step` run if the block raises from here on; `what` names it in the log."""
        self._stack.push_async_callback(self._run, what, step)

    async def _run(self, what: str, step: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await step()
        except Exception as error:
            log.warning("undo of a failed ADD: %s: %s", what, str(error) or type(error).__name__)

    async def __aenter__(self) -> Undo:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        steps = self._stack.pop_all()
        if error is None:
            return
        cleanup = asyncio.create_task(steps.aclose(), name="undo of a failed ADD")
        cancelled: asyncio.CancelledError | None = None
        while not cleanup.done():
            try:
                await asyncio.shield(cleanup)
            except asyncio.CancelledError as again:
                if cleanup.cancelled():
                    raise
                cancelled = again
        if cancelled is not None:
            raise cancelled from error
