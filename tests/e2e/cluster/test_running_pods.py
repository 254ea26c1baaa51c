"""Networks of running pods under a real kubelet: `hotplug` and `keep` for a Deployment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.cluster.multus import MultusProcess
from tests.e2e.cluster.real_node import LINKS, RealNode, pod_spec
from tests.e2e.cluster.workload import BRIDGE, leftovers, status, two_networks

pytest_plugins = ["tests.e2e.cluster.fixtures"]

REPLICAS = 20
PINGED = 3
NETWORKS = "k8s.v1.cni.cncf.io/networks"


@pytest.fixture
def multus(real_node: RealNode) -> Iterator[MultusProcess]:
    made = MultusProcess(real_node, hotplug="on", keep="repair")
    made.install()
    made.start()
    yield made
    real_node.kubectl("delete", "deployment", "web", "--ignore-not-found", "--cascade=foreground", timeout=180)
    real_node.remove_pods()
    made.uninstall()
    if BRIDGE in real_node.links():
        real_node.machine.run("ip", "link", "delete", BRIDGE)
    assert real_node.links() == LINKS


def pods(node: RealNode) -> list[str]:
    items = node.server.request("GET", "/api/v1/namespaces/default/pods", labelSelector="app=web")["items"]
    return sorted(item["metadata"]["name"] for item in items if "deletionTimestamp" not in item["metadata"])


def deploy(node: RealNode) -> list[str]:
    """A Deployment with one network; the names of its pods, which run."""
    metadata = {"labels": {"app": "web"}, "annotations": {NETWORKS: "blue"}}
    spec = {
        "replicas": REPLICAS,
        "selector": {"matchLabels": {"app": "web"}},
        "template": {"metadata": metadata, "spec": pod_spec()},
    }
    item = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web", "namespace": "default"}}
    node.kubectl("apply", "-f", "-", stdin=json.dumps({**item, "spec": spec}))
    node.wait_until(lambda: len(pods(node)) == REPLICAS, "the pods are made", 60)
    names = pods(node)
    node.wait_running(*names, timeout=120)
    return names


def restarts(node: RealNode, names: list[str]) -> list[int]:
    found = [node.server.get("v1", "Pod", name, "default")["status"]["containerStatuses"] for name in names]
    return [item["restartCount"] for statuses in found for item in statuses]


def attached(node: RealNode, names: list[str]) -> list[list[str]]:
    return [
        sorted(entry["interface"] for entry in status(node.server.get("v1", "Pod", name, "default"))) for name in names
    ]


def lost(node: RealNode, name: str, gateway: str, ifname: str) -> str:
    """`LOST of SENT` packets of a ping every 10 ms for 6 s over an interface that stays."""
    return f"{600 - node.replies(gateway, name, count=600, wait=1, device=ifname)} of 600"


def test_a_deployment_gets_and_loses_a_network_and_nothing_restarts(multus: MultusProcess) -> None:
    node = multus.node
    two_networks(node)
    before = leftovers(node)
    names = deploy(node)
    node.wait_until(lambda: attached(node, names) == [["eth0", "net1"]] * REPLICAS, "blue is in every status")
    with ThreadPoolExecutor(2 * PINGED) as pool:
        pinged = [pool.submit(lost, node, name, "10.91.0.1", "net1") for name in names[:PINGED]]
        node.kubectl("annotate", "--overwrite", "pods", "-l", "app=web", f"{NETWORKS}=blue,green@data0")
        node.wait_until(lambda: attached(node, names) == [["data0", "eth0", "net1"]] * REPLICAS, "green is everywhere")
        for name in names:
            assert node.links(name) == ["data0", "eth0", "lo", "net1"]
        node.kubectl("annotate", "--overwrite", "pods", "-l", "app=web", f"{NETWORKS}=blue")
        node.wait_until(lambda: attached(node, names) == [["eth0", "net1"]] * REPLICAS, "green has left")
        assert [item.result(timeout=60) for item in pinged] == ["0 of 600"] * PINGED
    assert pods(node) == names
    assert restarts(node, names) == [0] * REPLICAS
    # A bridge that is made anew has its ports again.
    node.machine.run("ip", "link", "delete", BRIDGE)
    for name in names:
        node.wait_until(lambda name=name: ping(node, name), f"{name} reaches the bridge")  # type: ignore[misc]
    node.kubectl("delete", "deployment", "web", "--cascade=foreground", timeout=180)
    node.wait_until(lambda: pods(node) == [], "the pods are gone")
    node.wait_until(lambda: leftovers(node) == before, "nothing is left of them")


def ping(node: RealNode, name: str) -> bool:
    """One echo of the bridge over net1."""
    return node.replies("10.91.0.1", name, wait=1, device="net1") == 1
