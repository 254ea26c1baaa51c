"""The daemon under a real kubelet and containerd."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.e2e import rights
from tests.e2e.build_tools import ToolError
from tests.e2e.cluster import daemon_image
from tests.e2e.cluster.multus import GENERATED, Multus, MultusPod, MultusProcess
from tests.e2e.cluster.real_node import LINKS, RealNode
from tests.e2e.cluster.workload import BRIDGE, leftovers, status, two_networks

RUNS: Final = ("Kubernetes", "containerd")
pytest_plugins = ["tests.e2e.cluster.fixtures"]


@pytest.fixture(params=["process", "pod"])
def multus(real_node: RealNode, request: pytest.FixtureRequest) -> Iterator[Multus]:
    """The daemon, serving; a link that its pods leave on the node fails the test."""
    made: Multus
    if request.param == "process":
        made = MultusProcess(real_node)
    else:
        try:
            made = MultusPod(real_node, daemon_image.find())
        except ToolError as error:
            pytest.skip(str(error))
    made.install()
    made.start()
    yield made
    real_node.remove_pods()
    made.uninstall()
    if BRIDGE in real_node.links():
        real_node.machine.run("ip", "link", "delete", BRIDGE)
    assert real_node.links() == LINKS


def test_the_daemon_has_the_rights_of_the_manifest(multus: Multus) -> None:
    """By the container runtime, and as the tests without one give them."""
    if isinstance(multus, MultusPod):
        process = multus.node.machine.path(f"/proc/{multus.pid}")
    else:
        assert isinstance(multus, MultusProcess)
        process = Path(f"/proc/{multus.pid}")
    assert rights.status(process) == rights.SHIPPED.status


def test_a_pod_with_two_networks_runs_and_nothing_is_left_of_it(multus: Multus) -> None:
    node = multus.node
    two_networks(node)
    before = leftovers(node)
    node.pod("p1", networks="blue,green@fast")
    (pod,) = node.wait_running("p1")
    assert node.links("p1") == ["eth0", "fast", "lo", "net1"]
    first, blue, green = status(pod)
    assert (first["name"], first["interface"], first["default"]) == ("primary", "eth0", True)
    assert first["ips"] == [pod["status"]["podIP"]]
    assert (blue["name"], blue["interface"]) == ("default/blue", "net1")
    assert (green["name"], green["interface"]) == ("default/green", "fast")
    for entry in (first, blue, green):
        (link,) = node.ip("address", "show", entry["interface"], pod="p1")
        assert entry["ips"] == [item["local"] for item in link["addr_info"] if item["family"] == "inet"]
        assert entry["mac"] == link["address"]
    assert node.replies(first["ips"][0]) == 1
    assert node.replies("10.91.0.1", "p1") == 1
    node.delete_pod("p1")
    assert leftovers(node) == before == []


def test_the_generated_configuration_is_the_runtimes(multus: Multus) -> None:
    generated = json.loads(multus.node.machine.path(GENERATED).read_text())
    assert generated["type"] == "multus-shim"
    assert generated["capabilities"] == {"portMappings": True}


@pytest.mark.parametrize("multus", ["process"], indirect=True)
def test_pods_deleted_while_the_daemon_was_away_leave_nothing(multus: MultusProcess) -> None:
    """The namespaces are gone when the daemon starts again, so plugins cannot read them during DEL."""
    node = multus.node
    two_networks(node)
    for name in ("p1", "p2"):
        node.pod(name, networks="blue,green")
    node.wait_running("p1", "p2")
    multus.kill()
    node.remove_pods()
    assert leftovers(node)
    multus.start()
    node.wait_until(lambda: leftovers(node) == [], "nothing is left")
