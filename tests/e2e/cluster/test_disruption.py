"""The daemon is replaced, killed and switched off with its node, while pods come and go: none of them notices."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest

from tests.e2e.cluster.multus import MultusPod
from tests.e2e.cluster.real_node import RealNode
from tests.e2e.cluster.workload import addresses, failures, status, two_networks, wait_clean

pytest_plugins = ["tests.e2e.cluster.fixtures"]

PODS = 40
INTERFACES = ["eth0", "fast", "lo", "net1"]


@pytest.fixture
def multus(multus_pod: MultusPod) -> MultusPod:
    multus_pod.start()
    two_networks(multus_pod.node)
    return multus_pod


def make(node: RealNode, names: Iterable[str]) -> None:
    for name in names:
        node.pod(name, networks="blue,green@fast")


def delete(node: RealNode, names: Iterable[str]) -> None:
    for name in names:
        node.server.delete_pod(name, "default", grace=1)


def assert_attached(node: RealNode, names: Iterable[str]) -> None:
    """They run with every interface, each address is one pod's, and nothing else has any."""
    pods = node.wait_running(*names, timeout=150)
    held = []
    for pod in pods:
        name = pod["metadata"]["name"]
        assert node.links(name) == INTERFACES, name
        shown = {
            link["ifname"]: [item["local"] for item in link["addr_info"] if item["family"] == "inet"]
            for link in node.ip("address", pod=name)
        }
        for entry in status(pod):
            assert entry["ips"] == shown[entry["interface"]], (name, entry)
            held.append(f"{entry['name'].removeprefix('default/')}/{entry['ips'][0]}")
    # The addresses of pods that were deleted may be freed a little later.
    node.wait_until(lambda: addresses(node) == sorted(held), "each address is one pod's, and nothing else has any")


def test_a_rollout_while_forty_pods_come_and_go(multus: MultusPod) -> None:
    node = multus.node
    names = [f"p{number}" for number in range(PODS)]
    first, second = names[: PODS // 2], names[PODS // 2 :]
    make(node, first)
    multus.rollout_restart()
    make(node, second)
    multus.wait_rolled_out()
    assert_attached(node, names)
    multus.rollout_restart()
    delete(node, first)
    multus.wait_rolled_out()
    node.wait_until(lambda: not any(node.containerd.sandboxes(name) for name in first), "the sandboxes are gone", 120)
    assert_attached(node, second)
    node.remove_pods()
    wait_clean(node)
    assert failures(node) == []


def test_killed_while_pods_come_and_go(multus: MultusPod) -> None:
    node = multus.node
    names = [f"p{number}" for number in range(20)]
    first, second = names[:10], names[10:]
    make(node, first)
    assert_attached(node, first)
    killed = multus.pid
    multus.kill()
    delete(node, first)
    make(node, second)
    assert_attached(node, second)
    assert multus.pid != killed
    node.remove_pods()
    wait_clean(node)


def test_killed_in_the_middle_of_deletions(multus: MultusPod) -> None:
    node = multus.node
    names = [f"p{number}" for number in range(20)]
    make(node, names)
    assert_attached(node, names)
    delete(node, names)
    node.wait_until(lambda: len(addresses(node)) < 3 * len(names), "the first addresses are free")
    multus.kill()
    node.remove_pods()
    wait_clean(node)
    assert failures(node) == []


def test_after_a_reboot_pods_have_their_networks(multus: MultusPod) -> None:
    node = multus.node
    names = [f"p{number}" for number in range(10)]
    make(node, names)
    assert_attached(node, names)
    before = {name: node.containerd.sandboxes(name)[-1].identifier for name in names}
    told = {name: status(node.server.get("v1", "Pod", name)) for name in names}
    node.reboot()
    begin = time.monotonic()
    node.wait_until(
        lambda: all(
            (found := node.containerd.sandboxes(name)) and found[-1].identifier != before[name] for name in names
        ),
        "the pods have new sandboxes",
        120,
    )
    node.wait_until(lambda: len(addresses(node)) == 3 * len(names), "the old addresses are free", 60)
    # To the API the pods run all the time, so it is the status that tells that their new ADDs are through.
    node.wait_until(
        lambda: all(status(node.server.get("v1", "Pod", name)) != told[name] for name in names),
        "the pods' new networks are told",
    )
    print(f"attached {time.monotonic() - begin:.0f} s after the start")
    assert_attached(node, names)
    node.remove_pods()
    wait_clean(node)
