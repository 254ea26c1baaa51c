"""From upstream's thin plugin to our DaemonSet and back under a real kubelet and containerd, with pods that run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest
import yaml

from tests.e2e.build_tools import ToolError
from tests.e2e.cluster.multus import GENERATED, MultusPod
from tests.e2e.cluster.real_node import RealNode, pod_spec
from tests.e2e.cluster.thin import PROGRAM, ThinProcess
from tests.e2e.cluster.workload import addresses, failures, host_local, network, status, two_networks, wait_clean
from tests.e2e.thin import Line
from tests.repo.manifests import MANIFESTS

RUNS: Final = ("Multus, thin",)
pytestmark = pytest.mark.timeout(600)
pytest_plugins = ["tests.e2e.cluster.fixtures"]

NETWORKS: Final = "k8s.v1.cni.cncf.io/networks"
KINDS: Final[dict[str, tuple[list[str], list[str]]]] = {
    "alone": (["eth0", "lo"], ["primary"]),
    "two": (["eth0", "fast", "lo", "net1"], ["primary", "default/blue", "default/green"]),
    "ports": (["eth0", "lo", "net1"], ["primary", "default/ports"]),
    "chosen": (["eth0", "lo", "net1"], ["default/own", "default/green"]),
}
"""By kind of a pod: its links, and the networks of its status."""


@pytest.fixture
def thin(multus_pod: MultusPod) -> Iterator[ThinProcess]:
    """The thin plugin, started; our image is on the node."""
    node = multus_pod.node
    try:
        made = ThinProcess(node)
    except ToolError as error:
        pytest.skip(str(error))
    made.install()
    made.start()
    two_networks(node)
    masquerading = {"type": "ptp", "ipMasq": True, "ipam": host_local("10.95.0.0/24")}
    network(node, "ports", masquerading, {"type": "portmap", "capabilities": {"portMappings": True}})
    network(node, "own", {"type": "ptp", "ipam": host_local("10.97.0.0/24")})
    yield made
    node.remove_pods()
    made.uninstall()
    node.machine.run("sh", "-c", "ip link delete br-blue 2>/dev/null; true")


def start(node: RealNode, *numbers: int) -> list[str]:
    """Make a pod of each kind for each number; their names."""
    names = []
    for number in numbers:
        for kind in KINDS:
            name = f"{kind}-{number}"
            ports = [{"hostPort": 18100 + number, "containerPort": 81, "protocol": "tcp"}]
            annotations: dict[str, dict[str, str]] = {
                "alone": {},
                "two": {NETWORKS: "blue,green@fast"},
                "ports": {NETWORKS: json.dumps([{"name": "ports", "portMappings": ports}])},
                "chosen": {NETWORKS: "green", "v1.multus-cni.io/default-network": "default/own"},
            }
            spec: dict[str, Any] = pod_spec()
            if kind == "alone":
                spec["containers"][0]["ports"] = [{"hostPort": 18000 + number, "containerPort": 80}]
            metadata = {"name": name, "namespace": "default", "annotations": annotations[kind]}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
            node.server.request("POST", "/api/v1/namespaces/default/pods", pod)
            names.append(name)
    return names


def assert_attached(node: RealNode, names: list[str]) -> None:
    for pod in node.wait_running(*names, timeout=240):
        name = pod["metadata"]["name"]
        links, networks = KINDS[name.partition("-")[0]]
        assert node.links(name) == links
        assert {item["name"].replace("kube-system/", "") for item in status(pod)} == set(networks), name


def space(node: RealNode, name: str) -> str:
    return str(node.machine.path(node.containerd.netns(name, "default")))


def test_twenty_pods_are_taken_over_and_deleted(thin: ThinProcess, multus_pod: MultusPod) -> None:
    node = thin.node
    names = start(node, *range(5))
    assert_attached(node, names)
    # The thin plugin's own, whose requests a busy API server answers too late.
    of_thin = set(failures(node))
    before = {name: node.ip("link", pod=name) for name in names}
    (address,) = [
        item["local"]
        for link in node.ip("address", "show", "net1", pod="two-0")
        for item in link["addr_info"]
        if item["family"] == "inet"
    ]
    with Line(space(node, "two-0"), space(node, "two-1"), address) as line:
        thin.stop()
        # They start while there is neither: the kubelet asks the shim, which waits for the daemon.
        multus_pod.apply()
        between = start(node, 10)
        multus_pod.wait_rolled_out()
        multus_pod.wait_ready()
        assert_attached(node, between)
    assert (line.lost, line.answered) == (0, line.sent)
    assert line.sent > 100
    assert {name: node.ip("link", pod=name) for name in names} == before
    names += start(node, 20)
    assert_attached(node, names)
    node.remove_pods(timeout=240)
    wait_clean(node, timeout=120)
    assert set(failures(node)) == of_thin
    assert addresses(node) == []


def test_and_back(thin: ThinProcess, multus_pod: MultusPod) -> None:
    node = thin.node
    names = start(node, 0, 1)
    assert_attached(node, names)
    thin.stop()
    multus_pod.start()
    names += start(node, 10, 11, 12)
    assert_attached(node, names)
    multus_pod.delete()
    thin.start()
    (found,) = yaml.safe_load_all((MANIFESTS / "uninstall" / "base" / "daemonset.yaml").read_text())
    found["spec"]["template"]["spec"]["initContainers"][0]["args"].append("--force")
    node.kubectl("apply", "-f", "-", stdin=json.dumps(found))
    rollout = ("-n", "kube-system", "rollout", "status", "daemonset/multus-uninstall", "--timeout=120s")
    node.kubectl(*rollout, timeout=130)
    node.kubectl("-n", "kube-system", "delete", "daemonset/multus-uninstall", "--wait=true")
    assert not node.machine.path(GENERATED).exists()
    assert node.machine.path(PROGRAM).stat().st_size > 10_000_000, "it is upstream's"
    new = start(node, 20)
    assert_attached(node, names + new)
    node.remove_pods(timeout=240)
    wait_clean(node, timeout=120)
