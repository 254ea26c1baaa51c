"""Spans by OpenTelemetry, sent over OTLP/HTTP: the extra `tracing`, imported only if the environment asks for it.

The variables are OpenTelemetry's own (https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/).
Spans that have ended wait in a bounded queue for a thread that sends them; what does not fit is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from multus_daemon import deadlines
from multus_daemon.runtime import trace
from multus_daemon.runtime.trace import TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL: Final = "http/protobuf"
_TEXT_MAX: Final = 1000
"""Maximum characters of an error, which may quote input from outside."""


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Report whether the variables ask for spans: they name an endpoint or the exporter `otlp`, and disable nothing."""
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter not in ("", "otlp"):
        return False
    return bool(exporter) or any(environ.get(name) for name in _ENDPOINTS)


def start(environ: Mapping[str, str], *, version: str) -> Spans | None:
    """Start sending spans; return None if they are not wanted, or not possible, which is logged."""
    if not is_wanted(environ):
        return None
    protocol = next(filter(None, (environ.get(name) for name in _PROTOCOLS)), _PROTOCOL)
    if protocol != _PROTOCOL:
        log.warning("no spans are sent: OTEL_EXPORTER_OTLP_PROTOCOL is %s; only %s is supported", protocol, _PROTOCOL)
        return None
    try:
        return Spans(_provider(environ, version))
    except ImportError as error:
        log.warning("no spans are sent: install multus-daemon[tracing], or unset the variables OTEL_*: %s", error)
    except Exception as error:
        # A malformed variable, for which the library has no exception of its own.
        log.warning("no spans are sent: the variables OTEL_* can't be used: %s: %s", type(error).__name__, error)
    return None


def _provider(environ: Mapping[str, str], version: str) -> TracerProvider:
    """Return what makes spans, and sends them. Raises ImportError, and any error for a malformed variable."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Exporter(SpanExporter):
        """Sends spans; the first failure, and the first success after it, is a line in the log."""

        def __init__(self) -> None:
            self._otlp = OTLPSpanExporter()
            self._reason = _LastLine()
            self._has_failed = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            sent = self._otlp.export(spans)
            if self._has_failed != (sent is not SpanExportResult.SUCCESS):
                self._has_failed = not self._has_failed
                if self._has_failed:
                    log.warning("spans are dropped until they can be sent again: %s", self._reason.text)
                else:
                    log.info("spans are sent again")
            return sent

        def shutdown(self) -> None:
            self._otlp.shutdown()  # type: ignore[no-untyped-call]

    named = {"service.version": version}
    if not environ.get("OTEL_SERVICE_NAME"):
        named[SERVICE_NAME] = "multus-daemon"
    if node := environ.get("MULTUS_NODE_NAME"):
        named["k8s.node.name"] = node
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Exporter()))
    return provider


class _LastLine(logging.Handler):
    """Keeps the last line of the library, which else logs one for each attempt, with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        library = logging.getLogger("opentelemetry")
        library.handlers = [self]
        library.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()[:_TEXT_MAX]


class Spans:
    """A `Tracer` that makes spans of OpenTelemetry."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("multus-daemon")

    def begin(self, name: str, caller: TraceContext, attributes: Mapping[str, str]) -> _Span:
        """Do the work of `Tracer.begin`."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {key.lower(): value for key, value in caller.environ.items() if key != trace.BAGGAGE}
        parent = TraceContextTextMapPropagator().extract(headers)
        made = self._tracer.start_span(name, parent, SpanKind.SERVER, _named(attributes))
        return _Span(self, made, caller)

    def child(self, name: str, parent: _Span, attributes: Mapping[str, str]) -> _Span:
        """Begin a span within another."""
        from opentelemetry.trace import set_span_in_context

        made = self._tracer.start_span(name, set_span_in_context(parent.made), attributes=_named(attributes))
        return _Span(self, made, parent.caller)

    def stop(self) -> None:
        """Send the spans that wait, for LOG_FLUSH_SECONDS at most. Blocks."""
        # A collector that hangs must not hold the daemon, so a thread waits for it.
        last = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        with contextlib.suppress(RuntimeError):
            last.start()
            last.join(deadlines.LOG_FLUSH_SECONDS)


class _Span:
    """A `Span` of OpenTelemetry."""

    def __init__(self, tracer: Spans, made: Span, caller: TraceContext) -> None:
        self._tracer = tracer
        self.made = made
        self.caller = caller

    @property
    def context(self) -> TraceContext:
        """Do the work of `Span.context`."""
        made = self.made.get_span_context()
        trace_id, span_id = f"{made.trace_id:032x}", f"{made.span_id:016x}"
        environ = {trace.PARENT: f"00-{trace_id}-{span_id}-{made.trace_flags:02x}"}
        if made.trace_state:
            environ[trace.STATE] = made.trace_state.to_header()
        if baggage := self.caller.environ.get(trace.BAGGAGE):
            environ[trace.BAGGAGE] = baggage
        # The trace of a request that is not sampled is nowhere, unless its caller has it.
        is_known = made.trace_flags.sampled or self.caller.trace_id
        return TraceContext(trace_id if is_known else "", span_id if is_known else "", environ)

    def child(self, name: str, attributes: Mapping[str, str]) -> _Span:
        """Do the work of `Span.child`."""
        return self._tracer.child(name, self, attributes)

    def end(self, error: str) -> None:
        """Do the work of `Span.end`."""
        if error:
            from opentelemetry.trace import StatusCode

            self.made.set_status(StatusCode.ERROR, error[:_TEXT_MAX])
        self.made.end()


def _named(attributes: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes as spans have them: the fields of the log, with a prefix."""
    return {f"multus.{key}": value for key, value in attributes.items() if value}
