"""Leaks show their cause and advice; `forget` removes a record; the tree shows every attachment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.answers.attachments import ORPHAN_ADVICE
from multus_daemon.answers.questions import Answers, Asked
from multus_daemon.runtime.timeline import Timelines
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId
from tests.unit.pod.conftest import NETNS, Engine


class Asking:
    """The answers of an engine on fakes. Its container `c1` has two networks."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.engine.declare("n1")
        self.engine.verbs.add(self.engine.request())
        self.timelines = Timelines()
        self.answers = Answers(
            self.engine.verbs.engine, self.timelines, pytest.fail, lambda: b"{}", Path("/no/such/spool")
        )

    def leaks(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.answers.by_method["GET"]["attachments"](Asked({"leaks": "true"}))[
            "containers"
        ]
        return found

    def forget(self, container: str) -> dict[str, Any]:
        return dict(self.answers.by_method["POST"]["forget"](Asked({"container": container})))

    def deletes_in_vain(self) -> None:
        """Let a DEL of the runtime fail."""
        self.engine.runner.fail["DEL", "web/n1"] = CniError("port 7 is locked")
        with (
            self.timelines.of({"verb": "DEL", "container": "c1", "pod": "web/p1"}) as kept,
            pytest.raises(CniError) as caught,
        ):
            self.engine.verbs.delete(self.engine.request("DEL"))
        kept.end((caught.value.code, str(caught.value)))


@pytest.fixture
def asking() -> Asking:
    return Asking()


def test_what_lives_is_no_leak(asking: Asking) -> None:
    assert asking.leaks() == []


def test_one_that_fails_has_its_last_error_and_can_be_forgotten(asking: Asking) -> None:
    asking.deletes_in_vain()
    (leak,) = asking.leaks()
    assert leak["problem"].startswith("its DEL failed once and is tried again: port 7 is locked")
    assert leak["advice"].endswith("then: multusctl attachments forget c1")
    with pytest.raises(CniError, match=f"its network namespace {NETNS} exists"):
        asking.forget("c1")
    asking.engine.links.namespaces.clear()
    forgotten = asking.forget("c1")
    assert (forgotten["schema"], forgotten["container"], forgotten["pod"]) == ("multusctl.forget/v1", "c1", "web/p1")
    assert [item["network"] for item in forgotten["attachments"]] == ["web/n1"]
    assert asking.leaks() == []


def test_of_a_daemon_that_has_started_anew_the_log_is_named(asking: Asking) -> None:
    asking.deletes_in_vain()
    asking.engine.store.records["c1"] = replace(asking.engine.store.records["c1"], given_up=True)
    asking.answers = Answers(asking.engine.verbs.engine, Timelines(), pytest.fail, lambda: b"{}", Path("/no/spool"))
    (leak,) = asking.leaks()
    assert leak["problem"] == "its DEL failed once and was given up: network web/n1 (fake)"
    assert leak["advice"].startswith("remove the cause, which the daemon's log names")


def test_an_orphan_needs_nothing(asking: Asking) -> None:
    asking.engine.links.namespaces.clear()
    (leak,) = asking.leaks()
    assert (leak["problem"], leak["advice"]) == ("its network namespace is gone", ORPHAN_ADVICE)


def test_what_is_set_aside_is_a_leak_and_only_that(asking: Asking) -> None:
    store = asking.engine.store
    store.set_aside(store.records["c1"], since=12.0, why="port 7 is locked")
    (leak,) = asking.leaks()
    assert (leak["container"], leak["pod"], leak["problem"], leak["setAside"]) == (
        "c1",
        "web/p1",
        "set aside: port 7 is locked",
        12.0,
    )
    assert leak["advice"] == "free by hand what it holds, then: multusctl attachments forget c1"
    assert asking.answers.by_method["GET"]["attachments"](Asked({}))["containers"] == []
    assert [
        item["container"]
        for pod in ("web/p1", "web/other")
        for item in asking.answers.by_method["GET"]["attachments"](Asked({"leaks": "true", "pod": pod}))["containers"]
    ] == ["c1"]


@pytest.mark.parametrize("others", [False, True])
def test_what_only_a_namespace_holds_is_not_to_be_freed_by_hand(asking: Asking, others: bool) -> None:
    """The kernel gives the device back when the namespace goes."""
    record = asking.engine.store.records["c1"]
    config = conf.parse(b'{"cniVersion": "1.0.0", "name": "nic", "type": "host-device", "device": "up0"}')
    taken = replace(record.attachments[-1], config=config, served_by={"host-device": "/opt/cni/bin/host-device"})
    left = replace(record, attachments=(*record.attachments[: int(others)], taken))
    asking.engine.store.set_aside(left, since=12.0, why="file exists")
    (leak,) = asking.leaks()
    assert ("free by hand" in leak["advice"]) is others
    assert leak["advice"].endswith("multusctl attachments forget c1")


def test_a_damaged_record_says_how_to_be_rid_of_it(asking: Asking) -> None:
    asking.engine.store.records.clear()
    asking.engine.store.corrupt.add("c7")
    (leak,) = asking.leaks()
    assert (leak["container"], "can't be read" in leak["problem"]) == ("c7", True)
    assert leak["advice"] == "free by hand what it holds, then: multusctl attachments forget c7"
    assert asking.forget("c7") == {
        "schema": "multusctl.forget/v1",
        "container": ContainerId("c7"),
        "pod": "",
        "attachments": [],
    }


@pytest.mark.parametrize(("container", "code"), [("", 4), ("../c1", 4), ("unknown", 3)])
def test_what_is_nothing_can_not_be_forgotten(asking: Asking, container: str, code: int) -> None:
    with pytest.raises(CniError) as caught:
        asking.forget(container)
    assert caught.value.code == code
