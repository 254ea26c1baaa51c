"""Explain shows what an ADD would do, and why the runtime can't request one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.answers.asked import Asked
from multus_daemon.answers.questions import Answers
from multus_daemon.node.primary.config import RUNTIME_GATE
from multus_daemon.runtime.timeline import Timelines
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError
from tests.unit.pod.conftest import Engine, engine

__all__ = ["engine"]


def test_a_runtime_without_a_configuration_is_the_problem() -> None:
    """The pod's networks do not matter then."""
    engine = Engine()
    engine.declare("nope")

    def none() -> bytes:
        raise InvalidNetworkConfigError("10-cluster.conf can't be read", "the runtime has no configuration")

    answers = Answers(engine.verbs.engine, Timelines(), pytest.fail, none, Path("/no/spool"))
    found = answers.by_method["GET"]["explain"](Asked({"pod": "web/p1"}))
    problem = "10-cluster.conf can't be read; the runtime has no configuration"
    assert (found["problem"], found["code"]) == (problem, InvalidNetworkConfigError.default_code)
    assert found["steps"] == [{"what": "configuration", "result": "", "problem": problem}]


def explain(engine: Engine, pod: str = "web/p1") -> Mapping[str, Any]:
    def configuration() -> bytes:
        return b'{"cniVersion": "1.0.0", "name": "multus"}'

    answers = Answers(engine.verbs.engine, Timelines(), pytest.fail, configuration, Path("/no/spool"))
    return answers.by_method["GET"]["explain"](Asked({"pod": pod}))


def test_a_runtime_that_uses_another_file_is_the_problem(engine: Engine) -> None:
    engine.declare("n1")
    gates = engine.verbs.engine.gates
    gates.close(RUNTIME_GATE, "/net.d/00-a.conf comes before 00-multus.conf; remove it")
    found = explain(engine)
    assert found["problem"] == "/net.d/00-a.conf comes before 00-multus.conf; remove it"
    assert [item["network"] for item in found["networks"]][-1].endswith("n1"), "the rest is explained, too"
    gates.open(RUNTIME_GATE)
    assert explain(engine)["problem"] == ""


MISSPELT = '[{"name": "n1", "interfce": "data0", "bandwidth": {"ingressRate": 1000}}]'


@pytest.mark.parametrize("annotation", [MISSPELT, "nope", "n1,n2", "[", '[{"name": "n1", "interface": "eth0"}]'])
def test_it_changes_nothing_and_announces_nothing(
    engine: Engine, annotation: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine.declare(annotation)
    explain(engine)
    assert (engine.cluster.events, engine.cluster.statuses, engine.unsupported_args) == ([], {}, {})
    assert (engine.runner.calls, engine.store.saved) == ([], [])
    assert caplog.records == []


def test_a_pod_that_does_not_exist_gets_no_event(engine: Engine) -> None:
    assert "not known" in explain(engine, "web/nobody")["problem"]
    assert engine.cluster.events == []


@pytest.mark.parametrize("strict", [False, True])
def test_it_says_what_an_add_says_under_strict_requests(engine: Engine, strict: bool) -> None:
    engine.overlay["strictRequests"] = strict
    engine.declare('[{"name": "n1", "bandwidth": {"ingressRate": 1000}}]')
    found = explain(engine)
    if not strict:
        assert found["problem"] == ""
        engine.verbs.add(engine.request())
        return
    with pytest.raises(CniError) as caught:
        engine.verbs.add(engine.request())
    assert (found["problem"], found["code"]) == (str(caught.value), 2)
