"""How long the work of a thread may take, and the word that it is to stop: one mechanism for every wait.

A thread can't be cancelled, so it looks at its deadline wherever it waits, and between steps. The deadline belongs to
the context (PEP 567), as asyncio's timeouts belong to their task: `within` narrows it for a block, `shielded` gives a
block, the undoing of a failure above all, one of its own. Work that nobody has given a deadline has none.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any, TypeVar

T = TypeVar("T")


class Interrupted(BaseException):
    """The deadline is over, or the work is to stop. No Exception, as asyncio's CancelledError is none."""


class ExpiredError(TimeoutError):
    """A block took longer than it was given, by `within` or `shielded`."""


class Deadline:
    """A point in time, and a word that comes before it where nobody wants the work any more."""

    def __init__(self, seconds: float = float("inf"), *, stopped: futures.Future[None] | None = None) -> None:
        """`seconds` from now; `stopped`: the word that it shares with another deadline, its own if None."""
        self.end = time.monotonic() + seconds
        """On the monotonic clock."""
        self._stopped: futures.Future[None] = stopped or futures.Future()

    @property
    def stopped(self) -> bool:
        """True once the work is to stop."""
        return self._stopped.done()

    @property
    def expired(self) -> bool:
        """True once its time is over."""
        return time.monotonic() >= self.end

    @property
    def left(self) -> float:
        """Seconds, not below 0; infinite where there is no end."""
        return max(0.0, self.end - time.monotonic())

    def stop(self) -> None:
        """Have every wait of the work end with Interrupted, now and from now on. From any thread."""
        with contextlib.suppress(futures.InvalidStateError):
            self._stopped.set_result(None)

    def check(self) -> None:
        """Raises Interrupted where the work is to stop or its time is over."""
        if self._stopped.done() or self.expired:
            raise Interrupted

    def wait(self, *events: futures.Future[Any]) -> None:
        """Return when one of `events` is done, whatever came of it. Raises Interrupted."""
        if any(event.done() for event in events):
            return
        limit = None if self.end == float("inf") else self.left
        futures.wait((*events, self._stopped), limit, futures.FIRST_COMPLETED)
        if not any(event.done() for event in events):
            raise Interrupted

    def pause(self, seconds: float) -> None:
        """Wait. Raises Interrupted."""
        futures.wait((self._stopped,), min(seconds, self.left))
        self.check()

    def _narrowed(self, seconds: float) -> Deadline:
        made = Deadline(stopped=self._stopped)
        made.end = min(self.end, time.monotonic() + seconds)
        return made


_current: contextvars.ContextVar[Deadline] = contextvars.ContextVar("deadline")


def current() -> Deadline:
    """That of the calling context; one without end where none was given."""
    return _current.get(None) or Deadline()


def check() -> None:
    """As `Deadline.check`, of the calling context."""
    current().check()


def pause(seconds: float) -> None:
    """As `Deadline.pause`, of the calling context."""
    current().pause(seconds)


@contextlib.contextmanager
def given(deadline: Deadline) -> Iterator[Deadline]:
    """The block has this deadline and no other."""
    token = _current.set(deadline)
    try:
        yield deadline
    finally:
        _current.reset(token)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[Deadline]:
    """The block has so many seconds at most; raises ExpiredError where it was interrupted because they were over.

    Where an outer deadline is over too, or the work is to stop, or what it waited for was itself ended, Interrupted
    goes on. Nothing is interrupted by itself: a block that never waits runs to its end.
    """
    outer = current()
    inner = outer._narrowed(seconds)
    with given(inner):
        try:
            yield inner
        except Interrupted as interruption:
            if outer.stopped or outer.expired or not inner.expired:
                raise
            raise ExpiredError from interruption


@contextlib.contextmanager
def shielded(seconds: float) -> Iterator[Deadline]:
    """The block has so many seconds, whatever has become of the deadline outside. Raises ExpiredError."""
    with given(Deadline()), within(seconds) as inner:
        yield inner
