"""Pods with IPv6 alone under a real kubelet and containerd: the cluster network and another one have no IPv4."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

import pytest

from tests.e2e.cluster.multus import MultusProcess
from tests.e2e.cluster.real_node import LINKS, PRIMARY, Layout, RealNode
from tests.e2e.cluster.workload import addresses, failures, forget_events, host_local, network, status

pytest_plugins = ["tests.e2e.cluster.fixtures"]

CLUSTER = {
    "cniVersion": "1.0.0",
    "name": "primary",
    "plugins": [
        {"type": "ptp", "ipMasq": True, "ipam": {"type": "host-local", "subnet": "fd88::/64"}},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ],
}


@pytest.fixture
def node(real_node: RealNode) -> Iterator[RealNode]:
    """A node whose cluster network has IPv6 alone, with our daemon."""
    forget_events(real_node)
    real_node.move(Layout(), "10-primary.conflist", CLUSTER)
    daemon = MultusProcess(real_node)
    daemon.install()
    try:
        daemon.start()
        yield real_node
        real_node.remove_pods()
    finally:
        daemon.uninstall()
        real_node.machine.run("sh", "-c", "ip link delete br6 2>/dev/null; true")
        real_node.move(Layout(), "10-primary.conflist", PRIMARY)
    assert real_node.links() == LINKS
    assert addresses(real_node) == []


def test_pods_run_and_reach_each_other(node: RealNode) -> None:
    network(node, "lan", {"type": "bridge", "bridge": "br6", "isGateway": True, "ipam": host_local("fd89::/64")})
    for name in ("p1", "p2"):
        node.pod(name, networks="lan")
    pods = node.wait_running("p1", "p2", timeout=120)
    for pod in pods:
        name = pod["metadata"]["name"]
        entries = status(pod)
        assert [(item["name"], item["interface"]) for item in entries] == [("primary", "eth0"), ("default/lan", "net1")]
        asked = [item["ip"] for item in pod["status"]["podIPs"]]
        assert asked == entries[0]["ips"]
        found = [*asked, *entries[1]["ips"]]
        assert {ipaddress.ip_address(address).version for address in found} == {6}
        inside = [
            item
            for link in node.ip("address", pod=name)
            for item in link["addr_info"]
            if link["ifname"] != "lo" and item["family"] == "inet"
        ]
        assert inside == []
    for number in (0, 1):
        assert node.replies(status(pods[1])[number]["ips"][0], "p1", wait=10) == 1
    node.remove_pods()
    assert failures(node) == []
