"""What differs from the records, and a repair by hand: the daemon's own answers, with differences that a test sets."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.answers.questions import Answers, Asked
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.pod import upkeep
from multus_daemon.runtime import deadline
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.timeline import Timelines
from multus_daemon.spec.attachment import Attachment, Difference, Sandbox
from multus_daemon.spec.cni.errors import CniError, InvalidEnvironmentError, UnknownContainerError
from multus_daemon.spec.cni.names import ContainerId
from tests.aside import Aside
from tests.fakes.runner import FakeDelegateRunner
from tests.unit.pod.conftest import NETNS, Engine
from tests.waiting import PATIENCE

DOWN = '"net1" is down'
GONE = "what the plugin made is gone"


class Comparing(FakeDelegateRunner):
    """`wrong`: by attachment name, what differs; in `repairable`, what a repair takes away from it."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: dict[str, list[str]] = {}
        self.repairable = {DOWN}
        self.repair_fails = ""
        self.compared: list[str] = []

    def differences(self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns, *, asks: bool) -> list[Difference]:
        self.compared.append(attachment.name)
        return [self._difference(attachment.name, text) for text in self.wrong.get(attachment.name, ())]

    def _difference(self, name: str, text: str) -> Difference:
        def repair() -> None:
            if self.repair_fails:
                raise CniError(self.repair_fails)
            self.wrong[name].remove(text)

        return Difference(text, repair if text in self.repairable else None)


class Asking:
    """The answers of an engine on fakes, whose container `c1` of pod `web/p1` has the network `web/n1`."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.runner = self.engine.runner = Comparing()
        self.engine.verbs = self.engine.make_verbs()
        self.engine.declare("n1")
        self.engine.verbs.add(self.engine.request())
        self.core = self.engine.verbs.engine
        self.answers = Answers(self.core, Timelines(), pytest.fail, lambda: b"{}", Path("/no/such/spool"))

    def drift(self, pod: str = "") -> dict[str, Any]:
        return dict(self.answers.by_method["GET"]["drift"](Asked({"pod": pod})))

    def repair(self, pod: str = "web/p1", **query: str) -> dict[str, Any]:
        return dict(self.answers.by_method["POST"]["repair"](Asked({"pod": pod, **query})))


@pytest.fixture
def asking() -> Asking:
    return Asking()


def texts(items: Sequence[dict[str, Any]]) -> list[str]:
    return [item["difference"] for item in items]


@pytest.mark.parametrize("pod", ["", "web/p1"])
def test_a_pod_that_is_as_its_add_left_it(asking: Asking, pod: str) -> None:
    assert asking.drift(pod) == {"schema": "multusctl.drift/v1", "compared": 1, "differences": [], "passedOver": []}
    assert asking.runner.compared == ["kube-system/cluster", "web/n1"]


def test_each_difference_says_where_it_is_and_what_follows(asking: Asking) -> None:
    asking.runner.wrong["web/n1"] = [DOWN, GONE]
    where = {"pod": "web/p1", "container": "c1", "network": "web/n1", "interface": "net1"}
    assert asking.drift()["differences"] == [
        {**where, "difference": DOWN, "repairable": True, "keep": "report", "certain": True, "byPod": False},
        {**where, "difference": GONE, "repairable": False, "keep": "report", "certain": True, "byPod": False},
    ]


def test_what_the_pod_says_is_left_alone_is_shown_too(asking: Asking) -> None:
    asking.runner.wrong["web/n1"] = [DOWN]
    asking.engine.declare("n1", annotations={"multus.io/keep": "off"})
    (item,) = asking.drift()["differences"]
    assert (item["difference"], item["keep"]) == (DOWN, "off")


def test_a_question_changes_nothing(asking: Asking) -> None:
    asking.runner.wrong["web/n1"] = [DOWN]
    asking.engine.declare("n1", annotations={"multus.io/keep": "repair"})
    asking.drift()
    assert texts(asking.repair(dryRun="true")["left"]) == [DOWN]
    assert asking.runner.wrong["web/n1"] == [DOWN]


@pytest.mark.parametrize("keep", ["repair", "report", "off"])
def test_a_repair_by_hand_does_it_whatever_keep_says(asking: Asking, keep: str) -> None:
    asking.runner.wrong["web/n1"] = [DOWN, GONE]
    asking.engine.declare("n1", annotations={"multus.io/keep": keep})
    found = asking.repair()
    assert (texts(found["found"]), texts(found["left"]), found["errors"]) == ([DOWN, GONE], [GONE], [])
    assert found["dryRun"] is False
    assert asking.runner.wrong["web/n1"] == [GONE]


def test_a_repair_that_fails_says_why(asking: Asking) -> None:
    asking.runner.wrong["web/n1"] = [DOWN]
    asking.runner.repair_fails = "the bridge is away"
    found = asking.repair()
    assert texts(found["left"]) == [DOWN]
    (error,) = found["errors"]
    assert error.startswith("the bridge is away")


def test_an_earlier_container_of_the_pod_is_no_obstacle(asking: Asking) -> None:
    other = "/run/netns/p1-again"
    asking.engine.links.namespaces[other] = {"lo"}
    asking.engine.verbs.add(asking.engine.request(netns=other, container="c2"))
    del asking.engine.links.namespaces[NETNS]
    asking.runner.wrong["web/n1"] = [DOWN]
    assert [item["container"] for item in asking.repair()["found"]] == ["c2"]
    del asking.engine.links.namespaces[other]
    with pytest.raises(UnknownContainerError, match="is gone"):
        asking.repair()


def test_a_container_at_which_a_request_is_at_work_is_not_waited_for(asking: Asking) -> None:
    asking.runner.wrong["web/n1"] = [DOWN]
    with asking.core.locks.hold(ContainerId("c1")):
        found = asking.drift()
    assert (found["compared"], found["differences"]) == (0, [])
    assert found["passedOver"] == [{"pod": "web/p1", "container": "c1", "problem": "a request is at work on it"}]


def test_a_comparison_of_the_daemons_own_is_waited_for(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    asking.runner.wrong["web/n1"] = [DOWN]
    entered, released = threading.Event(), threading.Event()
    compare = asking.runner.differences

    def slow(*arguments: Any, asks: bool) -> list[Difference]:
        entered.set()
        released.wait(PATIENCE)
        return compare(*arguments, asks=asks)

    with monkeypatch.context() as patch:
        patch.setattr(asking.runner, "differences", slow)
        own = Aside(upkeep.compare, asking.core, ContainerId("c1"))
        assert entered.wait(PATIENCE)
        drift = Aside(asking.drift)
        time.sleep(0.05)
        released.set()
        assert (drift.result()["compared"], texts(drift.result()["differences"])) == (1, [DOWN])
        own.result()


def test_a_namespace_that_is_gone_is_named(asking: Asking) -> None:
    del asking.engine.links.namespaces[NETNS]
    (item,) = asking.drift()["passedOver"]
    assert "is gone" in item["problem"]


def test_what_there_was_no_time_for_is_named(asking: Asking) -> None:
    with deadline.given(Deadline(0.0)):
        found = asking.drift()
    assert (found["compared"], [item["problem"] for item in found["passedOver"]]) == (0, ["there was no time left"])
    assert asking.runner.compared == []


def test_a_damaged_record_is_named(asking: Asking) -> None:
    asking.engine.store.corrupt.add("c2")
    found = asking.drift()
    (item,) = found["passedOver"]
    assert (found["compared"], item["container"]) == (1, "c2")
    assert "damaged" in item["problem"]
    assert asking.drift("web/p1")["passedOver"] == []


def test_a_deleted_pod_is_no_drift(asking: Asking) -> None:
    asking.runner.wrong["web/n1"] = [DOWN]
    asking.engine.verbs.delete(asking.engine.request("DEL"))
    assert asking.drift() == {"schema": "multusctl.drift/v1", "compared": 0, "differences": [], "passedOver": []}


def test_a_pod_that_is_not_here(asking: Asking) -> None:
    for ask in (asking.drift, asking.repair):
        with pytest.raises(UnknownContainerError, match="pod web/p9 has no networks on record on this node"):
            ask("web/p9")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"pod": ""}, "no pod is named"),
        ({"pod": "p1"}, "pod must be NAMESPACE/POD"),
        ({"dryRun": "yes"}, "dryRun must be"),
    ],
)
def test_mistakes(asking: Asking, query: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidEnvironmentError, match=words):
        asking.repair(**query)
