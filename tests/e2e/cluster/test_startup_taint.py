"""The chart's startup taint on a real node, whose daemon has the rights and the token of its pod."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.e2e.cluster.fixtures import installed
from tests.e2e.cluster.multus import MultusRelease
from tests.e2e.cluster.real_node import RealNode
from tests.e2e.cluster.workload import failures, two_networks, wait_clean

pytest_plugins = ["tests.e2e.cluster.fixtures"]

TAINT: Final = "readiness.k8s.io/multus-not-ready"
OTHER: Final = "example.com/other"


@pytest.fixture
def release(real_node: RealNode) -> Iterator[MultusRelease]:
    """The chart with the startup taint, not installed; the node has the taint, and another that harms nobody."""
    with installed(real_node, MultusRelease) as made:
        made.values = {"startupTaint": {"enabled": True}}
        taints = (f"{TAINT}=pending:NoSchedule", f"{OTHER}:PreferNoSchedule")
        real_node.kubectl("taint", "node", real_node.name, "--overwrite", *taints)
        yield made
        for key in keys(real_node):
            real_node.kubectl("taint", "node", real_node.name, f"{key}-")


def keys(node: RealNode) -> list[str]:
    return [item["key"] for item in node.server.get("v1", "Node", node.name)["spec"].get("taints", [])]


def test_a_pod_waits_for_the_daemon_of_a_new_node(release: MultusRelease) -> None:
    node = release.node
    release.apply()
    two_networks(node)
    node.pod("early", networks="blue,green@fast")
    release.wait_rolled_out()
    node.wait_running("early")
    assert node.links("early") == ["eth0", "fast", "lo", "net1"]
    assert keys(node) == [OTHER]
    node.remove_pods()
    wait_clean(node)
    assert failures(node) == []
