"""A running container is brought to its pod's annotation, over fakes: what fails, and what is cut off."""

from __future__ import annotations

import copy
import errno
import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.plugin import Progress
from multus_daemon.pod import annotation
from multus_daemon.runtime.deadline import Interrupted
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni.errors import CniError, IoFailureError, TryAgainLaterError
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName
from multus_daemon.spec.cni.result import Interface, IpConfig, Result, Route
from tests.counted import value_of
from tests.fakes.runner import FakeDelegateRunner
from tests.unit.pod.conftest import NETNS, Engine, definition

C1 = ContainerId("c1")
P1 = Namespace("web"), PodName("p1")
DEFAULT = Route("0.0.0.0/0", "10.0.0.1")
GATE = '{"name": "n3", "default-route": ["10.3.0.1"]}'


@dataclass
class State:
    """What a daemon that is killed leaves."""

    record: ContainerRecord
    links: set[str]
    attached: set[tuple[str, str]]
    routes: dict[tuple[str, bool], list[tuple[IfName, Route]]]


class Plugins(FakeDelegateRunner):
    """Plugins that make and remove the links; `states`: what there was at each of their calls."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.states: list[State] = []

    def look(self) -> None:
        links = self.engine.links
        record = self.engine.store.records.get("c1")
        if record is not None:
            self.states.append(
                State(record, set(links.namespaces[NETNS]), set(self.attached), copy.deepcopy(links.default_routes))
            )

    def add(
        self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None
    ) -> Result:
        self.look()
        super().add(sandbox, attachment, netns, progress)
        assert attachment.ifname not in self.engine.links.namespaces[NETNS], "the name is taken"
        self.engine.links.namespaces[NETNS].add(attachment.ifname)
        number = attachment.name[-1] if attachment.name[-1].isdigit() else "0"
        routes = (DEFAULT,) if attachment.cluster_network else ()
        if routes:
            self.engine.links.default_routes[NETNS, True] = [(attachment.ifname, DEFAULT)]
        self.look()
        return Result(
            (Interface(attachment.ifname, sandbox=NETNS),), (IpConfig(f"10.{number}.0.2/24", interface=0),), routes
        )

    def delete(
        self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None
    ) -> None:
        self.look()
        super().delete(sandbox, attachment, netns, progress)
        links = self.engine.links
        links.namespaces[NETNS].discard(attachment.ifname)
        for routes in links.default_routes.values():
            routes[:] = [item for item in routes if item[0] != attachment.ifname]
        self.look()

    def remember(self, sandbox: Sandbox, attachment: Attachment, networks: int = 0) -> None:
        # After the default routes have moved, too.
        self.look()
        super().remember(sandbox, attachment, networks)


@pytest.fixture
def plugins(engine: Engine) -> Plugins:
    """The pod runs with n1; its cluster network has the default route."""
    made = Plugins(engine)
    engine.runner = made
    engine.verbs = engine.make_verbs()
    for name in ("n3", "n4"):
        engine.cluster.put_network(definition("web", name))
    engine.declare("n1")
    engine.verbs.add(engine.request())
    made.calls.clear()
    made.states.clear()
    engine.cluster.events.clear()
    return made


def follow(engine: Engine, networks: str | None = None, **annotations: str) -> ContainerRecord:
    """Do what `pod.upkeep` does, for the pod with this annotation."""
    if networks is not None:
        engine.declare(networks, annotations=annotations)
    core = engine.verbs.engine
    pod = engine.cluster.pods[P1]
    with core.locks.hold(C1):
        before = core.records.find(C1, search=False)
        assert before is not None
        with core.namespaces.open(NETNS) as netns:
            return annotation.follow(core, before, pod, engine.request().stdin, netns)


def holds(engine: Engine, **wanted: str) -> None:
    """The networks, by interface, are in kernel and record, with a result, and in the status."""
    record = engine.store.records["c1"]
    assert {item.ifname: item.name for item in record.attachments[1:]} == {
        ifname: f"web/{name}" for ifname, name in wanted.items()
    }
    assert record.complete
    assert all(item.result is not None for item in record.attachments)
    assert not any(item.hot_plugged for item in record.attachments)
    assert engine.links.namespaces[NETNS] == {"lo", "eth0", *wanted}
    assert engine.runner.attached == {(item.name, item.ifname) for item in record.attachments}
    entries: list[dict[str, Any]] = json.loads(engine.cluster.statuses["web/p1"])
    assert {entry["interface"]: entry["name"] for entry in entries[1:]} == {
        ifname: f"web/{name}" for ifname, name in wanted.items()
    }


def default_routes(engine: Engine) -> list[tuple[str, str]]:
    """Interface and gateway of each; the results on record say the same."""
    in_kernel = [(str(ifname), route.gw) for ifname, route in engine.links.default_routes[NETNS, True]]
    on_record = [
        (str(item.ifname), route.gw)
        for item in engine.store.records["c1"].attachments
        for route in (item.result.routes if item.result else ())
        if route.is_default
    ]
    assert sorted(on_record) == sorted(in_kernel)
    return in_kernel


def hotplugs(engine: Engine) -> dict[str, int]:
    pairs = [(verb, outcome) for verb in ("ADD", "DEL") for outcome in ("success", "error")]
    found = {
        f"{verb} {outcome}": int(value_of(engine.metrics, "multus_hotplug_total", verb=verb, outcome=outcome) or 0)
        for verb, outcome in pairs
    }
    return {key: count for key, count in found.items() if count}


def events(engine: Engine) -> list[str]:
    return [reason for _, _, reason, _ in engine.cluster.events]


# --- what succeeds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("networks", ["n1", " web/n1", '[{"name": "n1"}]', "[]", "", "  "])
def test_nothing_to_do_touches_nothing(engine: Engine, plugins: Plugins, networks: str) -> None:
    engine.declare(networks)
    saved, asked, looked = len(engine.store.saved), len(engine.cluster.calls), len(engine.links.calls)
    core, before = engine.verbs.engine, engine.store.records["c1"]
    with core.namespaces.open(NETNS) as netns:
        assert annotation.follow(core, before, engine.cluster.pods[P1], b"{}", netns) is before
    assert (len(engine.store.saved), len(engine.cluster.calls), len(engine.links.calls)) == (saved, asked, looked)
    assert plugins.calls == []


def test_the_runtimes_repeated_add_and_del_cover_what_has_come(engine: Engine, plugins: Plugins) -> None:
    follow(engine, "n1,n2")
    plugins.calls.clear()
    engine.verbs.add(engine.request())
    assert plugins.calls == []
    engine.verbs.delete(engine.request("DEL"))
    assert plugins.order == [("DEL", "web/n2"), ("DEL", "web/n1"), ("DEL", "kube-system/cluster")]
    assert plugins.attached == set()


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "networks",
    ["n2,no-such", "n2@eth0", "n2@stranger", "{", "n2@@", '[{"name": "n2"}, 7]', f'[{{"name": "n2"}}, {GATE}, {GATE}]'],
)
def test_a_refusal_changes_nothing(engine: Engine, plugins: Plugins, networks: str) -> None:
    engine.links.namespaces[NETNS].add("stranger")
    before, saved = engine.store.records["c1"], len(engine.store.saved)
    with pytest.raises(CniError) as failure:
        follow(engine, networks)
    assert "web/p1" in str(failure.value)
    assert (engine.store.records["c1"], len(engine.store.saved)) == (before, saved)
    assert plugins.calls == []
    assert len(engine.warnings) == 1
    assert hotplugs(engine) == {}
    engine.links.namespaces[NETNS].discard("stranger")
    follow(engine, "n1")
    holds(engine, net1="n1")


# --- what fails ------------------------------------------------------------------------------------------------------


def test_one_of_several_fails_and_none_of_them_is_left(engine: Engine, plugins: Plugins) -> None:
    plugins.fail["ADD", "web/n3"] = TryAgainLaterError("not now")
    with pytest.raises(TryAgainLaterError):
        follow(engine, "n2,n3,n4")
    # What was detached stays detached.
    holds(engine)
    assert hotplugs(engine) == {"ADD error": 3, "DEL success": 1}
    assert events(engine) == ["NetworkDetached", "FailedAddingInterface"]
    del plugins.fail["ADD", "web/n3"]
    follow(engine)
    holds(engine, net1="n2", net2="n3", net3="n4")


def test_an_undo_fails_and_the_next_try_ends_it(engine: Engine, plugins: Plugins) -> None:
    plugins.fail |= {("ADD", "web/n2"): TryAgainLaterError("not now"), ("DEL", "web/n2"): IoFailureError("no disk")}
    with pytest.raises(TryAgainLaterError):
        follow(engine, "n1,n2")
    plugins.fail.clear()
    plugins.calls.clear()
    follow(engine)
    assert plugins.order == [("DEL", "web/n2"), ("ADD", "web/n2")]
    holds(engine, net1="n1", net2="n2")


@pytest.mark.parametrize("again", ["n2", "n1", "n1,n2"])
def test_a_del_fails_and_the_annotation_changes_its_mind(engine: Engine, plugins: Plugins, again: str) -> None:
    plugins.fail["DEL", "web/n1"] = IoFailureError("half of it is gone")
    with pytest.raises(IoFailureError):
        follow(engine, "n2")
    assert engine.store.records["c1"].failing_since > 0
    plugins.fail.clear()
    follow(engine, again)
    # It is not taken for whole.
    assert ("DEL", "web/n1") in plugins.order[1:]
    assert engine.store.records["c1"].failing_since == 0
    holds(engine, **{f"net{number}": name for number, name in enumerate(again.split(","), 1)})


def test_results_that_cannot_be_stored_are_undone(engine: Engine, plugins: Plugins) -> None:
    plugins.fail["REMEMBER", "web/n2"] = IoFailureError("no disk")
    with pytest.raises(IoFailureError):
        follow(engine, "n1,n2")
    plugins.fail.clear()
    follow(engine, "n1")
    holds(engine, net1="n1")


def test_the_status_is_written_although_the_record_cannot_be_read_again(
    engine: Engine, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loads = engine.store.load, []

    def once(container_id: ContainerId) -> ContainerRecord | None:
        loads.append(container_id)
        if len(loads) > 1:
            raise OSError(errno.EIO, "Input/output error")
        return load(container_id)

    monkeypatch.setattr(engine.store, "load", once)
    follow(engine, "n2")
    holds(engine, net1="n2")


# --- default routes --------------------------------------------------------------------------------------------------


def test_default_routes_move_from_one_network_to_another(engine: Engine, plugins: Plugins) -> None:
    follow(engine, f"[{GATE}]")
    follow(engine, f"[{GATE.replace('n3', 'n4')}]")
    assert default_routes(engine) == [("net1", "10.3.0.1")]
    follow(engine, "n1")
    assert default_routes(engine) == [("eth0", "10.0.0.1")]


@pytest.mark.parametrize("gate_is_new", [True, False])
def test_default_routes_when_a_network_fails_after_its_add(engine: Engine, plugins: Plugins, gate_is_new: bool) -> None:
    if not gate_is_new:
        follow(engine, f'[{{"name": "n1"}}, {GATE}]')
    # So its result is stored after the default routes have moved.
    plugins.built_in.add("web/n2")
    plugins.fail["REMEMBER", "web/n2"] = IoFailureError("no disk")
    with pytest.raises(IoFailureError):
        follow(engine, f'[{{"name": "n1"}}, {{"name": "n2"}}, {GATE}]')
    assert default_routes(engine) == ([("eth0", "10.0.0.1")] if gate_is_new else [("net2", "10.3.0.1")])
    plugins.fail.clear()
    follow(engine)
    assert [gateway for _, gateway in default_routes(engine)] == ["10.3.0.1"]
    follow(engine, "n1")
    assert default_routes(engine) == [("eth0", "10.0.0.1")]


# --- what is cut off -------------------------------------------------------------------------------------------------


def restart(engine: Engine, plugins: Plugins, state: State) -> None:
    """A new daemon finds this."""
    engine.store.records["c1"] = state.record
    engine.links.namespaces[NETNS] = set(state.links)
    engine.links.default_routes = copy.deepcopy(state.routes)
    plugins.attached = set(state.attached)
    engine.verbs = engine.make_verbs()


@pytest.mark.parametrize("networks", ["n1", ""])
def test_default_routes_that_a_killed_daemon_did_not_put_back(engine: Engine, plugins: Plugins, networks: str) -> None:
    """It was killed after the DEL of the network that had them."""
    follow(engine, f'[{{"name": "n1"}}, {GATE}]')
    saved = len(engine.store.saved)
    follow(engine, "n1")
    last = plugins.states[-2]
    assert last.attached == {("kube-system/cluster", "eth0"), ("web/n1", "net1")}
    without = next(item for item in engine.store.saved[saved:] if len(item.attachments) == 2)
    restart(engine, plugins, replace(last, record=without))
    assert without.lacks_routes
    assert not engine.links.default_routes[NETNS, True]
    follow(engine, networks)
    assert default_routes(engine) == [("eth0", "10.0.0.1")]
    assert not engine.store.records["c1"].lacks_routes
    saved = len(engine.store.saved)
    follow(engine)
    assert len(engine.store.saved) == saved


@pytest.mark.parametrize("after", ["the same", "back", "another"])
@pytest.mark.parametrize(
    "networks", ["n1,n2,n3", "n2,n3", "n3@net1", "n2@data0,n1@data1", f'[{{"name": "n1"}}, {GATE}, {{"name": "n2"}}]']
)
def test_a_daemon_that_is_killed_goes_on(engine: Engine, plugins: Plugins, networks: str, after: str) -> None:
    follow(engine, networks)
    states = plugins.states[:]
    assert len(states) > 1
    for state in states:
        restart(engine, plugins, state)
        if after == "the same":
            follow(engine, networks)
            names = {item.ifname: item.name.removeprefix("web/") for item in engine.store.records["c1"].attachments[1:]}
            holds(engine, **names)
            assert sorted(annotation.wanted(networks, "web")) == sorted(
                item.selection for item in engine.store.records["c1"].attachments[1:]
            )
            continue
        follow(engine, "n1" if after == "back" else "n4@data0")
        holds(engine, **({"net1": "n1"} if after == "back" else {"data0": "n4"}))
        assert default_routes(engine) == [("eth0", "10.0.0.1")]


@pytest.mark.parametrize("verb", ["ADD", "DEL"])
def test_a_del_of_the_container_ends_it_and_takes_everything(engine: Engine, plugins: Plugins, verb: str) -> None:
    follow(engine, "n1,n2")
    network = {"ADD": "web/n3", "DEL": "web/n2"}[verb]
    plugins.fail[verb, network] = Interrupted()
    with pytest.raises(Interrupted):
        follow(engine, "n1,n3")
    plugins.fail.clear()
    engine.verbs.delete(engine.request("DEL"))
    assert plugins.attached == set()
    assert engine.links.namespaces[NETNS] == {"lo"}
    assert "c1" not in engine.store.records
