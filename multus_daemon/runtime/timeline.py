"""The steps and stages of each request with their times, and the last requests of the program.

`note` adds a step, a `with stage(...)` block a stage. The timeline is part of the context (PEP 567), like a deadline.
Without a timeline, `note` and `stage` do nothing.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

NOTES_MAX: Final = 64
"""Maximum number of steps that a timeline has; further steps are only counted."""
KEPT: Final = 1000
"""Maximum number of timelines that are kept; each takes 2 KiB."""
_KEPT_PER_SLOT: Final = 20
TEXT_MAX: Final = 512
"""Maximum characters of a text, which may quote input from outside."""


Stage: TypeAlias = Literal["queue", "gather", "plan", "record", "plugin", "keep", "publish"]


@dataclass(eq=False, slots=True)
class Timeline:
    """One request: its subject, its steps and its end."""

    subject: Mapping[str, str]
    """Fields of the request, such as `verb` and `pod`."""
    id: str = field(default_factory=lambda: f"{random.getrandbits(32):08x}")
    """The request id, in the log and in errors: 8 hexadecimal characters."""
    trace_id: str = ""
    """The trace that the request belongs to: 32 hexadecimal characters, empty if none."""
    began: float = field(default_factory=time.time)
    """Unix time in seconds."""
    _start: float = field(default_factory=time.monotonic)
    steps: list[tuple[str, float, float]] = field(default_factory=list)
    """Of each step: text, seconds from the request's beginning to the step's end, and duration (0: not measured)."""
    doing: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The steps that run now, by text: the Unix time when each began, and its limit, both in seconds."""
    stages: dict[str, float] = field(default_factory=dict)
    """Total seconds of each stage. If it ran in several threads at the same time, each counts."""
    dropped: int = 0
    """Number of steps beyond `NOTES_MAX`."""
    ended: float | None = None
    """Seconds from the beginning to the end; None while it runs."""
    error: tuple[int, str] | None = None
    """Code and text of its error; None if it succeeded or still runs."""

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
        """`limit`: how many are kept; less if `at_once`, the number of requests that may run at once, is small."""
        self.since = time.time()
        """Unix time in seconds."""
        self._kept: collections.deque[Timeline] = collections.deque(maxlen=min(limit, _KEPT_PER_SLOT * at_once))

    def __iter__(self) -> Iterator[Timeline]:
        return iter(tuple(self._kept))

    @contextlib.contextmanager
    def of(self, subject: Mapping[str, str], *, keep: bool = True) -> Iterator[Timeline]:
        """Run the block with a new timeline, which ends with the block at the latest. `keep`: keep it after that."""
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

    Stages must not be nested: so their sum is at most the duration of the request.
    """
    began = time.monotonic()
    try:
        yield
    finally:
        if (timeline := _current.get()) is not None:
            timeline.stages[name] = timeline.stages.get(name, 0.0) + time.monotonic() - began


@contextlib.contextmanager
def doing(what: str, limit: float) -> Iterator[None]:
    """List `what`, unique in a request, in `Timeline.doing` during the block, with its limit in seconds."""
    running = timeline.doing if (timeline := _current.get()) is not None else {}
    running[what] = time.time(), limit
    try:
        yield
    finally:
        running.pop(what, None)
