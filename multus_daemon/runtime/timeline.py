"""What a request went through, in order, with the time that each step took; and the last requests of the program.

A step notes itself with `note`, wherever it runs: the timeline comes with the context, into threads and back to the
event loop, as a deadline does. Without one nothing is kept.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import time
from collections.abc import Iterator, Mapping
from typing import Final

NOTES_MAX: Final = 64
"""Steps that are kept of one request; of the others only their number."""
TEXT_MAX: Final = 512
"""Characters that are kept of each text: they quote what came from outside."""


class Timeline:
    """One request: who it was for, its steps, how it ended."""

    __slots__ = ("_start", "began", "dropped", "ended", "error", "steps", "subject")

    def __init__(self, subject: Mapping[str, str]) -> None:
        """`subject`: what the request is about, such as `verb` and `pod`."""
        self.subject = subject
        self.began = time.time()
        """Unix time in seconds."""
        self._start = time.monotonic()
        self.steps: list[tuple[str, float, float]] = []
        """What was done; when it had been, in seconds from the beginning; how many it took, 0 where not measured."""
        self.dropped = 0
        """Steps beyond `NOTES_MAX`."""
        self.ended: float | None = None
        """Seconds from the beginning to the end; None while it runs."""
        self.error: tuple[int, str] | None = None
        """Code and text of the error that it ended with."""

    def note(self, what: str, seconds: float = 0.0) -> None:
        """A step is done, which took `seconds`."""
        if len(self.steps) < NOTES_MAX:
            self.steps.append((what[:TEXT_MAX], time.monotonic() - self._start, seconds))
        else:
            self.dropped += 1

    def end(self, error: tuple[int, str] | None = None) -> None:
        """The request is answered."""
        self.ended = time.monotonic() - self._start
        if error is not None:
            self.error = (error[0], error[1][:TEXT_MAX])


class Timelines:
    """The last requests, the oldest first. From any thread."""

    def __init__(self, limit: int = 1000) -> None:
        self._kept: collections.deque[Timeline] = collections.deque(maxlen=limit)

    def __iter__(self) -> Iterator[Timeline]:
        """Those that are kept now."""
        return iter(tuple(self._kept))

    @contextlib.contextmanager
    def of(self, subject: Mapping[str, str], *, keep: bool = True) -> Iterator[Timeline]:
        """The block is a new request, which is kept, or not. Its end is the block's, unless it has been told before."""
        timeline = Timeline(subject)
        if keep:
            self._kept.append(timeline)
        token = _current.set(timeline)
        try:
            yield timeline
        finally:
            _current.reset(token)
            if timeline.ended is None:
                timeline.end()


_current: contextvars.ContextVar[Timeline | None] = contextvars.ContextVar("timeline", default=None)


def note(what: str, seconds: float = 0.0) -> None:
    """As `Timeline.note`, of the calling context."""
    if (timeline := _current.get()) is not None:
        timeline.note(what, seconds)
