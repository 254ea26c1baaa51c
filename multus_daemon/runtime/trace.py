"""The W3C trace context of a request: read, passed on to programs, and continued by spans if there is a tracer.

The context is part of the calling context, in threads and on the event loop, like a deadline. Without a tracer a span
is nothing, and programs get the caller's variables as they came (https://www.w3.org/TR/trace-context/,
https://www.w3.org/TR/baggage/; as environment variables: OpenTelemetry OTEP 0258).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol

PARENT: Final = "TRACEPARENT"
STATE: Final = "TRACESTATE"
BAGGAGE: Final = "BAGGAGE"
STATE_MAX: Final = 512
BAGGAGE_MAX: Final = 8192
"""Maximum characters, which W3C asks every participant to pass on."""
_PARENT: Final = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}", re.ASCII)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The place of a request in a trace, and the variables that say so to a program."""

    trace_id: str
    """32 hexadecimal characters; empty without a trace."""
    span_id: str
    """16 hexadecimal characters."""
    environ: Mapping[str, str]
    """Of TRACEPARENT, TRACESTATE and BAGGAGE those that are valid. Baggage may be private: it is not for the log."""


NO_TRACE: Final = TraceContext("", "", {})


class Span(Protocol):
    """A piece of work in a trace. None of the methods blocks or raises."""

    @property
    def context(self) -> TraceContext:
        """The context for what the span calls; without `trace_id` if the span is not sampled and has no parent."""

    def child(self, name: str, attributes: Mapping[str, str]) -> Span:
        """Begin a span within this one."""

    def end(self, error: str) -> None:
        """End the span; `error` is empty if it succeeded."""


class Tracer(Protocol):
    """Makes spans: `tracing` does it by OpenTelemetry."""

    def begin(self, name: str, caller: TraceContext, attributes: Mapping[str, str]) -> Span:
        """Begin the span of a request, within the caller's if there is one. Neither blocks nor raises."""


_carried: ContextVar[TraceContext] = ContextVar("trace", default=NO_TRACE)
_span: ContextVar[Span | None] = ContextVar("span", default=None)


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
    running = _span.get()
    return _carried.get().environ if running is None else running.context.environ


@contextlib.contextmanager
def of(caller: TraceContext, tracer: Tracer | None, name: str, attributes: Mapping[str, str]) -> Iterator[TraceContext]:
    """Run the block as a request of `caller`; yield its own context, which without a tracer is the caller's."""
    if tracer is None:
        token = _carried.set(caller)
        try:
            yield caller
        finally:
            _carried.reset(token)
        return
    running = tracer.begin(name, caller, attributes)
    reset, problem = _span.set(running), ""
    try:
        yield running.context
    except BaseException as error:
        problem = _text(error)
        raise
    finally:
        _span.reset(reset)
        running.end(problem)


class span:  # noqa: N801  used like a function
    """Run the block as a span of the request, also if the block fails; without a tracer this is nothing."""

    __slots__ = ("_attributes", "_name", "_span", "_token")

    _token: Token[Span | None]

    def __init__(self, name: str, **attributes: str) -> None:
        self._name = name
        self._attributes = attributes
        self._span: Span | None = None

    def __enter__(self) -> None:
        # Not a generator: this takes a third of its time.
        if (running := _span.get()) is not None:
            self._span = running.child(self._name, self._attributes)
            self._token = _span.set(self._span)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._span is not None:
            _span.reset(self._token)
            self._span.end("" if error is None else _text(error))


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
