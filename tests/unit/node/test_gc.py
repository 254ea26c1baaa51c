"""GC deletes stale containers, never touches live ones, and gives each network's plugins their attachments."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from multus_daemon import deadlines
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.node import orphans
from multus_daemon.plugins.plugin import Progress
from multus_daemon.runtime import deadline
from multus_daemon.runtime.threads import KeyedLock
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import CniError, IoFailureError, TryAgainLaterError
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from tests.aside import Aside, together
from tests.unit.pod.conftest import NETNS, Engine, definition
from tests.waiting import until

ABSENT = b'{"cniVersion":"1.1.0","name":"multus"}'


def listing(*containers: str, ifname: str = "eth0") -> bytes:
    """Return the standard input of a GC for which these containers are valid."""
    pairs = [{"containerID": container, "ifname": ifname} for container in containers]
    return json.dumps({"cniVersion": "1.1.0", "name": "multus", "cni.dev/valid-attachments": pairs}).encode()


def netns_of(container: str) -> str:
    return f"/run/netns/{container}"


def add(engine: Engine, container: str = "c1", networks: str = "n1,n2") -> None:
    engine.declare(networks)
    engine.links.namespaces[netns_of(container)] = {"lo"}
    engine.verbs.add(engine.request(container=container, netns=netns_of(container)))
    engine.runner.calls.clear()


def foreign(container: str, netns: str, *networks: tuple[str, str]) -> ContainerRecord:
    """Create the leftovers of another daemon for a container: its networks and their interfaces."""
    attachments = tuple(
        Attachment(
            name, conf.parse(json.dumps({"cniVersion": "1.1.0", "name": name, "type": "fake"}).encode()), IfName(ifname)
        )
        for name, ifname in networks
    )
    sandbox = Sandbox(ContainerId(container), netns)
    return ContainerRecord(sandbox, IfName("eth0"), Namespace("web"), PodName("old"), PodUid(""), attachments)


def valid(engine: Engine) -> dict[str, tuple[tuple[str, str], ...]]:
    """Return by network the attachments that its plugins got."""
    calls = [call for call in engine.runner.network_calls if call.verb == "GC"]
    assert len({call.config.name for call in calls}) == len(calls), "each network once"
    return {call.config.name: call.valid for call in calls}


# --- containers ------------------------------------------------------------------------------------------------------


@pytest.mark.weak_spot(12)
@pytest.mark.parametrize("gone", [True, False], ids=["netns gone", "netns empty"])
def test_a_container_that_the_runtime_has_no_more_is_deleted(engine: Engine, gone: bool) -> None:
    add(engine)
    if gone:
        engine.links.namespaces.clear()
    engine.links.unused.add(netns_of("c1"))
    engine.verbs.gc(listing())
    assert engine.store.records == {}
    assert engine.runner.order == [("DEL", "web/n2"), ("DEL", "web/n1"), ("DEL", "kube-system/cluster")]
    assert engine.runner.calls[0].sandbox == Sandbox(ContainerId("c1"), netns_of("c1"))
    assert valid(engine) == {"cluster": (), "n1": (), "n2": ()}
    assert engine.collected == {"success": 3}


def test_a_comparison_of_the_daemons_own_is_ended_for_it(engine: Engine) -> None:
    add(engine)
    engine.links.namespaces.clear()
    core, entered = engine.verbs.engine, threading.Event()

    def compare() -> None:
        with core.upkeeps.of(ContainerId("c1")), core.locks.hold("c1"):
            core.upkeeps.holders.add(ContainerId("c1"))
            entered.set()
            deadline.pause(60)

    comparison = Aside(compare)
    assert entered.wait(30)
    engine.verbs.gc(listing())
    with pytest.raises(deadline.Interrupted):
        comparison.result()
    assert engine.store.records == {}


def test_a_container_that_the_runtime_has_is_left_whatever_its_namespace(engine: Engine) -> None:
    add(engine)
    engine.links.namespaces.clear()
    engine.verbs.gc(listing("c1", ifname="other0"))
    assert list(engine.store.records) == ["c1"]
    assert valid(engine) == {"cluster": (("c1", "eth0"),), "n1": (("c1", "net1"),), "n2": (("c1", "net2"),)}
    assert engine.collected == {}


def test_a_container_with_processes_is_left_alone_and_told_of(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """An empty list of a confused runtime must not strip a node's pods of their networks."""
    add(engine)
    engine.verbs.gc(listing())
    assert list(engine.store.records) == ["c1"]
    assert engine.runner.calls == []
    assert valid(engine) == {"cluster": (("c1", "eth0"),), "n1": (("c1", "net1"),), "n2": (("c1", "net2"),)}
    assert engine.collected == {"skipped": 3}
    assert "1 containers are not in the runtime's list, and processes run in them" in caplog.text
    assert "left alone, such as web/p1 (c1)" in caplog.text


def test_without_a_list_nothing_is_touched(engine: Engine) -> None:
    add(engine)
    engine.links.namespaces.clear()
    engine.verbs.gc(ABSENT)
    assert list(engine.store.records) == ["c1"]
    assert engine.runner.network_calls == []


def test_null_is_an_empty_list(engine: Engine) -> None:
    """libcni writes it like this for a runtime without containers."""
    add(engine)
    engine.links.namespaces.clear()
    engine.verbs.gc(ABSENT[:-1] + b',"cni.dev/valid-attachments":null,"cni.dev/attachments":null}')
    assert engine.store.records == {}


@pytest.mark.weak_spot(12)
@pytest.mark.conformance("server-7", "verbs-30")
def test_a_fresh_node(engine: Engine) -> None:
    engine.verbs.gc(listing())
    assert valid(engine) == {"cluster": ()}


def test_one_failure_stops_nothing_and_is_reported(engine: Engine) -> None:
    for container in ("c1", "c2", "c3"):
        add(engine, container, "n1")
    engine.links.namespaces.clear()
    engine.runner.fail_at[1] = TryAgainLaterError("busy")
    engine.runner.fail["GC", "cluster"] = CniError("pool is away")
    with pytest.raises(TryAgainLaterError, match="^busy") as caught:
        engine.verbs.gc(listing())
    assert "pool is away" in caught.value.details
    [left] = engine.store.records
    assert engine.collected == {"success": 4, "error": 2}
    assert valid(engine)["n1"] == ((left, "net1"),)
    engine.runner.fail.clear()
    engine.verbs.gc(listing())
    assert engine.store.records == {}


def test_a_del_that_hangs_does_not_keep_the_others_waiting(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "GC_CONTAINER_SECONDS", 0.05)
    for number in range(8):
        add(engine, f"c{number}", "")
    engine.links.namespaces.clear()
    real = engine.runner.delete

    def delete(sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None) -> None:
        if sandbox.container_id == "c0":
            deadline.pause(30)
        real(sandbox, attachment, netns)

    monkeypatch.setattr(engine.runner, "delete", delete)
    with pytest.raises(TryAgainLaterError, match=r"^DEL of network kube-system/cluster did not end within 0\.0\d+ s"):
        engine.verbs.gc(listing())
    assert list(engine.store.records) == ["c0"]
    assert valid(engine) == {"cluster": (("c0", "eth0"),)}


def test_what_the_time_does_not_suffice_for_is_left_to_the_next_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add(engine)
    engine.links.namespaces.clear()
    engine.store.left["old"] = foreign("old", "/gone", ("cluster", "eth0"))
    monkeypatch.setattr(deadlines, "GC_SWEEP_SECONDS", 0.0)
    engine.verbs.gc(listing())
    assert list(engine.store.records) == ["c1"]
    assert engine.runner.network_calls == [], "what another daemon left is not known: no plugin may free anything"
    assert "is left to the next GC" in caplog.text
    assert "no time to look at everything" in caplog.text


# --- what is under way -----------------------------------------------------------------------------------------------


class HeldAdd:
    """An ADD that hangs in its plugin until `may_end`."""

    def __init__(self, engine: Engine) -> None:
        self.may_end = threading.Event()
        self._reached, self._add = threading.Event(), engine.runner.add
        engine.runner.add = self._hang  # type: ignore[method-assign]  # of this object only
        self._running = Aside(engine.verbs.add, engine.request())
        assert self._reached.wait(30)

    def _hang(self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None) -> Any:
        self._reached.set()
        assert self.may_end.wait(30)
        return self._add(sandbox, attachment, netns)

    def end(self) -> None:
        self.may_end.set()
        self._running.result()


def test_an_add_under_way_is_left_and_its_networks_count_as_attached(engine: Engine) -> None:
    engine.declare("n1")
    adding = HeldAdd(engine)
    engine.links.unused.add(NETNS)
    engine.verbs.gc(listing())
    assert valid(engine) == {"cluster": (("c1", "eth0"),), "n1": (("c1", "net1"),)}
    adding.end()
    assert "DEL" not in {verb for verb, _ in engine.runner.order}


class Held:
    """A GC that hangs in the DEL of a container `stale`, so that whatever comes meanwhile is before the next one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.reached, self.may_end = threading.Event(), threading.Event()
        self._delete = engine.runner.delete
        engine.runner.delete = self._hang  # type: ignore[method-assign]  # of this object only

    def _hang(
        self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None
    ) -> None:
        if sandbox.container_id == "stale":
            self.reached.set()
            assert self.may_end.wait(30)
        self._delete(sandbox, attachment, netns)

    def begin(self) -> Aside[None]:
        """The GC, which hangs now."""
        add(self.engine, "stale", "")
        del self.engine.links.namespaces[netns_of("stale")]
        running = Aside(self.engine.verbs.gc, listing())
        assert self.reached.wait(30)
        return running

    def begin_another(self) -> Aside[None]:
        """A second GC, which is there and waits for the first one."""
        assert self.engine.verbs.engine.gc.waiting == 1
        running = Aside(self.engine.verbs.gc, listing())
        until(lambda: self.engine.verbs.engine.gc.waiting == 2)
        return running


@pytest.mark.parametrize("begins", ["before the request", "after the request"])
def test_an_add_that_the_list_can_not_know_is_left(engine: Engine, begins: str) -> None:
    """It may have begun before or after the list was made; no process runs in its namespace yet."""
    engine.links.unused.add(NETNS)
    held = Held(engine)
    first = held.begin()
    if begins == "before the request":
        adding = HeldAdd(engine)
        second = held.begin_another()
        adding.end()
    else:
        second = held.begin_another()
        engine.verbs.add(engine.request())
    held.may_end.set()
    first.result()
    second.result()
    assert list(engine.store.records) == ["c1"]
    engine.verbs.gc(listing())
    assert engine.store.records == {}


def test_an_add_that_ends_before_the_store_is_read_is_left(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.links.unused.add(NETNS)
    adding, real = HeldAdd(engine), engine.store.containers

    def containers(**options: bool) -> Any:
        adding.end()
        return real(**options)

    monkeypatch.setattr(engine.store, "containers", containers)
    engine.verbs.gc(listing())
    assert adding.may_end.is_set()
    assert list(engine.store.records) == ["c1"]


def test_an_add_that_comes_and_goes_while_the_namespaces_are_looked_at_is_left(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container was stale when its record was read."""
    add(engine, "c1", "")
    engine.links.unused.add(netns_of("c1"))
    real = engine.links.netns_in_use

    def inhabited(paths: Collection[str]) -> set[str]:
        found = real(paths)
        Aside(add, engine, "c1", "").result()
        return found

    monkeypatch.setattr(engine.links, "netns_in_use", inhabited)
    engine.verbs.gc(listing())
    assert engine.runner.order == []
    assert engine.store.records["c1"].complete


@pytest.mark.parametrize("who", ["GC", "orphans"])
def test_a_del_that_is_a_little_earlier_is_not_waited_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """It takes the lock of its container before GC can, and may hang there."""
    add(engine, "c1", "")
    del engine.links.namespaces[netns_of("c1")]
    [orphan] = orphans.look(engine.verbs.engine).orphans.values()
    deleting: list[Aside[None]] = []
    comes, reached, may_end, asked = threading.Event(), threading.Event(), threading.Event(), []
    real_hold, real_delete = KeyedLock.hold, engine.runner.delete

    def hold(locks: KeyedLock, key: str) -> Any:
        if key == "c1" and not comes.is_set():
            comes.set()
            deleting.append(Aside(engine.verbs.delete, engine.request("DEL", netns=netns_of("c1"))))
            assert reached.wait(30)
        return real_hold(locks, key)

    def delete(sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None) -> None:
        asked.append(sandbox.container_id)
        reached.set()
        assert may_end.wait(30)
        real_delete(sandbox, attachment, netns)

    monkeypatch.setattr(KeyedLock, "hold", hold)
    engine.runner.delete = delete  # type: ignore[method-assign]  # of this object only
    work: Callable[[], object] = partial(engine.verbs.gc, listing())
    looking = Aside(work if who == "GC" else partial(orphans.delete, engine.verbs.engine, orphan, 30))
    try:
        assert looking.result() in (None, False)
        assert deleting
        assert not deleting[0].done
    finally:
        may_end.set()
    deleting[0].result()
    assert asked == ["c1"]
    assert engine.store.records == {}


def test_a_container_that_is_being_deleted_is_left_to_its_del(engine: Engine) -> None:
    add(engine, "c1", "")
    held = Held(engine)
    first = held.begin()
    second = held.begin_another()
    engine.links.unused.add(netns_of("c1"))
    real, may_end, asked = engine.runner.delete, threading.Event(), []

    def delete(sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None) -> None:
        asked.append(sandbox.container_id)
        assert may_end.wait(60)
        real(sandbox, attachment, netns)

    engine.runner.delete = delete  # type: ignore[method-assign]  # of this object only
    deleting = Aside(engine.verbs.delete, engine.request("DEL", netns=netns_of("c1")))
    until(lambda: asked)
    held.may_end.set()
    first.result()
    second.result()
    assert not deleting.done
    may_end.set()
    deleting.result()
    assert asked == ["c1"]


def test_two_at_the_same_time_go_one_after_the_other(engine: Engine) -> None:
    held = Held(engine)
    first = held.begin()
    engine.store.calls.clear()
    second = held.begin_another()
    time.sleep(0.05)
    assert engine.store.calls == []
    held.may_end.set()
    first.result()
    second.result()
    assert [call.verb for call in engine.runner.network_calls] == ["GC", "GC"]


@pytest.mark.parametrize("how", ["ADD", "hot-plug"])
def test_an_add_waits_for_the_gc_of_its_network_or_is_told_to_it(engine: Engine, how: str) -> None:
    """A network's plugins free everything that was not on record when they were called."""
    add(engine, "c2", "")
    hot = json.dumps({"cniVersion": "1.0.0", "name": "cluster", "type": "fake"})
    asked, may_end = threading.Event(), threading.Event()
    real = engine.runner.gc

    def gc(config: conf.NetworkConfig, valid: Sequence[tuple[ContainerId, IfName]]) -> None:
        asked.set()
        assert may_end.wait(30)
        real(config, valid)

    engine.runner.gc = gc  # type: ignore[method-assign]  # of this object only
    collecting = Aside(engine.verbs.gc, listing("c2"))
    assert asked.wait(30)
    if how == "ADD":
        adding = Aside(engine.verbs.add, engine.request())
    else:
        plug = engine.plug(container="c2", netns=netns_of("c2"), network="cluster", config=hot)
        adding = Aside(engine.verbs.add_network, plug)
    # The ADD is on record, which is the last thing before it waits.
    until(lambda: len(engine.store.saved) == 3)
    time.sleep(0.05)
    assert engine.runner.calls == []
    engine.links.namespaces[netns_of("c3")] = {"lo"}
    other = engine.plug(container="c3", netns=netns_of("c3"), network="hot")
    Aside(engine.verbs.add_network, other).result()
    may_end.set()
    collecting.result()
    adding.result()
    assert [verb for verb, _ in engine.runner.order] == ["ADD", "ADD"]
    assert valid(engine) == {"cluster": (("c2", "eth0"),)}


# --- networks --------------------------------------------------------------------------------------------------------


@pytest.mark.conformance("verbs-29")
def test_each_network_learns_its_own_attachments_hot_plugged_included(engine: Engine) -> None:
    add(engine, "c1", "n1")
    add(engine, "c2", "n1@lan0")
    engine.verbs.add_network(engine.plug(container="c2", netns=netns_of("c2")))
    engine.verbs.gc(listing("c1", "c2"))
    assert valid(engine) == {
        "cluster": (("c1", "eth0"), ("c2", "eth0")),
        "n1": (("c1", "net1"), ("c2", "lan0")),
        "hot": (("c2", "net5"),),
    }


def test_default_networks_are_asked_as_far_as_they_are_there(engine: Engine) -> None:
    engine.cluster.put_network(definition("kube-system", "extra"))
    engine.overlay["defaultNetworks"] = ["nowhere", "extra"]
    engine.verbs.gc(listing())
    assert valid(engine) == {"cluster": (), "extra": ()}


def test_without_a_cluster_network_the_others_are_asked(engine: Engine) -> None:
    add(engine, "c1", "n1")
    engine.cluster.networks.clear()
    engine.verbs.gc(listing("c1"))
    assert valid(engine) == {"cluster": (("c1", "eth0"),), "n1": (("c1", "net1"),)}


def test_the_configuration_is_the_present_one_or_that_of_the_newest_record(engine: Engine) -> None:
    for container, mtu, created in (("c1", 1, 3000.0), ("c2", 2, 2000.0)):
        config = json.dumps({"cniVersion": "1.1.0", "name": "n1", "type": "fake", "mtu": mtu})
        engine.cluster.put_network(definition("web", "n1", config))
        engine.clock = created
        add(engine, container, "n1")
    present = json.dumps({"cniVersion": "1.1.0", "name": "cluster", "type": "fake", "mtu": 9})
    engine.cluster.put_network(definition("kube-system", "cluster", present))
    engine.verbs.gc(listing("c1", "c2"))
    mtus = {call.config.name: json.loads(call.config.raw)["mtu"] for call in engine.runner.network_calls}
    assert mtus == {"cluster": 9, "n1": 1}


def test_a_container_of_before_our_time_counts_as_attached_to_the_cluster_network(engine: Engine) -> None:
    add(engine, "c1", "n1")
    engine.verbs.gc(listing("c1", "before"))
    assert valid(engine) == {"cluster": (("before", "eth0"), ("c1", "eth0")), "n1": (("c1", "net1"),)}


def test_plugins_that_hang_are_ended_and_hold_up_no_add(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "GC_NETWORK_SECONDS", 0.05)
    engine.runner.pause = 30
    with pytest.raises(TryAgainLaterError, match="^network cluster: GC did not end within"):
        Aside(engine.verbs.gc, listing()).result()
    engine.runner.pause = 0
    Aside(engine.verbs.add, engine.request()).result()


# --- what cannot be read, and what others left -----------------------------------------------------------------------


@pytest.mark.parametrize("runs", [True, False])
def test_a_damaged_record(engine: Engine, runs: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Its resources are unknown: if the container may run, no plugin may free anything."""
    add(engine, "c2", "n1")
    engine.store.corrupt.add("c1")
    if runs:
        engine.verbs.gc(listing("c1", "c2"))
        assert engine.runner.network_calls == []
        assert "the record of container c1, which runs, can't be read" in caplog.text
    else:
        with pytest.raises(IoFailureError, match="^record of container c1 is damaged"):
            engine.verbs.gc(listing("c2"))
        assert valid(engine)["n1"] == (("c2", "net1"),)
    assert engine.store.corrupt == {"c1"}


def test_a_damaged_record_is_made_good_from_elsewhere(engine: Engine) -> None:
    add(engine)
    engine.store.left["c1"] = engine.store.records.pop("c1")
    engine.store.corrupt.add("c1")
    engine.links.namespaces.clear()
    engine.verbs.gc(listing())
    assert engine.runner.attached == set()
    assert engine.store.corrupt == set()


@pytest.mark.weak_spot(32)
def test_what_another_daemon_left_is_collected_where_it_is_stale(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "_LEFTOVERS_BATCH", 2)
    for number in range(5):
        engine.store.left[f"dead{number}"] = foreign(f"dead{number}", "/gone", ("cluster", "eth0"), ("old", "net1"))
    engine.store.left["listed"] = foreign("listed", "/gone", ("old", "net1"))
    engine.store.left["lives"] = foreign("lives", NETNS, ("cluster", "eth0"))
    engine.verbs.gc(listing("listed"))
    assert {call.sandbox.container_id for call in engine.runner.calls} == {f"dead{number}" for number in range(5)}
    assert len(engine.runner.calls) == 10
    assert valid(engine) == {"cluster": (("lives", "eth0"),), "old": (("listed", "net1"),)}
    assert engine.collected == {"success": 10, "skipped": 1}


@pytest.mark.weak_spot(32)
def test_an_empty_list_of_another_daemon_is_removed(engine: Engine) -> None:
    engine.store.left["empty"] = foreign("empty", "")
    engine.verbs.gc(listing())
    assert ("remove", "empty") in engine.store.calls


def test_results_that_the_runtime_keeps_of_us_are_not_ours(engine: Engine) -> None:
    """Its cache may be in our cniDir, /var/lib/cni for both: a DEL of that network would call ourselves."""
    raw = b'{"cniVersion":"1.1.0","name":"multus-cni-network","type":"multus-shim"}'
    attachment = Attachment("multus-cni-network", conf.parse(raw), IfName("eth0"))
    for container, others in (("c1", ()), ("c2", foreign("c2", "", ("old", "net1")).attachments)):
        engine.store.left[container] = replace(foreign(container, NETNS), attachments=(attachment, *others))
    engine.verbs.gc(listing("c2"))
    assert engine.runner.calls == []
    assert valid(engine) == {"cluster": (), "old": (("c2", "net1"),)}


def test_the_store_is_searched_once(engine: Engine) -> None:
    for number in range(20):
        engine.store.left[f"c{number}"] = foreign(f"c{number}", "/gone", ("cluster", "eth0"))
    engine.verbs.gc(listing())
    assert [method for method, _ in engine.store.calls].count("leftovers") == 2, "the second one finds no more"


def test_what_another_daemon_left_damaged_is_not_searched_for_each(engine: Engine) -> None:
    engine.store.damaged_left = engine.store.listed = {f"c{number}" for number in range(5)}
    with pytest.raises(IoFailureError, match="^record of container c0 is damaged"):
        engine.verbs.gc(listing())
    assert [method for method, _ in engine.store.calls].count("load") == 0
    assert valid(engine) == {"cluster": ()}


def test_a_store_that_fails_fails_the_gc(engine: Engine) -> None:
    engine.store.fail_at[1] = OSError("no disk")
    with pytest.raises(IoFailureError, match="no disk"):
        engine.verbs.gc(listing())
    assert engine.runner.network_calls == []


# --- nothing live is ever touched ------------------------------------------------------------------------------------

NAMES = [f"c{number}" for number in range(4)]
NETWORKS = ["n1", "n2", ""]


class Node(RuleBasedStateMachine):
    """Containers come and go, here and at another daemon, with any list of the runtime."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine()
        self.inhabited: set[str] = set()
        self.attached: dict[str, set[tuple[str, str]]] = {}
        """Keys are containers. Values are the network and interface of each attachment that was not deleted."""
        real_add, real_delete = self.engine.runner.add, self.engine.runner.delete

        def note_add(
            sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None
        ) -> Any:
            self.attached.setdefault(sandbox.container_id, set()).add((attachment.config.name, attachment.ifname))
            return real_add(sandbox, attachment, netns)

        def note_delete(
            sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None
        ) -> None:
            real_delete(sandbox, attachment, netns)
            self.attached.get(sandbox.container_id, set()).discard((attachment.config.name, attachment.ifname))
            if (left := self.engine.store.left.get(sandbox.container_id)) and left.attachments[0].key == attachment.key:
                del self.engine.store.left[sandbox.container_id]

        self.engine.runner.add = note_add  # type: ignore[method-assign]  # of this object only
        self.engine.runner.delete = note_delete  # type: ignore[method-assign]  # of this object only

    @rule(name=st.sampled_from(NAMES), networks=st.sampled_from(NETWORKS))
    def comes(self, name: str, networks: str) -> None:
        if not self.attached.get(name):
            add(self.engine, name, networks)
            self.engine.links.unused.discard(netns_of(name))
            self.inhabited.add(name)

    @rule(name=st.sampled_from(NAMES), networks=st.sampled_from(NETWORKS))
    def is_left_by_another_daemon(self, name: str, networks: str) -> None:
        if not self.attached.get(name):
            had = [("cluster", "eth0"), *([(networks, "net1")] if networks else [])]
            self.engine.store.left[name] = foreign(name, netns_of(name), *had)
            self.attached[name] = set(had)
            self.engine.links.namespaces[netns_of(name)] = {"lo"}
            self.engine.links.unused.discard(netns_of(name))
            self.inhabited.add(name)

    @rule(name=st.sampled_from(NAMES))
    def is_plugged_into(self, name: str) -> None:
        if name in self.inhabited and self.attached.get(name):
            self.engine.verbs.add_network(self.engine.plug(container=name, netns=netns_of(name)))

    @rule(name=st.sampled_from(NAMES), gone=st.booleans())
    def dies(self, name: str, gone: bool) -> None:
        self.inhabited.discard(name)
        self.engine.links.unused.add(netns_of(name))
        if gone:
            self.engine.links.namespaces.pop(netns_of(name), None)

    @precondition(lambda self: self.attached)
    @rule(listed=st.none() | st.sets(st.sampled_from(NAMES)), adds=st.sampled_from([None, *NAMES]))
    def gc(self, listed: set[str] | None, adds: str | None) -> None:
        before = {name: set(had) for name, had in self.attached.items()}
        self.engine.runner.network_calls.clear()
        self._gc_beside_an_add(listed, None if adds and self.attached.get(adds) else adds)
        stays = {name for name in NAMES if listed is None or name in listed or name in self.inhabited}
        for name, had in before.items():
            if name != adds:
                assert self.attached[name] == (had if name in stays else set())
        if listed is None:
            assert self.engine.runner.network_calls == []
            return
        told = valid(self.engine)
        for name, had in self.attached.items():
            for network, ifname in had:
                if name != adds:
                    assert (name, ifname) in told[network]

    def _gc_beside_an_add(self, listed: set[str] | None, adds: str | None) -> None:
        verbs, over = self.engine.verbs, threading.Event()

        def gc() -> None:
            try:
                verbs.gc(ABSENT if listed is None else listing(*listed))
            finally:
                over.set()

        def add_meanwhile(container: str) -> None:
            until(lambda: verbs.engine.gc.waiting or over.is_set())
            verbs.add(self.engine.request(container=container, netns=netns_of(container)))

        work: list[Callable[[], None]] = [gc]
        if adds:
            self.engine.links.namespaces[netns_of(adds)] = {"lo"}
            # It is new: there is no process in it yet.
            self.engine.links.unused.add(netns_of(adds))
            work.append(partial(add_meanwhile, adds))
        together(*work)
        if adds:
            assert self.attached[adds], "an ADD that begins while a GC runs is not its business"
            self.engine.links.unused.discard(netns_of(adds))
            self.inhabited.add(adds)

    @invariant()
    def what_is_attached_is_known(self) -> None:
        for name, had in self.attached.items():
            record = self.engine.store.records.get(name) or self.engine.store.left.get(name)
            assert {(item.config.name, item.ifname) for item in record.attachments} == had if record else not had


TestNode = Node.TestCase
TestNode.settings = settings(stateful_step_count=25, deadline=None)


def test_a_warning_names_only_some(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for number in range(8):
            add(engine, f"c{number}", "")
        engine.verbs.gc(listing())
    [message] = [record.getMessage() for record in caplog.records if "processes run in them" in record.getMessage()]
    assert message.startswith("GC: 8 containers")
    assert message.count("web/p1") == 5
