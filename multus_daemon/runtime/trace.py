"""The W3C trace context of a request: read, logged, and passed on to programs.

The context is part of the calling context, in threads and on the event loop, like a deadline. Programs get the caller's
variables as they came (https://www.w3.org/TR/trace-context/, https://www.w3.org/TR/baggage/; as environment variables:
OpenTelemetry OTEP 0258).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

PARENT: Final = "TRACEPARENT"
STATE: Final = "TRACESTATE"
BAGGAGE: Final = "BAGGAGE"
STATE_MAX: Final = 512
BAGGAGE_MAX: Final = 8192
"""Maximum characters of the baggage; W3C asks participants to pass on as many."""
_PARENT: Final = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}", re.ASCII)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The place of a request in a trace, and the environment variables that tell it to a program."""

    trace_id: str
    """32 hexadecimal characters; empty without a trace."""
    span_id: str
    """16 hexadecimal characters."""
    environ: Mapping[str, str]
    """The valid ones of TRACEPARENT, TRACESTATE and BAGGAGE. Baggage may be private: do not log it."""


NO_TRACE: Final = TraceContext("", "", {})


_carried: ContextVar[TraceContext] = ContextVar("trace", default=NO_TRACE)


def read(environ: Mapping[str, str]) -> TraceContext:
    """Read the caller's variables. A malformed one is left out, as W3C asks; TRACESTATE needs a TRACEPARENT."""
    kept: dict[str, str] = {}
    parent = environ.get(PARENT, "")
    if match := _PARENT.fullmatch(parent):
        kept[PARENT] = parent
        if _is_valid(state := environ.get(STATE, ""), STATE_MAX):
            kept[STATE] = state
    if _is_valid(baggage := environ.get(BAGGAGE, ""), BAGGAGE_MAX):
        kept[BAGGAGE] = baggage
    if not kept:
        return NO_TRACE
    return TraceContext(match[1] if match else "", match[2] if match else "", kept)


def _is_valid(text: str, most: int) -> bool:
    return 0 < len(text) <= most and text.isascii() and text.isprintable()


def environ() -> Mapping[str, str]:
    """Return the variables for a program that is started now."""
    return _carried.get().environ


@contextlib.contextmanager
def of(caller: TraceContext) -> Iterator[None]:
    """Run the block as a request of `caller`."""
    token = _carried.set(caller)
    try:
        yield
    finally:
        _carried.reset(token)
