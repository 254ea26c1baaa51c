"""From upstream's v4.3 thick daemon to our DaemonSet on a real node, pods running."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.build_tools import ToolError
from tests.e2e.cluster.multus import GENERATED, MultusPod, UpstreamProcess
from tests.e2e.cluster.real_node import RealNode
from tests.e2e.cluster.workload import addresses, failures, status, two_networks, wait_clean

pytest_plugins = ["tests.e2e.cluster.fixtures"]

ATTACHED = ["p0", "p1", "p2"]
ALONE = "p3"


@pytest.fixture
def upstream(multus_pod: MultusPod) -> Iterator[UpstreamProcess]:
    """Upstream's daemon, serving; ours is not started."""
    try:
        made = UpstreamProcess(multus_pod.node)
    except ToolError as error:
        pytest.skip(str(error))
    made.install()
    made.start()
    yield made
    multus_pod.node.remove_pods()
    made.uninstall()


def state(node: RealNode, pod: str) -> tuple[str, Any, Any]:
    """Everything that another attachment would change."""
    links = [
        # The addresses of IPv6 are found by the kernel in its own time.
        (link["ifname"], link["address"], [item["local"] for item in link["addr_info"] if item["family"] == "inet"])
        for link in node.ip("address", pod=pod)
    ]
    return node.containerd.sandboxes(pod)[-1].identifier, links, node.ip("-4", "route", pod=pod)


def test_live_pods_stay_and_are_deleted_new_ones_work(upstream: UpstreamProcess, multus_pod: MultusPod) -> None:
    node = upstream.node
    two_networks(node)
    for name in ATTACHED:
        node.pod(name, networks="blue,green@fast")
    node.pod(ALONE)
    pods = [*ATTACHED, ALONE]
    node.wait_running(*pods)
    assert node.links("p0") == ["eth0", "fast", "lo", "net1"]
    before = {name: state(node, name) for name in pods}
    given = addresses(node)
    assert len(given) == 3 * len(ATTACHED) + 1

    multus_pod.apply()
    upstream.stop()
    multus_pod.wait_rolled_out()
    multus_pod.wait_ready()
    assert {name: state(node, name) for name in pods} == before
    assert addresses(node) == given
    assert node.replies("10.91.0.1", "p0") == 1
    assert node.machine.path(GENERATED).exists()

    node.pod("new", networks="blue,green@fast")
    (new,) = node.wait_running("new")
    assert node.links("new") == ["eth0", "fast", "lo", "net1"]
    assert [entry["name"] for entry in status(new)] == ["primary", "default/blue", "default/green"]
    assert node.replies("10.91.0.1", "new") == 1

    node.remove_pods()
    wait_clean(node)
    assert failures(node) == []
