"""Each distribution's overlay on a node with the distribution's directories: a pod comes and goes, and so does all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.e2e.build_tools import ToolError
from tests.e2e.cluster import daemon_image
from tests.e2e.cluster.machine import ADDRESS
from tests.e2e.cluster.multus import STORE, MultusPod
from tests.e2e.cluster.real_node import LINKS, PRIMARY, Layout, RealNode
from tests.e2e.cluster.workload import addresses, forget_events, host_local, network, status
from tests.repo.manifests import MANIFESTS

pytest_plugins = ["tests.e2e.cluster.fixtures"]

PORT: Final = 9059
"""The `metricsPort` of the manifests."""
# A snap has the directory of a revision, to which a link leads.
_REVISION: Final = "/var/snap/microk8s/7180"
_K3S: Final = "/var/lib/rancher/k3s"

LAYOUTS: Final = {
    "k3s": Layout(f"{_K3S}/data/cni", f"{_K3S}/agent/etc/cni/net.d"),
    "microk8s": Layout(
        f"{_REVISION}/opt/cni/bin",
        f"{_REVISION}/args/cni-network",
        "/var/snap/microk8s/common/var/lib/kubelet",
    ),
    "microshift": Layout("/run/cni/bin"),
    "openshift": Layout("/var/lib/cni/bin", "/etc/kubernetes/cni/net.d"),
    "rke2": Layout(),
    "talos": Layout(own_var_run=True),
}
# OVN-Kubernetes, whose file the overlay waits for, has a configuration of one plugin.
PRIMARIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    name: ("10-ovn-kubernetes.conf", {"cniVersion": "1.0.0", "name": "primary", **PRIMARY["plugins"][0]})
    for name in ("microshift", "openshift")
}


@pytest.fixture(params=sorted(LAYOUTS))
def distribution(real_node: RealNode, request: pytest.FixtureRequest) -> Iterator[str]:
    """A distribution whose directories the node has."""
    node, name = real_node, request.param
    try:
        node.containerd.import_image(daemon_image.find())
    except ToolError as error:
        pytest.skip(str(error))
    forget_events(node)
    node.machine.run("sh", "-c", f"mkdir -p {_REVISION} && ln -sfn 7180 /var/snap/microk8s/current")
    node.move(LAYOUTS[name], *PRIMARIES.get(name, ("10-primary.conflist", PRIMARY)))
    if name == "k3s":
        # Its plugins are links to another directory.
        node.machine.run("sh", "-c", f"cd {_K3S}/data && mkdir -p 1/bin && mv cni/* 1/bin && ln -s $PWD/1/bin/* cni")
    try:
        yield name
        node.remove_pods()
    finally:
        for kind in ("daemonset/kube-multus-ds", "daemonset/multus-uninstall", "configmap/multus-daemon",
                     "rolebinding/multus-scc"):  # fmt: skip
            node.kubectl("-n", "kube-system", "delete", "--ignore-not-found", "--wait=true", kind)
        node.machine.run("rm", "-rf", STORE, "/run/multus", "/etc/cni/multus")
        node.move(Layout(), "10-primary.conflist", PRIMARY)
    assert node.links() == LINKS
    assert addresses(node) == []


def rolled_out(node: RealNode, name: str) -> None:
    flags = ("rollout", "status", f"daemonset/{name}", "--timeout=120s")
    node.kubectl("-n", "kube-system", *flags, timeout=130)


def ours(node: RealNode) -> list[str]:
    """Return the files that the installation leaves on the node."""
    layout = node.layout
    names = ("multus-shim", "multus") if layout == LAYOUTS["microshift"] else ("multus-shim",)
    places = (
        *(f"{layout.bin_dir}/{name}" for name in names),
        f"{layout.conf_dir}/00-multus.conf",
        STORE,
        "/run/multus",
    )
    return [place for place in places if node.machine.path(place).exists()]


def test_every_overlay_is_tried() -> None:
    elsewhere = {"vanilla": "test_install", "crio": "tests/wide/test_ocicni"}
    assert {path.name for path in (MANIFESTS / "overlays").iterdir()} == {*LAYOUTS, *elsewhere}


def test_a_pod_gets_its_network_and_all_of_it_goes_again(distribution: str, real_node: RealNode) -> None:
    node, daemon = real_node, MultusPod(real_node, daemon_image.find())
    node.kubectl("apply", "-k", str(MANIFESTS / "overlays" / distribution))
    rolled_out(node, "kube-multus-ds")
    daemon.wait_ready()
    network(node, "blue", {"type": "macvlan", "master": "eth0", "ipam": host_local("10.95.0.0/24")})
    node.pod("p1", networks="blue")
    node.pod("p2", networks="blue")
    pods = node.wait_running("p1", "p2")
    for pod in pods:
        assert node.links(pod["metadata"]["name"]) == ["eth0", "lo", "net1"]
        assert [item["name"] for item in status(pod)] == ["primary", "default/blue"]
    # The kubelet's answers are asked for at its socket, wherever the distribution has it.
    socket = f"/proc/{daemon.pid}/root/var/lib/kubelet/pod-resources/kubelet.sock"
    node.machine.run("test", "-S", socket)
    # The kubelet puts the node's addresses into the daemon's environment.
    listening = node.machine.run("ss", "-Hltn", f"sport = :{PORT}").split()
    assert [word for word in listening if word.endswith(f":{PORT}")] == [f"{ADDRESS}:{PORT}"]
    node.delete_pod("p1")
    assert [name for name in addresses(node) if name.startswith("blue/")] == [f"blue/{status(pods[1])[1]['ips'][0]}"]
    assert len(ours(node)) == 4 + (distribution == "microshift")

    # The other pod goes after the daemon, while the uninstaller waits for that.
    daemon.delete()
    if distribution == "rke2":
        # The defaults suffice there.
        node.kubectl("-n", "kube-system", "delete", "configmap/multus-daemon")
    node.server.delete_pod("p2", "default", grace=1)
    node.kubectl("apply", "-k", str(MANIFESTS / "uninstall" / "overlays" / distribution))
    rolled_out(node, "multus-uninstall")
    assert ours(node) == []
    assert addresses(node) == []
    assert node.links() == LINKS
    # Pods get the cluster network alone.
    node.pod("p3", networks="blue")
    node.wait_running("p3")
    assert node.links("p3") == ["eth0", "lo"]
