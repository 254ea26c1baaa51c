"""What a DEL has begun to take apart is on record as that before the first plugin, and is never made again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.node import orphans
from multus_daemon.node.orphans import Orphan
from multus_daemon.plugins.plugin import Progress, ResultLeftError
from multus_daemon.pod import annotation, publish
from multus_daemon.pod.check import announced
from multus_daemon.pod.view import Entry
from multus_daemon.spec.attachment import Attachment, ClaimedDevice, ContainerRecord, Sandbox
from multus_daemon.spec.claims import DeviceReport
from multus_daemon.spec.cni.errors import CniError, UnknownContainerError
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.cni.result import Result
from multus_daemon.spec.nad import network_status
from multus_daemon.spec.ports import StatusWriteError
from tests.fakes.runner import FakeDelegateRunner
from tests.unit.pod.conftest import NETNS, Engine, definition

C1 = ContainerId("c1")
ALL = {"eth0", "net1", "net2"}


class Failing(FakeDelegateRunner):
    """No DEL succeeds while `breaks` is set.

    For each, `marked` has the interfaces that are marked as leaving, and `states` what was on disk.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.marked: list[set[str]] = []
        self.states: list[ContainerRecord] = []
        self.breaks = True

    def add(
        self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None
    ) -> Result:
        made = super().add(sandbox, attachment, netns, progress)
        self.engine.links.namespaces[sandbox.netns].add(attachment.ifname)
        return made

    def delete(
        self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None
    ) -> None:
        record = self.engine.verbs.engine.records.find(sandbox.container_id, search=False)
        assert record is not None
        self.states.append(self.engine.store.records[sandbox.container_id])
        self.marked.append({item.ifname for item in record.attachments if item.leaving})
        if self.breaks:
            raise CniError("half of it is gone")
        self.engine.links.namespaces.get(sandbox.netns, set()).discard(attachment.ifname)
        super().delete(sandbox, attachment, netns, progress)


@pytest.fixture
def failing(engine: Engine) -> Failing:
    """The pod runs with n1 and n2, and with `hot` on net5."""
    engine.runner = runner = Failing(engine)
    engine.verbs = engine.make_verbs()
    for name, network, address in (
        ("eth0", "kube-system/cluster", "10.0.0.2/24"),
        ("net1", "web/n1", "10.1.0.2/24"),
        ("net2", "web/n2", "10.2.0.2/24"),
        ("net5", "web/hot", "10.5.0.2/24"),
    ):
        engine.interface(name, network, address)
    engine.declare("n1,n2")
    engine.verbs.add(engine.request())
    return runner


def plugged(engine: Engine) -> None:
    engine.verbs.add_network(engine.plug())


def runtime(engine: Engine) -> None:
    engine.verbs.delete(engine.request("DEL"))


def spool(engine: Engine) -> None:
    engine.verbs.delete(replace(engine.request("DEL"), spooled=engine.clock))


def delegate(engine: Engine) -> None:
    engine.verbs.remove_network(engine.plug("DEL", ifname="net2", network="n2"))


def follow(engine: Engine, networks: str = "n1") -> None:
    engine.declare(networks)
    core = engine.verbs.engine
    [pod] = engine.cluster.pods.values()
    with core.locks.hold(C1), core.namespaces.open(NETNS) as netns:
        record = core.records.find(C1, search=False)
        assert record is not None
        annotation.follow(core, record, pod, engine.request().stdin, netns)


def orphan(engine: Engine) -> None:
    record = engine.store.records["c1"]
    orphans.delete(engine.verbs.engine, Orphan(Entry.of(record), "it is one"), 10.0)


def gc(engine: Engine) -> None:
    engine.links.unused.add(NETNS)
    engine.verbs.gc(
        b'{"cniVersion":"1.1.0","name":"multus","cni.dev/valid-attachments":[{"containerID":"c9","ifname":"eth0"}]}'
    )


def add_anew(engine: Engine) -> None:
    """An ADD of the container in another namespace: what its first left is undone."""
    engine.links.namespaces["/run/netns/new"] = {"lo"}
    engine.verbs.add(engine.request(netns="/run/netns/new"))


ROADS: dict[Callable[[Engine], None], set[str]] = {
    runtime: ALL,
    spool: ALL,
    orphan: ALL,
    gc: ALL,
    add_anew: ALL,
    delegate: {"net2"},
    follow: {"net2"},
}


@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.__name__)
@pytest.mark.parametrize("disk", ["well", "full"])
def test_the_mark_is_there_before_the_first_plugin(
    engine: Engine, failing: Failing, road: Callable[[Engine], None], disk: str
) -> None:
    if disk == "full":
        engine.store.no_marks = OSError(28, "No space left on device")
    with pytest.raises(CniError):
        road(engine)
    assert failing.marked
    assert all(marked == ROADS[road] for marked in failing.marked)
    # What was written in the end says so too.
    engine.store.no_marks = None
    engine.verbs = engine.make_verbs()
    record = engine.verbs.engine.records.find(C1, search=False)
    assert record is not None
    assert {item.ifname for item in record.attachments if item.leaving} == ROADS[road]
    assert record.complete == ("eth0" not in ROADS[road])


@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.__name__)
def test_a_del_that_a_kill_cuts_off_is_marked_for_the_next_daemon(
    engine: Engine, failing: Failing, road: Callable[[Engine], None]
) -> None:
    with pytest.raises(CniError):
        road(engine)
    engine.store.records["c1"] = failing.states[0]
    failing.breaks = False
    engine.verbs = engine.make_verbs()
    nothing_is_made_of_it(engine, failing, ROADS[road])


@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.__name__)
def test_nothing_is_made_of_what_a_failed_del_left(
    engine: Engine, failing: Failing, road: Callable[[Engine], None]
) -> None:
    with pytest.raises(CniError):
        road(engine)
    failing.breaks = False
    nothing_is_made_of_it(engine, failing, ROADS[road])


def nothing_is_made_of_it(engine: Engine, failing: Failing, leaving: set[str]) -> None:
    """The interfaces are there still, all of them."""
    core = engine.verbs.engine
    record = core.records.find(C1, search=False)
    assert record is not None
    assert {item.ifname for item in announced(record)} == ALL - leaving
    shown = publish.entries(core.device_files, publish.shown(record))
    assert {entry["interface"] for entry in shown} == ALL - leaving
    if "eth0" in leaving:
        with pytest.raises(UnknownContainerError):
            engine.verbs.check(engine.request("CHECK"))
    else:
        [pod] = engine.cluster.pods.values()
        publish.after_change(core, C1, pod)
        entries = network_status.parse(engine.cluster.statuses["web/p1"])
        assert {entry["interface"] for entry in entries} == ALL - leaving
    with pytest.raises(UnknownContainerError):
        engine.verbs.check_network(engine.plug("CHECK", ifname="net2", network="n2"))
    failing.calls.clear()
    # The stored result is not returned for what is not there any more.
    engine.verbs.add_network(engine.plug(ifname="net2", network="n2"))
    assert failing.order[-1] == ("ADD", "web/n2")
    assert ("DEL", "web/n2") in failing.order
    if "eth0" in leaving:
        # It would be the client's.
        engine.verbs.remove_network(engine.plug("DEL", ifname="net2", network="n2"))
    failing.calls.clear()
    engine.verbs.add(engine.request())
    assert ("ADD", "kube-system/cluster") in failing.order if "eth0" in leaving else not failing.order


@pytest.mark.parametrize("plugin_fails", [True, False])
def test_the_undo_of_an_add_marks_it(
    engine: Engine, failing: Failing, plugin_fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise StatusWriteError("no")

    failing.breaks = False
    engine.verbs.delete(engine.request("DEL"))
    failing.breaks, failing.marked = True, []
    if plugin_fails:
        failing.fail["ADD", "web/n2"] = CniError("no")
    else:
        # All is on record by then.
        engine.verbs = engine.make_verbs("required")
        monkeypatch.setattr(engine.cluster, "write_network_status", refuse)
    with pytest.raises(CniError):
        engine.verbs.add(engine.request())
    assert failing.marked == [ALL] * 3
    assert not engine.store.records["c1"].complete


def test_the_undo_of_a_hot_plug_marks_it(engine: Engine, failing: Failing) -> None:
    failing.fail["ADD", "web/hot"] = CniError("no")
    with pytest.raises(CniError):
        plugged(engine)
    assert failing.marked == [{"net5"}]
    assert engine.store.records["c1"].complete


def test_a_hot_plugged_network_that_leaves_with_the_pod_does_not_stay(engine: Engine, failing: Failing) -> None:
    plugged(engine)
    with pytest.raises(CniError):
        runtime(engine)
    failing.breaks = False
    engine.links.namespaces[NETNS] = {"lo"}
    engine.verbs.add(engine.request())
    assert {item.ifname for item in engine.store.records["c1"].attachments} == ALL
    assert ("DEL", "web/hot") in failing.order


def test_a_network_of_delegate_that_leaves_is_detached_by_the_annotation_and_comes_anew(
    engine: Engine, failing: Failing
) -> None:
    plugged(engine)
    with pytest.raises(CniError):
        engine.verbs.remove_network(engine.plug("DEL"))
    failing.breaks = False
    failing.calls.clear()
    follow(engine, "n1,n2")
    assert failing.order == [("DEL", "web/hot")]
    assert {item.ifname for item in engine.store.records["c1"].attachments} == ALL


def test_another_daemons_record_is_ours_once_its_del_begins(engine: Engine, failing: Failing) -> None:
    engine.store.left["c1"] = engine.store.records.pop("c1")
    engine.store.listed.add("c1")
    with pytest.raises(CniError):
        runtime(engine)
    assert failing.marked == [ALL] * 3


# --- results that cannot be removed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_same", [True, False])
def test_a_result_that_is_left_stays_on_record_when_an_add_follows(
    engine: Engine, failing: Failing, is_same: bool
) -> None:
    failing.breaks = False
    failing.fail["DEL", "web/n2"] = ResultLeftError("no disk")
    engine.links.namespaces[NETNS] = {"lo"}
    engine.declare("n1,n2" if is_same else "n1")
    engine.verbs.add(engine.request())
    attachments = engine.store.records["c1"].attachments
    left = [item.name for item in attachments if item.detached]
    # The new result has its name.
    assert left == ([] if is_same else ["web/n2"])
    assert engine.store.records["c1"].complete
    failing.fail.clear()
    engine.verbs.add(engine.request())
    engine.verbs.check(engine.request("CHECK"))
    engine.verbs.delete(engine.request("DEL"))
    assert "c1" not in engine.store.records
    assert failing.order.count(("DEL", "web/n2")) == 2


def test_the_left_result_of_the_cluster_network_does_not_pass_for_it(engine: Engine, failing: Failing) -> None:
    failing.breaks = False
    failing.fail["DEL", "kube-system/cluster"] = ResultLeftError("no disk")
    engine.links.namespaces[NETNS] = {"lo"}
    engine.overlay["clusterNetwork"] = "second"
    engine.cluster.put_network(definition("kube-system", "second"))
    engine.declare()
    engine.verbs = engine.make_verbs()
    engine.interface("eth0", "kube-system/second", "10.2.0.3/24")
    assert engine.verbs.add(engine.request()).ips[0].address == "10.2.0.3/24"
    assert engine.verbs.add(engine.request()).ips[0].address == "10.2.0.3/24"


# --- devices of ResourceClaims ---------------------------------------------------------------------------------------


def claimed(engine: Engine, container: str, *, is_attached: bool = True) -> None:
    """Give the container's net1 a device of the claim `nic`."""
    record = engine.store.records[container]
    device = ClaimedDevice("nic", "uid-nic", "d", "p", "a")
    attachments = tuple(
        replace(item, claimed=device, result=item.result if is_attached else None) if item.ifname == "net1" else item
        for item in record.attachments
    )
    engine.verbs.engine.records.save(replace(record, attachments=attachments))


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("containers", [("c1", "c2"), ("c1", "c2", "c3")])
def test_late_dels_leave_the_devices_of_the_living_container(
    engine: Engine,
    failing: Failing,
    monkeypatch: pytest.MonkeyPatch,
    is_restarted: bool,
    containers: tuple[str, ...],
) -> None:
    claimed(engine, "c1")
    for container in containers[1:]:
        netns = f"/run/netns/{container}"
        engine.links.namespaces[netns] = {"lo"}
        engine.verbs.add(engine.request(container=container, netns=netns))
        claimed(engine, container)
    if is_restarted:
        engine.verbs = engine.make_verbs()
    reports: list[DeviceReport] = []
    monkeypatch.setattr(engine.cluster, "device_status", lambda pod, report: reports.append(report))
    failing.breaks = False
    for container in containers[:-1]:
        engine.verbs.delete(engine.request("DEL", container=container, netns=""))
    assert reports == []
    engine.verbs.delete(engine.request("DEL", container=containers[-1], netns=""))
    assert [report.entries for report in reports] == [()]


def test_devices_go_once_a_del_has_begun(engine: Engine, failing: Failing) -> None:
    claimed(engine, "c1")
    engine.links.namespaces["/run/netns/new"] = {"lo"}
    engine.verbs.add(engine.request(container="c2", netns="/run/netns/new"))
    # Its ADD has not ended.
    claimed(engine, "c2", is_attached=False)
    with pytest.raises(CniError):
        runtime(engine)
    assert engine.cluster.device_reports == {"nic": DeviceReport("nic", "uid-nic", ())}


def test_a_failing_mark_is_forgotten_with_the_record(engine: Engine, failing: Failing) -> None:
    engine.store.no_marks = OSError(5, "Input/output error")
    failing.breaks = False
    runtime(engine)
    engine.store.no_marks = None
    engine.links.namespaces[NETNS] = {"lo"}
    engine.verbs.add(engine.request())
    record = engine.verbs.engine.records.find(C1, search=False)
    assert record is not None
    assert record.complete
    assert json.dumps([item.leaving for item in record.attachments]) == "[false, false, false]"
