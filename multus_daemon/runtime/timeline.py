"""The steps and stages of each request with their times, and the last requests of the program.

A step calls `note`, a stage is a block of `stage`. The timeline is part of the context, in threads and on the event
loop, like a deadline; without one nothing is kept.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import random
import time
from collections.abc import Iterator, Mapping
from typing import Final, Literal, TypeAlias

NOTES_MAX: Final = 64
"""Maximum number of kept steps of a request; the others are counted."""
KEPT: Final = 1000
"""Maximum number of requests; each takes 2 KiB."""
_KEPT_PER_SLOT: Final = 20
TEXT_MAX: Final = 512
"""Maximum characters of a text, which may quote input from outside."""


Stage: TypeAlias = Literal["queue", "gather", "plan", "record", "plugin", "keep", "publish"]


class Timeline:
    """One request: its subject, its steps and its end."""

    __slots__ = (
        "_start", "began", "doing", "dropped", "ended", "error", "id", "stages", "steps", "subject", "trace_id",
    )  # fmt: skip

    def __init__(self, subject: Mapping[str, str]) -> None:
        """`subject`: fields of the request, such as `verb` and `pod`."""
        self.subject = subject
        self.id = f"{random.getrandbits(32):08x}"
        """The request id, in the log and in errors: 8 hexadecimal characters."""
        self.trace_id = ""
        """The trace that the request belongs to: 32 hexadecimal characters, empty if none."""
        self.began = time.time()
        """Unix time in seconds."""
        self._start = time.monotonic()
        self.steps: list[tuple[str, float, float]] = []
        """Text, seconds from the beginning to the end of the step, and its duration, 0 if not measured."""
        self.doing: dict[str, tuple[float, float]] = {}
        """What runs now: its Unix time in seconds, and its limit in seconds."""
        self.stages: dict[str, float] = {}
        """Seconds by stage, added up. Stages that run side by side in several threads count each."""
        self.dropped = 0
        """Number of steps beyond `NOTES_MAX`."""
        self.ended: float | None = None
        """Seconds from the beginning to the end; None while it runs."""
        self.error: tuple[int, str] | None = None
        """Code and text of its error."""

    def note(self, what: str, seconds: float = 0.0) -> None:
        """Add a finished step that took `seconds`."""
        if len(self.steps) < NOTES_MAX:
            self.steps.append((what[:TEXT_MAX], time.monotonic() - self._start, seconds))
        else:
            self.dropped += 1

    def end(self, error: tuple[int, str] | None = None) -> None:
        """End the request."""
        self.ended = time.monotonic() - self._start
        if error is not None:
            self.error = (error[0], error[1][:TEXT_MAX])


class Timelines:
    """The last requests, the oldest first. Thread-safe."""

    def __init__(self, limit: int = KEPT, *, at_once: int = KEPT) -> None:
        """`at_once`: how many run at once: few where memory or processor time is scarce, and fewer are kept then."""
        self.since = time.time()
        """Unix time in seconds."""
        self._kept: collections.deque[Timeline] = collections.deque(maxlen=min(limit, _KEPT_PER_SLOT * at_once))

    def __iter__(self) -> Iterator[Timeline]:
        return iter(tuple(self._kept))

    @contextlib.contextmanager
    def of(self, subject: Mapping[str, str], *, keep: bool = True) -> Iterator[Timeline]:
        """Run the block as a new request, which ends with the block if not before; `keep` it or not."""
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
    """Add a finished step to the timeline of the calling context."""
    if (timeline := _current.get()) is not None:
        timeline.note(what, seconds)


@contextlib.contextmanager
def stage(name: Stage) -> Iterator[None]:
    """Add the seconds of the block to a stage of the calling context's timeline, also if the block fails.

    Not nested in another stage, so that the stages of a request are at most its duration.
    """
    began = time.monotonic()
    try:
        yield
    finally:
        if (timeline := _current.get()) is not None:
            timeline.stages[name] = timeline.stages.get(name, 0.0) + time.monotonic() - began


@contextlib.contextmanager
def doing(what: str, limit: float) -> Iterator[None]:
    """Show for the duration of the block that it runs, for up to `limit` seconds; `what` is unique in a request."""
    running = timeline.doing if (timeline := _current.get()) is not None else {}
    running[what] = time.time(), limit
    try:
        yield
    finally:
        running.pop(what, None)
