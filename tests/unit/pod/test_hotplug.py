"""Hot-plug: one network of a container that runs."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial

import pytest

from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import (
    CniError,
    InvalidNetnsError,
    InvalidNetworkConfigError,
    TryAgainLaterError,
    UnknownContainerError,
)
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Interface, IpConfig, Result
from tests.aside import together
from tests.unit.pod.conftest import MORE, NETNS, Engine

HOT = "web/hot"


def names(engine: Engine) -> list[tuple[str, str, bool]]:
    return [(item.name, item.ifname, item.hot_plugged) for item in engine.store.records["c1"].attachments]


def running(engine: Engine, networks: str = "n1") -> None:
    """The pod runs, with interfaces that the kernel has."""
    engine.declare(networks)
    engine.interface("eth0", "kube-system/cluster", "10.0.0.2/24")
    engine.interface("net1", "web/n1", "10.1.0.2/24")
    engine.interface("net5", HOT, "10.5.0.2/24")
    engine.verbs.add(engine.request())
    engine.links.namespaces[NETNS] |= {item.ifname for item in engine.store.records["c1"].attachments}
    engine.runner.calls.clear()
    engine.cluster.events.clear()


def plugged(engine: Engine) -> None:
    running(engine)
    engine.verbs.add_network(engine.plug())
    engine.links.namespaces[NETNS].add("net5")
    engine.runner.calls.clear()
    engine.cluster.events.clear()


# --- ADD -------------------------------------------------------------------------------------------------------------


def test_a_network_is_plugged_in_and_on_record(engine: Engine) -> None:
    running(engine)
    statuses = dict(engine.cluster.statuses)
    made = engine.verbs.add_network(engine.plug())
    assert made == engine.runner.results[HOT]
    assert engine.runner.order == [("ADD", HOT)]
    assert names(engine) == [("kube-system/cluster", "eth0", False), ("web/n1", "net1", False), (HOT, "net5", True)]
    assert engine.store.records["c1"].complete
    assert engine.store.records["c1"].attachments[2].result == made
    assert engine.cluster.events == [("web/p1", "Normal", "AddedInterface", "Add net5 [10.5.0.2/24] from web/hot")]
    # The client writes it.
    assert engine.cluster.statuses == statuses


@pytest.mark.weak_spot(15)
def test_nothing_of_the_daemons_configuration_gets_into_the_networks(engine: Engine) -> None:
    engine.overlay |= {"cniVersion": "0.3.1", "chrootDir": "/hostroot", "logLevel": "debug", "name": "daemon"}
    running(engine)
    raw = '{ "cniVersion":"1.0.0", "name" : "hot", "plugins":[{"type":"a"},{"type":"b"}] }'
    engine.verbs.add_network(engine.plug(config=raw))
    config = engine.runner.calls[0].attachment.config
    assert config.raw == raw.encode()
    assert (config.cni_version, config.is_list, config.type) == ("1.0.0", True, "a")


@pytest.mark.weak_spot(20)
def test_what_is_asked_for_reaches_the_plugin(engine: Engine) -> None:
    running(engine)
    engine.verbs.add_network(engine.plug(ips=("10.9.0.2/24",), mac="02:00:00:00:00:09", cni_args={"a": 1}))
    attachment = engine.runner.calls[0].attachment
    assert attachment.capability_args == {"ips": ["10.9.0.2/24"], "mac": "02:00:00:00:00:09"}
    assert json.loads(attachment.config.raw)["args"] == {"cni": {"a": 1}}
    pairs = dict(attachment.cni_args)
    assert pairs == {
        "IgnoreUnknown": "true",
        "K8S_POD_NAMESPACE": "web",
        "K8S_POD_NAME": "p1",
        "K8S_POD_INFRA_CONTAINER_ID": "c1",
        "K8S_POD_UID": "u1",
        "MAC": "02:00:00:00:00:09",
        "IP": "10.9.0.2/24",
    }


def test_a_repeated_add_returns_the_stored_result_and_asks_nobody(engine: Engine) -> None:
    plugged(engine)
    engine.cluster.pods.clear()
    calls = len(engine.cluster.calls)
    assert engine.verbs.add_network(engine.plug()) == engine.runner.results[HOT]
    assert engine.runner.calls == []
    assert len(engine.cluster.calls) == calls


def test_the_pods_own_network_counts_as_attached_too(engine: Engine) -> None:
    running(engine)
    result = engine.verbs.add_network(engine.plug(network="n1", ifname="net1"))
    assert result == engine.runner.results["web/n1"]
    assert engine.runner.calls == []


def test_an_interface_of_another_network_is_refused_and_not_touched(engine: Engine) -> None:
    running(engine)
    with pytest.raises(
        InvalidNetworkConfigError, match="^interface 'net1' of network web/hot belongs to network web/n1"
    ):
        engine.verbs.add_network(engine.plug(ifname="net1"))
    assert engine.runner.calls == []
    # The hot-plug controller takes back what failed.
    engine.verbs.remove_network(engine.plug("DEL", ifname="net1"))
    assert engine.runner.calls == []
    assert names(engine) == [("kube-system/cluster", "eth0", False), ("web/n1", "net1", False)]


def test_an_interface_that_is_not_ours_is_refused_and_not_touched(engine: Engine) -> None:
    running(engine)
    engine.links.namespaces[NETNS].add("net5")
    with pytest.raises(InvalidNetworkConfigError, match="^interface 'net5' of network web/hot already exists"):
        engine.verbs.add_network(engine.plug())
    engine.verbs.remove_network(engine.plug("DEL"))
    assert engine.runner.calls == []


def test_a_lost_interface_is_undone_and_plugged_in_again(engine: Engine) -> None:
    plugged(engine)
    engine.links.namespaces[NETNS].remove("net5")
    engine.verbs.add_network(engine.plug())
    assert engine.runner.order == [("DEL", HOT), ("ADD", HOT)]
    assert len(names(engine)) == 3


@pytest.mark.parametrize("network", ["hot", "another"])
def test_what_a_crash_cut_off_is_undone_first(engine: Engine, network: str) -> None:
    plugged(engine)
    record = engine.store.records["c1"]
    cut_off = record.attachments[-1].with_result(None)
    engine.store.records["c1"] = replace(record, attachments=(*record.attachments[:-1], cut_off))
    engine.links.namespaces[NETNS].remove("net5")
    engine.verbs.check(engine.request("CHECK"))
    assert ("CHECK", HOT) not in engine.runner.order
    engine.runner.calls.clear()
    engine.verbs.add_network(engine.plug(network=network))
    assert engine.runner.order == [("DEL", HOT), ("ADD", f"web/{network}")]
    assert len(names(engine)) == 3


def test_a_failure_leaves_the_record_as_it_was(engine: Engine) -> None:
    running(engine)
    before = engine.store.records["c1"]
    engine.runner.fail["ADD", HOT] = CniError("no address left", code=101)
    with pytest.raises(CniError, match="^no address left .*web/p1") as caught:
        engine.verbs.add_network(engine.plug())
    assert caught.value.code == 101
    assert engine.runner.order == [("ADD", HOT), ("DEL", HOT)]
    assert engine.store.records["c1"] == before
    assert engine.warnings == [("FailedAddingInterface", f"no address left (pod web/p1){MORE}")]


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"netns": "/gone"}, InvalidNetnsError, "^/gone is no network namespace"),
        ({"uid": "u9"}, TryAgainLaterError, "^pod web/p1 has UID u1.*u9"),
        ({"config": '{"name": "hot"}'}, InvalidNetworkConfigError, "neither 'type' nor 'plugins'"),
        ({"network": "cluster", "ifname": "eth0"}, InvalidNetworkConfigError, "is the cluster network"),
    ],
)
def test_refusals(engine: Engine, change: dict[str, str], kind: type[CniError], words: str) -> None:
    running(engine)
    engine.links.namespaces[NETNS].discard("eth0")
    before = engine.store.records["c1"]
    with pytest.raises(kind, match=words):
        engine.verbs.add_network(engine.plug(**change))
    assert engine.runner.calls == []
    assert engine.store.records["c1"] == before


@pytest.mark.npwg("7.3")
def test_a_container_has_one_request_at_a_time(engine: Engine) -> None:
    running(engine)
    engine.runner.pause = 0.01
    together(
        partial(engine.verbs.add_network, engine.plug()),
        partial(engine.verbs.add_network, engine.plug(network="other", ifname="net6")),
        partial(engine.verbs.check, engine.request("CHECK")),
    )
    assert engine.runner.most_at_once == 1


# --- no interface name -----------------------------------------------------------------------------------------------


def test_without_a_name_the_next_free_one(engine: Engine) -> None:
    """Upstream passes the empty name on, and the plugin fails."""
    running(engine)
    engine.links.namespaces[NETNS] |= {"net2", "net3"}
    engine.verbs.add_network(engine.plug(ifname=""))
    assert names(engine)[2] == (HOT, "net4", True)


def test_without_a_name_a_network_is_attached_once(engine: Engine) -> None:
    """The controller would take the first interface away in turn, at each restart of its own."""
    plugged(engine)
    with pytest.raises(InvalidNetworkConfigError, match="^network hot is attached as 'net5' already"):
        engine.verbs.add_network(engine.plug(ifname=""))
    engine.verbs.remove_network(engine.plug("DEL", ifname=""))
    assert engine.runner.calls == []
    assert names(engine)[2] == (HOT, "net5", True)


def test_names_come_to_an_end(engine: Engine) -> None:
    running(engine)
    engine.links.namespaces[NETNS] |= {f"net{number}" for number in range(1, 300)}
    with pytest.raises(InvalidNetworkConfigError, match="^no interface name is free"):
        engine.verbs.add_network(engine.plug(ifname=""))


# --- DEL -------------------------------------------------------------------------------------------------------------


@pytest.mark.weak_spot(15)
def test_del_goes_by_the_record_and_asks_nobody(engine: Engine) -> None:
    plugged(engine)
    stored = engine.store.records["c1"].attachments[2]
    engine.cluster.pods.clear()
    calls = len(engine.cluster.calls)
    # The NAD has been edited since, badly.
    engine.verbs.remove_network(engine.plug("DEL", config='{"name": "hot", "plugins": 7}'))
    assert [(call.verb, call.attachment) for call in engine.runner.calls] == [("DEL", replace(stored, leaving=True))]
    assert len(engine.cluster.calls) == calls
    assert names(engine) == [("kube-system/cluster", "eth0", False), ("web/n1", "net1", False)]
    assert engine.store.records["c1"].complete


def test_del_of_one_of_the_pods_own_networks(engine: Engine) -> None:
    running(engine)
    engine.verbs.remove_network(engine.plug("DEL", network="n1", ifname="net1"))
    assert engine.runner.order == [("DEL", "web/n1")]
    assert names(engine) == [("kube-system/cluster", "eth0", False)]
    # A repeated ADD of the runtime has nothing to repair.
    engine.verbs.add(engine.request())
    assert engine.runner.order == [("DEL", "web/n1")]


def test_the_cluster_network_stays(engine: Engine) -> None:
    running(engine)
    with pytest.raises(InvalidNetworkConfigError, match="is the cluster network of pod web/p1"):
        engine.verbs.remove_network(engine.plug("DEL", network="cluster", ifname="eth0"))
    assert engine.runner.calls == []


@pytest.mark.parametrize("container", ["c1", "never-seen"])
@pytest.mark.parametrize("ifname", ["net5", "eth0", "net1"])
def test_del_of_what_is_not_on_record_touches_nothing(
    engine: Engine, container: str, ifname: str, caplog: pytest.LogCaptureFixture
) -> None:
    """For an unknown container with the namespace of a pod, DEL once removed that pod's interface."""
    caplog.set_level(logging.DEBUG)
    running(engine)
    engine.links.namespaces[NETNS].add("net5")
    before = engine.store.records["c1"]
    config = json.dumps({"cniVersion": "0.4.0", "name": "hot", "type": "fake", "password": "geheim"})
    engine.verbs.remove_network(engine.plug("DEL", container=container, ifname=ifname, config=config))
    assert engine.runner.calls == []
    assert engine.store.records == {"c1": before}
    said = f"DEL of network hot of pod web/p1: container {container} has no such network on {ifname}"
    assert said in caplog.text
    assert "geheim" not in caplog.text


# --- CHECK -----------------------------------------------------------------------------------------------------------


def test_check_has_the_stored_result(engine: Engine) -> None:
    plugged(engine)
    engine.overlay["strictCheck"] = True
    engine.verbs.check_network(engine.plug("CHECK"))
    [call] = engine.runner.calls
    assert (call.verb, call.attachment.result) == ("CHECK", engine.runner.results[HOT])


@pytest.mark.parametrize("change", [{"ifname": "net6"}, {"network": "other"}, {"container": "c2"}, {"ifname": ""}])
def test_check_of_what_is_not_attached_is_code_3(engine: Engine, change: dict[str, str]) -> None:
    plugged(engine)
    with pytest.raises(UnknownContainerError, match="is not attached as"):
        engine.verbs.check_network(engine.plug("CHECK", **change))


# --- the pod's own verbs ---------------------------------------------------------------------------------------------


def test_the_pods_del_takes_it_out_and_check_checks_it(engine: Engine) -> None:
    plugged(engine)
    engine.overlay["strictCheck"] = True
    engine.verbs.check(engine.request("CHECK"))
    assert engine.runner.order[-1] == ("CHECK", HOT)
    engine.runner.calls.clear()
    engine.verbs.delete(engine.request("DEL"))
    assert engine.runner.order == [("DEL", HOT), ("DEL", "web/n1"), ("DEL", "kube-system/cluster")]
    assert engine.store.records == {}


def test_a_repeated_add_of_the_runtime_does_not_look_at_it(engine: Engine) -> None:
    plugged(engine)
    engine.links.namespaces[NETNS].remove("net5")
    assert engine.verbs.add(engine.request()) == engine.runner.results["kube-system/cluster"]
    assert engine.runner.calls == []


@pytest.mark.npwg("5.1")
def test_an_add_that_starts_afresh_leaves_it_in_and_tells_of_it(engine: Engine) -> None:
    plugged(engine)
    engine.links.namespaces[NETNS] -= {"eth0", "net1"}
    engine.verbs.add(engine.request())
    assert engine.runner.order == [
        ("DEL", "web/n1"),
        ("DEL", "kube-system/cluster"),
        ("ADD", "kube-system/cluster"),
        ("ADD", "web/n1"),
    ]
    assert engine.store.records["c1"].complete
    entries = json.loads(engine.cluster.statuses["web/p1"])
    assert [(item["name"], item["interface"]) for item in entries] == [
        ("kube-system/cluster", "eth0"),
        ("web/n1", "net1"),
        (HOT, "net5"),
    ]
    assert len(engine.cluster.events) == 2


def test_an_add_in_another_namespace_takes_it_out(engine: Engine) -> None:
    plugged(engine)
    engine.links.namespaces["/run/netns/new"] = {"lo"}
    engine.verbs.add(engine.request(netns="/run/netns/new"))
    assert ("DEL", HOT) in engine.runner.order
    assert [item.name for item in engine.store.records["c1"].attachments] == ["kube-system/cluster", "web/n1"]


# --- unknown containers ----------------------------------------------------------------------------------------------


def test_a_container_never_seen_gets_a_record_of_its_own(engine: Engine) -> None:
    engine.interface("net5", HOT, "10.5.0.2/24")
    engine.verbs.add_network(engine.plug())
    record = engine.store.records["c1"]
    assert names(engine) == [(HOT, "net5", True)]
    assert (record.sandbox, record.pod, record.pod_uid, record.created) == (
        Sandbox(ContainerId("c1"), NETNS),
        "web/p1",
        "u1",
        1000.0,
    )
    assert not record.complete
    engine.verbs.check_network(engine.plug("CHECK"))
    # To the runtime its container is as unknown as before.
    with pytest.raises(UnknownContainerError):
        engine.verbs.check(engine.request("CHECK"))
    engine.verbs.delete(engine.request("DEL"))
    assert engine.runner.order[-1] == ("DEL", HOT)
    assert engine.store.records == {}


def test_the_last_one_taken_out_leaves_no_record(engine: Engine) -> None:
    engine.verbs.add_network(engine.plug())
    engine.verbs.remove_network(engine.plug("DEL"))
    assert engine.store.records == {}


def test_a_failed_add_to_a_container_never_seen_leaves_no_record(engine: Engine) -> None:
    engine.runner.fail["ADD", HOT] = CniError("no")
    with pytest.raises(CniError):
        engine.verbs.add_network(engine.plug())
    assert engine.store.records == {}


def test_an_add_of_the_runtime_to_a_container_with_plugged_networks_only(engine: Engine) -> None:
    engine.interface("eth0", "kube-system/cluster", "10.0.0.2/24")
    engine.interface("net5", HOT, "10.5.0.2/24")
    engine.verbs.add_network(engine.plug())
    engine.links.namespaces[NETNS].add("net5")
    assert engine.verbs.add(engine.request()) == engine.runner.results["kube-system/cluster"]
    assert engine.runner.order == [("ADD", HOT), ("ADD", "kube-system/cluster")]
    assert names(engine) == [(HOT, "net5", True), ("kube-system/cluster", "eth0", False)]
    assert engine.store.records["c1"].complete
    engine.links.namespaces[NETNS].add("eth0")
    assert engine.verbs.add(engine.request()) == engine.runner.results["kube-system/cluster"]
    assert len(engine.runner.calls) == 2


def test_a_failed_add_of_the_runtime_leaves_what_is_plugged_in(engine: Engine) -> None:
    engine.interface("net5", HOT, "10.5.0.2/24")
    engine.verbs.add_network(engine.plug())
    engine.runner.fail["ADD", "kube-system/cluster"] = CniError("no")
    with pytest.raises(CniError):
        engine.verbs.add(engine.request())
    assert names(engine) == [(HOT, "net5", True)]
    assert not engine.store.records["c1"].complete


def left(*attachments: Attachment, complete: bool = True) -> ContainerRecord:
    return ContainerRecord(
        sandbox=Sandbox(ContainerId("c1"), NETNS),
        ifname=IfName("eth0"),
        pod_namespace=Namespace("web"),
        pod_name=PodName("p1"),
        pod_uid=PodUid("u1"),
        attachments=attachments,
        complete=complete,
    )


def theirs(name: str, ifname: str, *, cluster: bool = False) -> Attachment:
    config = conf.parse(json.dumps({"cniVersion": "1.0.0", "name": name, "type": "fake"}).encode())
    result = Result((Interface(ifname, sandbox=NETNS),), (IpConfig("10.1.0.2/24", interface=0),))
    return Attachment(name, config, IfName(ifname), cluster_network=cluster, result=result)


def test_a_container_of_upstreams_is_taken_over_whole(engine: Engine) -> None:
    engine.store.left["c1"] = left(theirs("cluster", "eth0", cluster=True), theirs("n1", "net1"), complete=False)
    engine.links.namespaces[NETNS] |= {"eth0", "net1"}
    engine.verbs.add_network(engine.plug())
    assert names(engine) == [("cluster", "eth0", False), ("n1", "net1", False), (HOT, "net5", True)]
    record = engine.store.records["c1"]
    assert record.complete
    assert not record.foreign
    # A repeated ADD of the runtime finds it alive, its DEL takes everything.
    assert engine.verbs.add(engine.request()) == record.attachments[0].result
    assert engine.runner.order == [("ADD", HOT)]
    engine.verbs.delete(engine.request("DEL"))
    assert engine.runner.order[1:] == [("DEL", HOT), ("DEL", "n1"), ("DEL", "cluster")]


def test_what_upstream_plugged_in_is_taken_out_by_what_upstream_stored(engine: Engine) -> None:
    engine.store.left["c1"] = left(theirs("cluster", "eth0", cluster=True), theirs("hot", "net5"))
    engine.verbs.remove_network(engine.plug("DEL"))
    [call] = engine.runner.calls
    assert call.attachment == replace(theirs("hot", "net5"), leaving=True)
    assert names(engine) == [("cluster", "eth0", False)]


def test_where_upstreams_cluster_network_is_lost_nothing_passes_for_it(engine: Engine) -> None:
    engine.store.left["c1"] = left(theirs("n1", "net1"), complete=False)
    engine.links.namespaces[NETNS] |= {"eth0", "net1"}
    engine.verbs.add_network(engine.plug())
    assert names(engine) == [("n1", "net1", True), (HOT, "net5", True)]
    # The container's interface is there, so the runtime's ADD changes nothing.
    with pytest.raises(InvalidNetworkConfigError, match="'eth0' of network kube-system/cluster already exists"):
        engine.verbs.add(engine.request())
    assert engine.runner.order == [("ADD", HOT)]
    assert names(engine) == [("n1", "net1", True), (HOT, "net5", True)]
