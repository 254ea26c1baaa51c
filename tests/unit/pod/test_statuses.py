"""A network-status that was never written is made anew from the record: at start, and by a repeated ADD."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from multus_daemon.pod import publish
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import ContainerId, Namespace, PodName, PodUid
from multus_daemon.spec.nad.network_status import ANNOTATION
from multus_daemon.spec.nad.selection import NETWORKS_ANNOTATION
from multus_daemon.spec.ports import StatusWriteError, StoreUnavailableError
from tests.unit.pod.conftest import NETNS, Engine

C1 = ContainerId("c1")
AWAY = StatusWriteError("the API server is away")


def bring_up_to_date(engine: Engine) -> list[str]:
    """Return the containers whose status was written, as at the start of a daemon."""
    core = engine.verbs.engine
    core.records.refresh()
    return [entry.container_id for entry in core.records.view if publish.bring_up_to_date(core, entry.container_id)]


def written(engine: Engine) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(engine.cluster.statuses["web/p1"])
    return found


def annotate(engine: Engine, value: str | None, networks: str = "n1", **pod: Any) -> None:
    """The pod as the API server has it by now."""
    annotations = {NETWORKS_ANNOTATION: networks} | ({} if value is None else {ANNOTATION: value})
    engine.cluster.put_pod(replace(Pod(Namespace("web"), PodName("p1"), PodUid("u1"), annotations), **pod))


@pytest.fixture
def added(engine: Engine) -> Engine:
    """Two networks are attached, and their status could not be written before the daemon ended."""
    engine.interface("eth0", "kube-system/cluster", "10.0.0.2/24")
    engine.interface("net1", "web/n1", "10.1.0.2/24")
    engine.declare("n1")
    engine.verbs.add(engine.request())
    engine.links.namespaces[NETNS] |= {"eth0", "net1"}
    engine.cluster.calls.clear()
    return engine


def test_one_that_was_never_written_is_written(added: Engine) -> None:
    first = added.cluster.statuses.pop("web/p1")
    assert bring_up_to_date(added) == ["c1"]
    assert added.cluster.statuses["web/p1"] == first
    assert added.cluster.keeps_trying == [True, True]


def test_one_that_is_there_is_left_alone(added: Engine) -> None:
    annotate(added, added.cluster.statuses["web/p1"])
    assert bring_up_to_date(added) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda status: "",
        lambda status: "[]",
        lambda status: "{",
        lambda status: json.dumps(status[:1]),
        lambda status: json.dumps([status[0], {**status[1], "ips": ["10.1.0.9"]}]),
        lambda status: json.dumps([status[0], {**status[1], "mac": "02:00:00:00:00:09"}]),
        lambda status: json.dumps([*status, {"name": "web/n9", "interface": "net9", "ips": ["10.9.0.2"]}]),
    ],
    ids=["empty", "none", "no JSON", "one less", "other addresses", "other MAC", "an interface that is gone"],
)
def test_one_of_before_is_replaced(added: Engine, change: Any) -> None:
    """The status may be the previous sandbox's, if that of the present one was never written."""
    whole = written(added)
    annotate(added, change(whole))
    assert bring_up_to_date(added) == ["c1"]
    assert written(added) == whole


@pytest.mark.parametrize("missing", ["net1", ""])
def test_entries_of_interfaces_that_others_brought_stay(added: Engine, missing: str) -> None:
    """Entries are matched by content: these are newer than the record, and not ours."""
    others = [
        {"name": "web/theirs", "interface": "net7", "ips": ["10.7.0.2"], "mac": "02:00:00:00:00:07", "dns": {}},
        {"name": "web/vfio", "interface": "net8", "device-info": {"type": "pci"}, "dns": {}},
    ]
    added.links.namespaces[NETNS].add("net7")
    whole = written(added)
    annotate(added, json.dumps([*(entry for entry in whole if entry["interface"] != missing), *others]))
    assert bring_up_to_date(added) == (["c1"] if missing else [])
    if missing:
        assert written(added) == [*whole, *others]


def test_an_annotation_that_its_author_has_made_long_costs_little(added: Engine) -> None:
    junk: list[dict[str, Any]] = [{"name": f"web/x{number}", "interface": f"x{number}"} for number in range(3000)]
    junk += [{"name": "web/long", "interface": "y" * 5000}, {"name": "web/odd", "interface": {"a": 1}}]
    added.links.namespaces[NETNS].add("x7")
    whole = written(added)
    annotate(added, json.dumps([*whole, *junk]))
    added.links.calls.clear()
    assert bring_up_to_date(added) == ["c1"]
    assert written(added) == [*whole, junk[7]]
    asked = [names for method, _, names in added.links.calls if method == "existing_links"]
    assert [len(names) for names in asked] == [256]


def test_how_another_writes_the_same_is_no_difference(added: Engine) -> None:
    """Go leaves out what is false, and a client knows more."""
    status = [{key: value for key, value in entry.items() if value} for entry in written(added)]
    annotate(added, json.dumps([status[0], {**status[1], "default": False, "more": [1]}], indent=4))
    assert bring_up_to_date(added) == []


@pytest.mark.parametrize("cluster", ["kube-system/cluster", "changed"])
def test_its_entry_has_the_name_that_its_client_gave_it(added: Engine, cluster: str) -> None:
    added.interface("net5", "web/hot", "10.5.0.2/24")
    added.verbs.add_network(added.plug())
    added.links.namespaces[NETNS].add("net5")
    hot = {"name": "other/nad", "interface": "net5", "ips": ["10.5.0.2"], "mac": "02:00:00:00:00:01", "dns": {}}
    first, second = written(added)
    annotate(added, json.dumps([{**first, "name": cluster}, second, hot]))
    assert bring_up_to_date(added) == (["c1"] if cluster == "changed" else [])
    if cluster == "changed":
        assert written(added) == [first, second, hot]


@pytest.mark.parametrize(
    "alone",
    ["no record", "another's record", "cut off", "namespace gone", "ended", "another pod", "another daemon's"],
)
def test_what_is_left_alone(added: Engine, alone: str) -> None:
    added.cluster.statuses.clear()
    record = added.store.records["c1"]
    match alone:
        case "no record":
            added.store.remove(C1)
        case "another's record":
            added.store.save(replace(record, pod_name=PodName("p2")))
        case "cut off":
            added.store.save(replace(record, complete=False))
        case "namespace gone":
            added.links.namespaces.clear()
        case "ended":
            annotate(added, None, phase="Succeeded")
        case "another pod":
            annotate(added, None, uid=PodUid("u2"))
        case "another daemon's":
            added.store.remove(C1)
            added.store.left["c1"] = record
            added.store.listed.add("c1")
        case _:
            raise AssertionError(alone)
    assert bring_up_to_date(added) == []
    assert not publish.bring_up_to_date(added.verbs.engine, C1)
    assert added.cluster.statuses == {}


def test_of_two_sandboxes_of_a_pod_the_newer_one_counts(added: Engine) -> None:
    record = added.store.records["c1"]
    older = tuple(replace(item, result=None) for item in record.attachments)
    added.store.save(
        replace(
            record,
            sandbox=replace(record.sandbox, container_id=ContainerId("a0")),
            created=record.created - 1,
            attachments=older,
        )
    )
    added.cluster.statuses.clear()
    assert bring_up_to_date(added) == ["c1"]


def test_a_static_pod_has_another_uid_in_the_api(added: Engine) -> None:
    added.cluster.statuses.clear()
    annotate(added, None, uid=PodUid("mirror"), annotations={"kubernetes.io/config.source": "file"})
    assert bring_up_to_date(added) == ["c1"]


def test_while_the_pods_are_not_known_nothing_is_read(added: Engine) -> None:
    added.cluster.unsynced = True
    added.store.calls.clear()
    with pytest.raises(StoreUnavailableError):
        publish.bring_up_to_date(added.verbs.engine, C1)
    assert added.store.calls == []


# --- a repeated ADD --------------------------------------------------------------------------------------------------


def test_a_repeated_add_writes_what_is_missing(added: Engine) -> None:
    first = added.cluster.statuses.pop("web/p1")
    calls = list(added.runner.calls)
    assert added.verbs.add(added.request()) == added.runner.results["kube-system/cluster"]
    assert added.cluster.statuses["web/p1"] == first
    assert added.runner.calls == calls


@pytest.mark.parametrize("error", [AWAY, StoreUnavailableError("away")])
def test_a_repeated_add_succeeds_without_the_api_server(added: Engine, error: Exception) -> None:
    added.cluster.statuses.clear()
    added.cluster.fail_at(2 if error is AWAY else 1, error)
    added.verbs.add(added.request())
    assert added.cluster.statuses == {}
