"""What the records and the pods say about who holds an address of the cluster."""

from __future__ import annotations

import ipaddress

from multus_daemon.node.holders import TAKEN, Holders
from multus_daemon.spec.addresses import Owner, Reservation
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import ContainerId, Namespace, PodName, PodUid
from tests.unit.pod.conftest import Engine


def test_a_container_has_its_address_from_its_record_to_its_del(engine: Engine) -> None:
    engine.declare("n1")
    core = engine.verbs.engine
    holders, owner = Holders(core, lambda pod: None), Owner("c1", "net1", "n1")
    assert holders.has(owner) is False
    engine.verbs.add(engine.request())
    assert holders.has(owner) is True
    assert holders.has(Owner("c1", "net2", "n2")) is False
    engine.store.corrupt.add(ContainerId("c1"))
    assert holders.has(owner) is None
    engine.store.corrupt.clear()
    engine.verbs.delete(engine.request("DEL"))
    assert holders.has(owner) is False


def test_both_pods_are_told_that_they_have_the_same_address(engine: Engine) -> None:
    engine.declare("n1")
    engine.cluster.put_pod(Pod(Namespace("db"), PodName("p2"), PodUid("u2"), {}))
    looked: list[str] = []
    address = ipaddress.ip_address("10.9.0.1")
    mine = Reservation(address, "", "web/p1", Owner("c1", "net1", "n1"), "node-a")
    other = Reservation(address, "", "db/p2", Owner("c2", "net1", "n1"), "node-b")
    Holders(engine.verbs.engine, looked.append).report(mine, other)
    told = {
        pod: message for pod, kind, reason, message in engine.cluster.events if (kind, reason) == ("Warning", TAKEN)
    }
    assert told.keys() == {"web/p1", "db/p2"}
    assert "db/p2 on node node-b" in told["web/p1"]
    assert "web/p1 on node node-a" in told["db/p2"]
    assert looked == ["web/p1"]


def test_a_pod_that_is_gone_hinders_no_report(engine: Engine) -> None:
    engine.declare("n1")
    address = ipaddress.ip_address("10.9.0.1")
    mine = Reservation(address, "", "web/p1", Owner("c1", "net1", "n1"), "node-a")
    Holders(engine.verbs.engine, lambda pod: None).report(mine, Reservation(address, "", "db/p2", mine.owner))
    assert [(pod, reason) for pod, _, reason, _ in engine.cluster.events] == [("web/p1", TAKEN)]
