"""Onto a real node and off it again, by the manifests alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster.multus import GENERATED, MultusPod
from tests.e2e.cluster.real_node import RealNode
from tests.e2e.cluster.workload import addresses, host_local, network

pytest_plugins = ["tests.e2e.cluster.fixtures"]

SHIM = "/opt/cni/bin/multus-shim"
UNINSTALL = str(Path(__file__).parents[3] / "manifests" / "uninstall" / "overlays" / "vanilla")


@pytest.fixture
def multus(multus_pod: MultusPod) -> Iterator[MultusPod]:
    """The DaemonSet, rolled out."""
    multus_pod.start()
    yield multus_pod
    multus_pod.node.remove_pods()
    multus_pod.node.kubectl("delete", "--ignore-not-found", "-k", UNINSTALL)
    # containerd's own, by the name of a network that it does not have any more when the pod goes.
    multus_pod.node.machine.run("sh", "-c", "rm -f /var/lib/cni/results/multus-cni-network-*")


def uninstaller_log(node: RealNode) -> str:
    return node.container_log("multus-uninstall-*", "kube-system")


def test_uninstall_waits_for_the_pods_that_need_it_and_leaves_a_node_that_works(multus: MultusPod) -> None:
    node = multus.node
    network(node, "blue", {"type": "macvlan", "master": "eth0", "ipam": host_local("10.95.0.0/24")})
    node.pod("p1", networks="blue")
    node.pod("p2")
    node.wait_running("p1", "p2")
    assert node.links("p1") == ["eth0", "lo", "net1"]
    # Beside the daemon nothing is changed.
    node.kubectl("apply", "-k", UNINSTALL)
    node.wait_until(lambda: "still runs" in uninstaller_log(node), "the uninstaller finds the daemon")
    assert node.machine.path(SHIM).exists()
    node.kubectl("-n", "kube-system", "delete", "--wait=true", "daemonset/kube-multus-ds")
    node.wait_until(lambda: "default/p1 (1)" in uninstaller_log(node), "the uninstaller names the pod", 120)
    assert node.machine.path(GENERATED).exists()
    # The DEL of p1 waits in the spool, as there is no daemon: the uninstaller serves it.
    node.delete_pod("p1")
    node.kubectl("-n", "kube-system", "rollout", "status", "daemonset/multus-uninstall", "--timeout=240s", timeout=250)
    assert not node.machine.path(GENERATED).exists()
    assert not node.machine.path(SHIM).exists()
    assert not node.machine.path("/run/multus").exists()
    assert [name for name in addresses(node) if name.startswith("blue/")] == []
    assert "spooled DEL" in uninstaller_log(node)
    # Pods from before go, new ones come, by the cluster network alone.
    node.delete_pod("p2")
    node.pod("p3", networks="blue")
    node.wait_running("p3")
    assert node.links("p3") == ["eth0", "lo"]
