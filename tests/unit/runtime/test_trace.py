"""A trace context is read strictly, carried to threads and tasks, and continued by spans."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from multus_daemon.runtime import threads, timeline, trace
from multus_daemon.runtime.timeline import Timelines
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


async def test_a_request_without_a_tracer_passes_on_what_it_got():
    caller = trace.read({"TRACEPARENT": PARENT, "BAGGAGE": "a=1"})
    with trace.of(caller, None, "CNI ADD", {}) as context:
        assert context is caller
        with trace.span("plan"), Timelines().of({}), timeline.stage("plugin"):
            assert trace.environ() == caller.environ
            assert threads.start(trace.environ).result() == caller.environ
            assert await asyncio.create_task(asyncio.sleep(0, trace.environ())) == caller.environ
    assert trace.environ() == {}


@dataclass
class FakeSpan:
    name: str
    attributes: Mapping[str, str]
    ended: list[tuple[str, str]]
    number: int = 1
    children: list["FakeSpan"] = field(default_factory=list)

    @property
    def context(self):
        return TraceContext(TRACE_ID, f"{self.number:016x}", {"TRACEPARENT": f"span {self.number}"})

    def child(self, name, attributes):
        made = FakeSpan(name, attributes, self.ended, self.number * 10 + len(self.children))
        self.children.append(made)
        return made

    def end(self, error):
        self.ended.append((self.name, error))


class FakeTracer:
    def __init__(self):
        self.ended: list[tuple[str, str]] = []
        self.root = FakeSpan("", {}, self.ended)

    def begin(self, name, caller, attributes):
        self.root = FakeSpan(name, attributes, self.ended)
        return self.root


def test_stages_and_plugins_are_spans_in_each_other_also_in_threads():
    tracer = FakeTracer()

    def plugin():
        with trace.span("plugin bridge", network="a"):
            return trace.environ()

    with Timelines().of({}), trace.of(NO_TRACE, tracer, "CNI ADD", {"verb": "ADD"}) as context:
        assert context == tracer.root.context
        with timeline.stage("plan"):
            pass
        with timeline.stage("plugin"):
            found = threads.start(plugin).result()
    plan, of_plugins = tracer.root.children
    [bridge] = of_plugins.children
    assert (plan.name, of_plugins.name, bridge.name, bridge.attributes) == (
        "plan", "plugin", "plugin bridge", {"network": "a"},
    )  # fmt: skip
    assert found == bridge.context.environ
    assert tracer.ended == [("plan", ""), ("plugin bridge", ""), ("plugin", ""), ("CNI ADD", "")]
    assert trace.environ() == {}


def test_the_spans_of_a_failure_say_so_and_end():
    tracer = FakeTracer()

    def fail():
        with Timelines().of({}), trace.of(NO_TRACE, tracer, "CNI ADD", {}):
            with timeline.stage("plan"):
                pass
            with timeline.stage("plugin"):
                raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert tracer.ended == [("plan", ""), ("plugin", "KeyError"), ("CNI ADD", "KeyError")]


def test_a_stage_outside_of_a_request_is_no_span():
    tracer = FakeTracer()
    with trace.of(NO_TRACE, tracer, "CNI ADD", {}), timeline.stage("plan"):
        pass
    assert tracer.root.children == []
