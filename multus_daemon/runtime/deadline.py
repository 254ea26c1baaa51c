"""Deadlines and cancellation of blocking work: one mechanism for all waits.

A thread can't be cancelled, so it checks its deadline whenever it waits, and between steps. The deadline is part of the
context (PEP 567). `within` narrows it for a block; `given` gives a block, such as an undo, its own. The default is no
deadline.
"""

from __future__ import annotations

import contextlib
import contextvars
import random
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, TypeVar

T = TypeVar("T")


class Interrupted(BaseException):
    """The deadline expired, or the work must stop. Derives from BaseException, like asyncio's CancelledError."""


class ExpiredError(TimeoutError):
    """The time of `within` expired."""


class Deadline:
    """A point in time, and a flag that stops the work earlier."""

    def __init__(self, seconds: float = float("inf"), *, stopped: futures.Future[None] | None = None) -> None:
        """`seconds`: time from now; `stopped`: a flag to share with another deadline."""
        self.end = time.monotonic() + seconds
        """Time of the monotonic clock."""
        self._stopped: futures.Future[None] = stopped or futures.Future()

    @property
    def stopped(self) -> bool:
        """True if the work must stop."""
        return self._stopped.done()

    @property
    def expired(self) -> bool:
        """True if the point in time has passed."""
        return time.monotonic() >= self.end

    @property
    def left(self) -> float:
        """Remaining seconds, at least 0; infinite without an end."""
        return max(0.0, self.end - time.monotonic())

    def stop(self) -> None:
        """End each present and future wait of the work with Interrupted. Thread-safe."""
        with contextlib.suppress(futures.InvalidStateError):
            self._stopped.set_result(None)

    def when_stopped(self, call: Callable[[], object]) -> None:
        """Have `stop` call `call`, too; if `stop` has been called, call it now."""
        self._stopped.add_done_callback(lambda _: call())

    def check(self) -> None:
        """Raises Interrupted if the work must stop or its time expired."""
        if self._stopped.done() or self.expired:
            raise Interrupted

    def wait(self, *events: futures.Future[Any]) -> None:
        """Wait until one of `events` is done. Raises Interrupted."""
        if any(event.done() for event in events):
            return
        limit = None if self.end == float("inf") else self.left
        futures.wait((*events, self._stopped), limit, futures.FIRST_COMPLETED)
        if not any(event.done() for event in events):
            raise Interrupted

    def pause(self, seconds: float) -> None:
        """Wait `seconds`. Raises Interrupted."""
        futures.wait((self._stopped,), min(seconds, self.left))
        self.check()

    def _narrowed(self, seconds: float) -> Deadline:
        made = Deadline(stopped=self._stopped)
        made.end = min(self.end, time.monotonic() + seconds)
        return made


_current: contextvars.ContextVar[Deadline] = contextvars.ContextVar("deadline")


def current() -> Deadline:
    """Return the deadline of the calling context; by default one without an end."""
    return _current.get(None) or Deadline()


def check() -> None:
    """Check the deadline of the calling context. Raises Interrupted."""
    current().check()


def pause(seconds: float) -> None:
    """Wait `seconds`. Raises Interrupted at the deadline of the calling context."""
    current().pause(seconds)


@contextlib.contextmanager
def given(deadline: Deadline) -> Iterator[Deadline]:
    """Replace the deadline of the calling context for a block."""
    token = _current.set(deadline)
    try:
        yield deadline
    finally:
        _current.reset(token)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[Deadline]:
    """Limit a block to `seconds`. Raises ExpiredError if this limit interrupted it.

    Interrupted passes through if the outer deadline expired too, or the work must stop. A block that never waits is
    never interrupted.
    """
    outer = current()
    inner = outer._narrowed(seconds)
    try:
        with given(inner):
            yield inner
    except Interrupted as error:
        if outer.stopped or outer.expired or not inner.expired:
            raise
        raise ExpiredError from error


def backoff(first: float, last: float, *, jitter: float = 0.0) -> Iterator[float]:
    """Yield delays in seconds that double from `first` to `last`, each changed by up to `jitter` of itself."""
    delay = first
    while True:
        yield delay * (1 + random.uniform(-jitter, jitter))
        delay = min(delay * 2, last)
