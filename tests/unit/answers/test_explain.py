"""Explain shows what an ADD would do, and why the runtime can't request one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.answers.questions import Answers, Asked
from multus_daemon.node.lacking import Reports
from multus_daemon.node.primary.config import RUNTIME_GATE, UNUSABLE
from multus_daemon.runtime.timeline import Timelines
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError, Origin, TryAgainLaterError, parted
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad.selection import NETWORKS_ANNOTATION
from tests.aside import Aside
from tests.unit.answers.test_drift import GONE, Comparing
from tests.unit.pod.conftest import Engine, engine

__all__ = ["engine"]


def test_a_runtime_without_a_configuration_is_the_problem() -> None:
    """The pod's networks do not matter then."""
    engine = Engine()
    engine.declare("nope")

    def none() -> bytes:
        raise InvalidNetworkConfigError("10-cluster.conf can't be read", remedy="the runtime has no configuration")

    answers = Answers(engine.verbs.engine, Timelines(), pytest.fail, none, Path("/no/spool"))
    found = answers.by_method["GET"]["explain"](Asked({"pod": "web/p1"}))
    problem = "10-cluster.conf can't be read; the runtime has no configuration"
    assert (found["problem"], found["code"]) == (problem, InvalidNetworkConfigError.default_code)
    assert found["steps"] == [{"what": "configuration", "result": "", "problem": problem}]


def explain(engine: Engine, pod: str = "web/p1") -> Mapping[str, Any]:
    def configuration() -> bytes:
        return b'{"cniVersion": "1.0.0", "name": "multus"}'

    lacks = Reports(engine.verbs.engine, lambda _: "").of
    core = engine.verbs.engine
    answers = Answers(core, Timelines(), pytest.fail, configuration, Path("/no/spool"), lacks=lacks)
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


def test_a_file_before_ours_that_is_no_configuration_is_the_problem(engine: Engine) -> None:
    """containerd has no network then, and the pod waits."""
    engine.declare("n1")
    reason = "/net.d/00-a.conf comes before 00-multus.conf and can't be used; remove it"
    engine.verbs.engine.gates.degraded.close(UNUSABLE, reason)
    assert explain(engine)["problem"] == reason


def run(engine: Engine, networks: str) -> None:
    """The pod runs, and its annotation is this."""
    pod = Pod(Namespace("web"), PodName("p1"), PodUid("u1"), {NETWORKS_ANNOTATION: networks}, phase="Running")
    engine.cluster.put_pod(pod)


@pytest.fixture
def attached(engine: Engine) -> Engine:
    """The pod has the network n1, and what it has is compared with the kernel."""
    engine.runner = Comparing()
    engine.verbs = engine.make_verbs()
    engine.declare("n1")
    Aside(engine.verbs.add, engine.request()).result()
    return engine


def test_what_an_attached_pod_has_is_compared_with_the_kernel(attached: Engine) -> None:
    found = explain(attached)
    assert (found["attached"], found["compared"], found["differences"]) == (True, 1, [])
    assert isinstance(attached.runner, Comparing)
    attached.runner.wrong["web/n1"] = [GONE]
    assert [item["difference"] for item in explain(attached)["differences"]] == [GONE]


def test_a_running_pod_whose_annotation_was_edited_says_what_it_lacks(attached: Engine) -> None:
    engine = attached
    run(engine, "n1")
    assert explain(engine)["lacks"] == ""
    run(engine, "n1,n2")
    found = explain(engine)
    cause, remedy = parted(found["lacks"])
    assert (found["problem"], found["attached"]) == ("", True)
    assert cause.endswith("asked for: web/n2: its annotation was changed after its start")
    assert "made anew" in remedy
    assert "hotplug" in remedy


def test_a_pod_that_runs_and_was_never_attached_is_to_be_made_anew(engine: Engine) -> None:
    run(engine, "n1")
    assert "started while the runtime did not use Multus; delete it" in explain(engine)["lacks"]


def test_a_del_that_fails_is_named_with_its_plugin_and_the_count(engine: Engine) -> None:
    engine.declare("n1")
    Aside(engine.verbs.add, engine.request()).result()
    engine.runner.fail["DEL", "web/n1"] = CniError("port 7 is locked", remedy="unlock it", origin=Origin.PLUGIN)
    for _ in range(2):
        with pytest.raises(CniError):
            Aside(engine.verbs.delete, engine.request("DEL")).result()
    run(engine, "n1")
    found = explain(engine)
    assert found["lacks"] == "", "it is on its way out"
    [left] = found["leftovers"]
    assert left["problem"].startswith("its DEL failed 2 times and is tried again: network web/n1 (fake)")


@pytest.mark.parametrize(
    ("annotation", "place"), [('[{"name": "n1",}]', "(line 1, column "), ("n1@@a", "(element 0 'n1@@a')")]
)
def test_an_annotation_that_can_not_be_read_is_one_error_with_its_place(
    engine: Engine, annotation: str, place: str
) -> None:
    engine.declare(annotation)
    found = explain(engine)
    assert place in found["problem"]
    assert [step["what"] for step in found["steps"] if not step["problem"]] == ["configuration", "pod"]
    assert [step["problem"] for step in found["steps"] if step["problem"]] == [found["problem"]]


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


def test_the_address_that_an_add_would_take_is_a_step(engine: Engine) -> None:
    engine.declare("n1")
    engine.runner.foreseen["web/n1"] = "10.9.0.4"
    steps = explain(engine)["steps"]
    assert {"what": "addresses of web/n1", "result": "10.9.0.4", "problem": ""} in steps
    away = TryAgainLaterError("no address can be reserved now: the API server does not answer", remedy="look at it")
    engine.runner.fail["FORESEE", "web/n1"] = away
    found = explain(engine)
    assert (found["problem"], found["code"]) == (str(away), TryAgainLaterError.default_code)
    assert found["steps"][-1]["what"] == "addresses of web/n1"
