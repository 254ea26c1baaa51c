"""A new node: the DaemonSet is there before the primary network."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial

import pytest

from tests.e2e.cluster import containerd
from tests.e2e.cluster.multus import GENERATED, MultusPod
from tests.e2e.cluster.real_node import NAME, PRIMARY, RealNode
from tests.e2e.cluster.runtime import NetworkWatch
from tests.e2e.cluster.workload import failures, leftovers, two_networks

pytest_plugins = ["tests.e2e.cluster.fixtures"]

FILE = "10-primary.conflist"
ROUNDS = 2


@pytest.fixture
def without_primary(multus_pod: MultusPod) -> Iterator[MultusPod]:
    """The DaemonSet's image is there, the node has no network."""
    node = multus_pod.node
    take_away(node)
    yield multus_pod
    node.primary(FILE, PRIMARY)
    node.wait_ready()


def take_away(node: RealNode) -> None:
    node.machine.run("rm", "-f", f"/etc/cni/net.d/{FILE}", GENERATED)
    node.wait_ready(ready=False)


def waiting(node: RealNode, count: int) -> list[str]:
    """Pods that are bound to the node already and wait for its network."""
    names = [f"p{number}" for number in range(count)]
    for name in names:
        node.pod(name, networks="blue,green@fast", nodeName=NAME, tolerations=[{"operator": "Exists"}])
    return names


def is_waiting(multus: MultusPod) -> bool:
    return "no file in" in multus.readyz()[1]


def test_no_pod_starts_on_the_wrong_network(without_primary: MultusPod) -> None:
    multus, node = without_primary, without_primary.node
    multus.apply()
    node.wait_until(lambda: is_waiting(multus), "the daemon waits for the primary network")
    two_networks(node)
    names = waiting(node, 10)
    time.sleep(5)
    node.wait_ready(ready=False)
    with NetworkWatch(node.machine.path(containerd.SOCKET), "primary", "multus-cni-network") as watch:
        node.primary(FILE, PRIMARY)
        node.wait_running(*names)
    assert watch.names() == ["", "multus-cni-network"]
    node.wait_ready()
    multus.wait_rolled_out()
    for name in names:
        assert node.links(name) == ["eth0", "fast", "lo", "net1"]
    node.remove_pods()
    assert leftovers(node) == []
    assert failures(node) == []


def has_ours(watch: NetworkWatch) -> bool:
    return "multus-cni-network" in watch.names()


def test_the_runtime_never_has_the_primary_networks_own_file(without_primary: MultusPod) -> None:
    multus, node = without_primary, without_primary.node
    multus.apply()
    for _ in range(ROUNDS):
        node.wait_until(lambda: is_waiting(multus), "the daemon waits for the primary network")
        with NetworkWatch(node.machine.path(containerd.SOCKET), "primary", "multus-cni-network") as watch:
            node.primary(FILE, PRIMARY)
            node.wait_until(partial(has_ours, watch), "ours is the runtime's")
        print(f"{watch.seconds('primary') * 1000:.1f} ms, asked {watch.asked} times")
        assert watch.names() == ["", "multus-cni-network"]
        assert json.loads(node.machine.path(GENERATED).read_text())["type"] == "multus-shim"
        # As an uninstalled primary network; without a restart the daemon would put its file back.
        multus.uninstall()
        take_away(node)
        multus.apply()
