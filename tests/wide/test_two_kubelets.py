"""Two real nodes of one cluster: each daemon attaches and reports the pods of its own node, and only these."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests.e2e.cluster.fixtures import started
from tests.e2e.cluster.multus import MultusProcess
from tests.e2e.cluster.real_node import SECOND, RealNode
from tests.e2e.cluster.workload import leftovers, network, status, two_networks
from tests.programs import given, needed

pytest_plugins = ["tests.e2e.cluster.fixtures"]

LAN = "lan0"
"""The link that joins the nodes, on both."""

POOLS = "whereabouts.cni.cncf.io"
"""API group of what whereabouts keeps."""


@pytest.fixture(scope="module")
def nodes(pytestconfig: pytest.Config) -> Iterator[list[RealNode]]:
    with started(pytestconfig) as first, started(pytestconfig, beside=first, **SECOND) as second:
        ends = ["netns", first.machine.netns, "type", "veth", "peer", "name", LAN, "netns", second.machine.netns]
        subprocess.run([needed("ip"), "link", "add", LAN, *ends], check=True)
        for node in (first, second):
            node.machine.run("ip", "link", "set", LAN, "up")
        yield [first, second]


@pytest.fixture
def daemons(nodes: list[RealNode]) -> Iterator[list[MultusProcess]]:
    """One on each node, serving; the cluster has the networks `blue`, `green` and `lan`."""
    made = [MultusProcess(node) for node in nodes]
    for daemon in made:
        daemon.install()
        daemon.start()
    two_networks(nodes[0])
    macvlan = {"type": "macvlan", "master": LAN, "capabilities": {"ips": True}, "ipam": {"type": "static"}}
    network(nodes[0], "lan", macvlan)
    yield made
    for daemon in made:
        daemon.node.remove_pods()
        daemon.uninstall()


def pod(node: RealNode, name: str, address: str) -> None:
    """A pod of this node with `blue`, `green` and an address in `lan`."""
    networks = [{"name": "blue"}, {"name": "green", "interface": "fast"}, {"name": "lan", "ips": [f"{address}/24"]}]
    node.pod(name, networks=json.dumps(networks), nodeName=node.name)


def left(daemon: MultusProcess) -> list[str]:
    return [name for name in leftovers(daemon.node) if name != LAN]


def test_pods_of_two_nodes_have_their_own_status_and_nothing_is_left_on_either(daemons: list[MultusProcess]) -> None:
    addresses = {"p1": "10.93.0.1", "p2": "10.93.0.2"}
    nodes = dict(zip(addresses, (daemon.node for daemon in daemons), strict=True))
    for name, node in nodes.items():
        pod(node, name, addresses[name])
    for name, node in nodes.items():
        (running,) = node.wait_running(name)
        assert running["spec"]["nodeName"] == node.name
        assert running["status"]["hostIP"] == node.machine.address
        entries = status(running)
        assert [entry["name"] for entry in entries] == ["primary", "default/blue", "default/green", "default/lan"]
        assert [entry["interface"] for entry in entries] == ["eth0", "net1", "fast", "net3"]
        for entry in entries:
            (link,) = node.ip("address", "show", entry["interface"], pod=name)
            assert entry["ips"] == [item["local"] for item in link["addr_info"] if item["family"] == "inet"]
            assert entry["mac"] == link["address"]
        assert entries[-1]["ips"] == [addresses[name]]
    assert nodes["p1"].replies(addresses["p2"], "p1", device="net3") == 1
    assert nodes["p2"].replies(addresses["p1"], "p2", device="net3") == 1
    for name, node in nodes.items():
        node.delete_pod(name)
    assert [left(daemon) for daemon in daemons] == [[], []]


def test_a_daemon_that_is_away_holds_up_its_own_node_only(daemons: list[MultusProcess]) -> None:
    (first, one), (second, two) = ((daemon, daemon.node) for daemon in daemons)
    pod(two, "p2", "10.93.0.2")
    two.wait_running("p2")
    second.kill()
    two.server.delete_pod("p2", "default", grace=1)
    pod(one, "p1", "10.93.0.1")
    one.wait_running("p1")
    one.delete_pod("p1")
    assert left(first) == []
    assert left(second) != []
    second.start()
    two.delete_pod("p2")
    two.wait_until(lambda: left(second) == [], "nothing is left on the second node")


def define(node: RealNode, kind: str) -> None:
    """Define a kind of object of whereabouts."""
    names = {"kind": kind, "listKind": f"{kind}List", "singular": kind.lower(), "plural": f"{kind.lower()}s"}
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": schema}
    node.server.install_crd(
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{names['plural']}.{POOLS}"},
            "spec": {"group": POOLS, "names": names, "scope": "Namespaced", "versions": [version]},
        }
    )


def allocated(node: RealNode) -> list[str]:
    """The pods with an address of whereabouts."""
    pools = node.server.request("GET", f"/apis/{POOLS}/v1alpha1/ippools")["items"]
    return sorted(held["podref"] for pool in pools for held in pool["spec"]["allocations"].values())


def test_whereabouts_gives_each_address_of_a_cluster_once(daemons: list[MultusProcess]) -> None:
    plugin = given("WIDE_WHEREABOUTS")
    second, (one, two) = daemons[1], (daemon.node for daemon in daemons)
    for kind in ("IPPool", "OverlappingRangeIPReservation"):
        define(one, kind)
    # As the installer of whereabouts does.
    settings = json.dumps({"kubernetes": {"kubeconfig": str(one.server.admin_kubeconfig)}})
    for node in (one, two):
        node.machine.run("install", "-m", "0755", str(plugin), "/opt/cni/bin/whereabouts")
        node.machine.run("mkdir", "-p", "/etc/cni/net.d/whereabouts.d")
        node.machine.path("/etc/cni/net.d/whereabouts.d/whereabouts.conf").write_text(settings)
    ipam = {"type": "whereabouts", "range": "10.95.0.0/28"}
    network(one, "pool", {"type": "macvlan", "master": LAN, "ipam": ipam})
    pods = {f"p{number}": node for number, node in enumerate((one, two) * 3)}
    for name, node in pods.items():
        node.pod(name, networks="pool", nodeName=node.name)
    addresses = {name: status(pod)[1]["ips"] for name, pod in zip(pods, one.wait_running(*pods), strict=True)}
    assert len({address for (address,) in addresses.values()}) == len(pods)
    assert allocated(one) == [f"default/{name}" for name in pods]
    (other,) = addresses["p1"]
    assert one.replies(other, "p0", device="net1") == 1
    second.kill()
    one.remove_pods()
    two.wait_until(lambda: not two.containerd.sandboxes(), "the sandboxes are gone")
    assert allocated(one) == ["default/p1", "default/p3", "default/p5"]
    second.start()
    two.wait_until(lambda: allocated(one) + left(second) == [], "nothing is left")
    assert left(daemons[0]) == []
