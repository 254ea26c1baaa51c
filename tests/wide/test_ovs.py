"""Networks of ovs-cni, with a real ovsdb-server and ovs-vswitchd, which forwards in user space."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import pytest

from tests.e2e.cluster.multus import MultusProcess
from tests.e2e.cluster.real_node import LINKS, RealNode
from tests.e2e.cluster.workload import addresses, host_local, leftovers, network, status
from tests.programs import given, require

RUNS: Final = ("ovs-cni", "Open vSwitch")
pytest_plugins = ["tests.e2e.cluster.fixtures"]

BRIDGE = "br-ovs"
DATABASE = "/run/openvswitch/db.sock"
MAC = "0a:58:0a:5e:00:07"


def ports(node: RealNode) -> list[str]:
    """The links that ovsdb knows as ports of the bridge."""
    return node.machine.run("ovs-vsctl", "list-ports", BRIDGE).split()


def left(node: RealNode) -> list[str]:
    return [*ports(node), *(name for name in leftovers(node) if name not in (BRIDGE, "ovs-netdev"))]


@pytest.fixture
def ovs(real_node: RealNode) -> Iterator[RealNode]:
    """A node with Open vSwitch and ovs-cni."""
    plugin = given("WIDE_OVS_CNI")
    require("ovs-vswitchd")
    machine = real_node.machine
    machine.run("install", "-m", "0755", str(plugin), "/opt/cni/bin/ovs")
    machine.run("mkdir", "-p", "/run/openvswitch", "/etc/openvswitch")
    machine.run("ovsdb-tool", "create", "/run/openvswitch/conf.db", "/usr/share/openvswitch/vswitch.ovsschema")
    started = [machine.start("ovsdb", "ovsdb-server", f"--remote=punix:{DATABASE}", "/run/openvswitch/conf.db")]
    real_node.wait_until(machine.path(DATABASE).exists, "ovsdb-server listens")
    machine.run("ovs-vsctl", "--no-wait", "init")
    started.append(machine.start("ovs-vswitchd", "ovs-vswitchd", f"unix:{DATABASE}"))
    # The kernel need not have the module.
    machine.run("ovs-vsctl", "add-br", BRIDGE, "--", "set", "bridge", BRIDGE, "datapath_type=netdev")
    yield real_node
    machine.run("ovs-vsctl", "del-br", BRIDGE)
    for process in reversed(started):
        process.stop()
    machine.run("rm", "-rf", "/run/openvswitch", "/opt/cni/bin/ovs")
    assert real_node.links() == LINKS


@pytest.fixture
def multus(ovs: RealNode) -> Iterator[MultusProcess]:
    """The daemon, serving; the cluster has the network `tagged`."""
    made = MultusProcess(ovs)
    made.install()
    made.start()
    plugin = {"type": "ovs", "bridge": BRIDGE, "vlan": 100, "socket_file": f"unix:{DATABASE}"}
    network(ovs, "tagged", {**plugin, "ipam": host_local("10.94.0.0/24")})
    yield made
    ovs.remove_pods()
    made.uninstall()


def test_pods_are_ports_of_the_bridge_until_they_are_deleted(multus: MultusProcess) -> None:
    node = multus.node
    node.pod("p1", networks=json.dumps([{"name": "tagged", "mac": MAC}]))
    node.pod("p2", networks="tagged@fast")
    entries = [status(pod)[1] for pod in node.wait_running("p1", "p2")]
    assert [(entry["name"], entry["interface"]) for entry in entries] == [
        ("default/tagged", "net1"),
        ("default/tagged", "fast"),
    ]
    for name, entry in zip(("p1", "p2"), entries, strict=True):
        (link,) = node.ip("address", "show", entry["interface"], pod=name)
        assert entry["ips"] == [item["local"] for item in link["addr_info"] if item["family"] == "inet"]
        assert entry["mac"] == link["address"]
    assert entries[0]["mac"] == MAC
    known = ports(node)
    assert len(known) == 2
    assert {node.machine.run("ovs-vsctl", "get", "port", port, "tag").strip() for port in known} == {"100"}
    (other,) = entries[1]["ips"]
    assert node.replies(other, "p1", wait=5, device="net1") == 1
    node.delete_pod("p1")
    assert len(ports(node)) == 1
    node.delete_pod("p2")
    assert left(node) == []


def test_a_pod_deleted_while_the_daemon_was_away_is_no_port_any_more(multus: MultusProcess) -> None:
    node = multus.node
    node.pod("p1", networks="tagged")
    node.wait_running("p1")
    multus.kill()
    node.remove_pods()
    assert addresses(node)
    assert ports(node)
    multus.start()
    node.wait_until(lambda: left(node) == [], "nothing is left")
