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


class given:  # noqa: N801  a class, as a generator takes four times as long, and there are ten of them to a request
    """The block has this deadline and no other."""

    __slots__ = ("_deadline", "_token")

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def __enter__(self) -> Deadline:
        self._token = _current.set(self._deadline)
        return self._deadline

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        _current.reset(self._token)


class within:  # noqa: N801
    """The block has so many seconds at most; raises ExpiredError where it was interrupted because they were over.

    Where an outer deadline is over too, or the work is to stop, or what it waited for was itself ended, Interrupted
    goes on. Nothing is interrupted by itself: a block that never waits runs to its end.
    """

    __slots__ = ("_inner", "_outer", "_seconds", "_token")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> Deadline:
        self._outer = current()
        self._inner = self._outer._narrowed(self._seconds)
        self._token = _current.set(self._inner)
        return self._inner

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        _current.reset(self._token)
        if isinstance(error, Interrupted):
            outer = self._outer
            if not (outer.stopped or outer.expired) and self._inner.expired:
                raise ExpiredError from error


@contextlib.contextmanager
def shielded(seconds: float) -> Iterator[Deadline]:
    """The block has so many seconds, whatever has become of the deadline outside. Raises ExpiredError."""
    with given(Deadline()), within(seconds) as inner:
        yield inner
