"""CRI-O's way to call plugins: ocicni, the library that it has for this, by the tool of its source tree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster.multus import MultusProcess
from tests.e2e.cluster.real_node import LINKS, RealNode
from tests.e2e.cluster.workload import BRIDGE, leftovers, status, two_networks
from tests.programs import given

pytest_plugins = ["tests.e2e.cluster.fixtures"]

NETNS = "/run/netns/p1"


@pytest.fixture
def ocicni() -> Path:
    return given("WIDE_OCICNI")


@pytest.fixture
def node(ocicni: Path, real_node: RealNode) -> Iterator[RealNode]:
    """A node with our daemon, and a namespace; the pod `p1` of two networks is no kubelet's."""
    daemon = MultusProcess(real_node)
    daemon.install()
    daemon.start()
    two_networks(real_node)
    real_node.pod("p1", networks="blue,green@fast", schedulingGates=[{"name": "example.com/never"}])
    real_node.machine.run("ip", "netns", "add", "p1")
    yield real_node
    real_node.machine.run("sh", "-c", f"ip netns delete p1; ip link delete {BRIDGE}; true")
    real_node.server.delete_pod("p1", "default", grace=0)
    daemon.uninstall()
    assert real_node.links() == LINKS


def test_a_pod_is_added_asked_for_and_deleted(node: RealNode, ocicni: Path) -> None:
    def call(verb: str) -> str:
        return node.machine.run(str(ocicni), verb, "default", "p1", "c1", NETNS)

    added = call("add")
    entries = status(node.server.get("v1", "Pod", "p1"))
    assert [(entry["name"], entry["interface"]) for entry in entries] == [
        ("primary", "eth0"),
        ("default/blue", "net1"),
        ("default/green", "fast"),
    ]
    # CRI-O knows only the cluster network.
    assert added.splitlines() == [f"IP: {entries[0]['ips'][0]}/16 (eth0 {entries[0]['mac']})"]
    assert call("status") == added
    for _ in range(2):
        # The kubelet asks CRI-O until it has heard that it is done.
        call("del")
    assert leftovers(node) == []


def test_a_namespace_that_has_gone_is_deleted(node: RealNode, ocicni: Path) -> None:
    node.machine.run(str(ocicni), "add", "default", "p1", "c1", NETNS)
    node.machine.run("ip", "netns", "delete", "p1")
    node.machine.run(str(ocicni), "del", "default", "p1", "c1", NETNS)
    assert leftovers(node) == []
