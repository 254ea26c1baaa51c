"""A trace context is read strictly, and carried to threads and tasks."""

import asyncio

import pytest

from multus_daemon.runtime import threads, trace
from multus_daemon.runtime.trace import NO_TRACE, TraceContext

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


def test_what_the_caller_gives():
    environ = {"TRACEPARENT": PARENT, "TRACESTATE": "a=1,b=2", "BAGGAGE": "user=x", "PATH": "/bin"}
    found = trace.read(environ)
    assert (found.trace_id, found.span_id) == (TRACE_ID, SPAN_ID)
    assert found.environ == {key: environ[key] for key in ("TRACEPARENT", "TRACESTATE", "BAGGAGE")}


@pytest.mark.parametrize(
    "parent",
    [
        "",
        PARENT.upper(),
        PARENT + "-00",
        PARENT[:-1],
        f" {PARENT}",
        f"{PARENT}\n",
        f"01-{TRACE_ID}-{SPAN_ID}-01",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID[:-1]}g-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-0x",
        f"00-{TRACE_ID[:-1]}\u0661-{SPAN_ID}-01",
    ],
)
def test_a_malformed_parent_is_no_trace(parent):
    assert trace.read({"TRACEPARENT": parent, "TRACESTATE": "a=1"}) == NO_TRACE
    # Baggage does not depend on it.
    assert trace.read({"TRACEPARENT": parent, "BAGGAGE": "a=1"}) == TraceContext("", "", {"BAGGAGE": "a=1"})


@pytest.mark.parametrize(("name", "most"), [("TRACESTATE", 512), ("BAGGAGE", 8192)])
def test_what_is_too_long_or_not_text_is_left_out(name, most):
    for value, is_kept in (("x" * most, True), ("x" * (most + 1), False), ("a=1\r\nX: y", False), ("a=é", False)):
        assert (trace.read({"TRACEPARENT": PARENT, name: value}).environ.get(name) == value) is is_kept


async def test_a_request_passes_on_what_it_got():
    caller = trace.read({"TRACEPARENT": PARENT, "BAGGAGE": "a=1"})
    with trace.of(caller):
        assert trace.environ() == caller.environ
        assert threads.start(trace.environ).result() == caller.environ
        assert await asyncio.create_task(asyncio.sleep(0, trace.environ())) == caller.environ
    assert trace.environ() == {}
