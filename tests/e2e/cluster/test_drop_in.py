"""Upstream's own thick manifest on a real node: with only the image changed to ours, and in turns with our manifest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.build_tools import ToolError
from tests.e2e.cluster import daemon_image
from tests.e2e.cluster.images import ImageError
from tests.e2e.cluster.multus import GENERATED, MultusPod, UpstreamPod
from tests.e2e.cluster.real_node import LINKS, RealNode
from tests.e2e.cluster.workload import BRIDGE, addresses, failures, forget_events, status, two_networks, wait_clean

pytestmark = pytest.mark.timeout(600)
pytest_plugins = ["tests.e2e.cluster.fixtures"]

PODS = 100
CPUS_MAX = 4
"""The kernel makes queues for each CPU in each veth pair, in memory that counts for the daemon (docs/scaling.md)."""


@pytest.fixture
def drop_in(real_node: RealNode) -> Iterator[UpstreamPod]:
    """Upstream's manifest with our image, rolled out."""
    try:
        made = UpstreamPod(real_node, daemon_image.find(), daemon_image.NAME)
    except ToolError as error:
        pytest.skip(str(error))
    made.install()
    forget_events(real_node)
    try:
        made.start()
        yield made
        real_node.remove_pods(timeout=240)
    finally:
        made.uninstall()
        if BRIDGE in real_node.links():
            real_node.machine.run("ip", "link", "delete", BRIDGE)
    assert real_node.links() == LINKS
    assert addresses(real_node) == []


@pytest.fixture
def upstream_pod(multus_pod: MultusPod, tmp_path: Path) -> UpstreamPod:
    """Upstream's manifest with an image of its release's programs, not started; ours is not started either."""
    try:
        made = UpstreamPod.released(multus_pod.node, tmp_path)
    except (ToolError, ImageError) as error:
        pytest.skip(str(error))
    made.install()
    return made


def container(node: RealNode) -> dict[str, Any]:
    """Return the status that the kubelet reports for the daemon's container."""
    items = node.server.request("GET", "/api/v1/namespaces/kube-system/pods", labelSelector="name=multus")["items"]
    (pod,) = [item for item in items if "deletionTimestamp" not in item["metadata"]]
    (found,) = pod["status"]["containerStatuses"]
    assert isinstance(found, dict)
    return found


def test_the_image_alone_is_changed(drop_in: UpstreamPod) -> None:
    node = drop_in.node
    two_networks(node)
    node.pod("p0", networks="blue,green@fast")
    node.pod("p1")
    p0, p1 = node.wait_running("p0", "p1")
    assert node.links("p0") == ["eth0", "fast", "lo", "net1"]
    assert [entry["name"] for entry in status(p0)] == ["primary", "default/blue", "default/green"]
    assert [entry["name"] for entry in status(p1)] == ["primary"]
    assert node.replies("10.91.0.1", "p0") == 1
    shim, passthru = (node.machine.path(f"/opt/cni/bin/{name}").read_bytes() for name in ("multus-shim", "passthru"))
    assert shim == passthru
    # Its role has `update` and not `patch`.
    assert drop_in.log().count("grant the verb patch on pods/status") == 1
    node.remove_pods()
    wait_clean(node)
    assert failures(node) == []


def burst(drop_in: UpstreamPod, *networks: str) -> None:
    """A hundred pods at once with these networks each come, and go; none fails, and the daemon is never ended."""
    node = drop_in.node
    two_networks(node)
    names = [f"p{number}" for number in range(PODS)]
    for name in names:
        node.pod(name, networks=",".join(networks))
    pods = node.wait_running(*names, timeout=400)
    for pod in pods:
        assert [entry["name"] for entry in status(pod)] == ["primary", *(f"default/{name}" for name in networks)]
    found = container(node)
    assert (found["restartCount"], found.get("lastState")) == (0, {})
    node.remove_pods(timeout=240)
    wait_clean(node, timeout=120)
    found = container(node)
    assert (found["restartCount"], found.get("lastState")) == (0, {})
    assert failures(node) == []


few_cpus = pytest.mark.skipif(
    (os.cpu_count() or 1) > CPUS_MAX,
    reason=f"needs a machine with {CPUS_MAX} CPUs at most: the links take more with more",
)


@few_cpus
def test_a_burst_of_pods_with_the_limits_of_the_manifest(drop_in: UpstreamPod) -> None:
    assert drop_in.log().count("at most 5 requests at once: the memory limit of 50 MiB") == 1
    burst(drop_in, "blue")


def test_a_burst_of_pods_with_the_memory_limit_that_the_documentation_says(drop_in: UpstreamPod) -> None:
    limits = ("--limits=memory=128Mi,cpu=100m", "--requests=memory=64Mi,cpu=100m")
    set_resources = ("set", "resources", "daemonset/kube-multus-ds", "-c", "kube-multus")
    drop_in.node.kubectl("-n", "kube-system", *set_resources, *limits)
    drop_in.wait_rolled_out()
    drop_in.wait_ready()
    assert drop_in.log().count("at most 20 requests at once: the CPU limit of 0.1 cores") == 1
    burst(drop_in, "blue", "green")


def test_upstreams_daemon_and_ours_in_turns(upstream_pod: UpstreamPod, multus_pod: MultusPod) -> None:
    node = multus_pod.node
    try:
        upstream_pod.start()
        two_networks(node)
        node.pod("theirs", networks="blue,green@fast")
        node.wait_running("theirs")
        assert node.links("theirs") == ["eth0", "fast", "lo", "net1"]
        # There.
        multus_pod.start()
        node.pod("ours", networks="blue,green@fast")
        (ours,) = node.wait_running("ours")
        assert node.links("ours") == ["eth0", "fast", "lo", "net1"]
        assert [entry["name"] for entry in status(ours)] == ["primary", "default/blue", "default/green"]
        node.delete_pod("theirs")
        # Back: the pods of ours first.
        node.delete_pod("ours")
        wait_clean(node)
        upstream_pod.apply()
        upstream_pod.wait_rolled_out()
        node.wait_until(
            lambda: node.machine.path(GENERATED).exists(), "upstream's daemon has written its configuration"
        )
        node.wait_ready()
        node.pod("again", networks="blue,green@fast")
        (again,) = node.wait_running("again")
        assert node.links("again") == ["eth0", "fast", "lo", "net1"]
        assert [entry["name"] for entry in status(again)] == ["primary", "default/blue", "default/green"]
        # Its own DEL of this cluster network fails, for it forgets the capability `ipRanges` that the ADD had.
        multus_pod.start()
        node.delete_pod("again")
        wait_clean(node)
    except Exception:
        # The pods, and with them their logs, go with the clean-up.
        print(upstream_pod.log())
        raise
    finally:
        node.remove_pods()
        upstream_pod.uninstall()
