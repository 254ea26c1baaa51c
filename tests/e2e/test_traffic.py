"""`attachmentMetrics`: the traffic of the pods' additional interfaces, as Prometheus reads it from a daemon."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from multus_daemon import deadlines
from tests import packets
from tests.e2e.delegate import network, post
from tests.e2e.node import Node
from tests.netns.test_traffic import COUNTERS

PORT = 9905
Figures = dict[str, int]


def of_kernel(node: Node, netns: str, ifname: str) -> Figures:
    """What the interface has counted."""
    (link,) = node.ip("-s", "link", "show", "dev", ifname, netns=netns)
    return {name: link["stats64"][way][what] for name, (way, what) in COUNTERS.items()}


def scrape(node: Node) -> dict[str, Figures]:
    """The figures of the metrics `multus_network_…_total` by their labels."""
    found: dict[str, Figures] = {}
    for name, labels, value in re.findall(r"(?m)^multus_network_(\w+_\w+)_total{(.*)} (.+)$", node.metrics(PORT)):
        if name in COUNTERS:
            found.setdefault(labels, {})[name] = int(float(value))
    return found


def added(*figures: Figures) -> Figures:
    return {name: sum(item[name] for item in figures) for name in COUNTERS}


def talk(netns: str, address: str, count: int = 3) -> None:
    assert packets.replies(address, netns=netns, count=count, size=1000) == count


@pytest.fixture
def make(make_node: Callable[..., Node]) -> Callable[[str], Node]:
    """A node with two networks beside the cluster's, and its daemon with the value of the setting."""

    def made(shown: str) -> Node:
        node = make_node(
            settings={
                "metricsPort": PORT,
                "metricsAddress": "127.0.0.1",
                "attachmentMetrics": shown,
                "logLevel": "debug",
            }
        )
        node.ptp("cluster", "10.81.0.0/24")
        node.ptp("storage", "10.81.1.0/24", namespace="default")
        node.ptp("backup", "10.81.2.0/24", namespace="default")
        node.pod("hello", "storage,backup")
        node.pod("two", "storage")
        node.start()
        node.wait_for_log("metrics on")
        return node

    return made


def shows(node: Node, expected: Callable[[], dict[str, Figures]]) -> None:
    """Wait until the metrics are these: the kernel's own packets, of IPv6, come between two looks."""
    last: list[object] = []

    def holds() -> bool:
        before = expected()
        last[:] = [scrape(node), before]
        return last[0] == before == expected()

    try:
        node.wait_until(holds, "the figures of the kernel")
    except AssertionError as error:
        raise AssertionError(f"shown {last[0]}, not {last[1]}") from error


def of_the_same_packets(node: Node, kernel: Callable[[], Figures]) -> tuple[Figures, dict[str, Figures]]:
    """Return the kernel's figures and the metrics of networks, once both have counted the same packets.

    The kernel sends some of its own (ARP, IPv6) at any time, and a metric may be as old as `TRAFFIC_FRESH_SECONDS`.
    """
    for _ in range(10):
        before = kernel()
        time.sleep(deadlines.TRAFFIC_FRESH_SECONDS + 0.1)
        metrics = scrape(node)
        if kernel() == before:
            return before, metrics
    raise AssertionError("packets come all the time")


def test_the_sum_of_a_network_has_every_pod_of_it_and_never_falls(make: Callable[[str], Node]) -> None:
    node = make("networks")
    assert scrape(node) == {}
    one, two = node.add_netns(), node.add_netns()
    assert node.cni("ADD", "c1", one, "hello").code == 0
    assert node.cni("ADD", "c2", two, "two").code == 0
    talk(one, "10.81.1.1")
    talk(two, "10.81.1.1", count=5)
    talk(one, "10.81.2.1")
    # The cluster network's are not there.
    talk(one, "10.81.0.1")

    storage, backup = 'network="default/storage"', 'network="default/backup"'
    shows(
        node,
        lambda: {
            storage: added(of_kernel(node, one, "net1"), of_kernel(node, two, "net1")),
            backup: of_kernel(node, one, "net2"),
        },
    )
    before = scrape(node)
    assert before[storage]["receive_bytes"] >= 8 * 1000
    assert node.cni("DEL", "c1", one, "hello").code == 0
    rest, after = of_the_same_packets(node, lambda: of_kernel(node, two, "net1"))
    assert all(after[labels][name] >= before[labels][name] for labels in before for name in COUNTERS)
    talk(two, "10.81.1.1")
    ended = {name: after[storage][name] - rest[name] for name in COUNTERS}
    shows(node, lambda: {storage: added(ended, of_kernel(node, two, "net1")), backup: after[backup]})


def test_a_network_that_a_running_pod_gets_later_counts_until_it_loses_it(make: Callable[[str], Node]) -> None:
    # A removed value, which is taken as `networks`.
    node = make("pods")
    node.wait_for_log("attachmentMetrics: pods is removed, networks is used")
    netns = node.add_netns()
    assert node.cni("ADD", "c2", netns, "two").code == 0
    assert post(node, "ADD", netns, "net7", network(node))[0] == 200
    talk(netns, "10.87.0.1")
    labels = 'network="default/plugged"'
    storage = 'network="default/storage"'
    shows(node, lambda: {labels: of_kernel(node, netns, "net7"), storage: of_kernel(node, netns, "net1")})
    last = scrape(node)[labels]
    assert last["receive_bytes"] >= 3 * 1000
    assert post(node, "DEL", netns, "net7", network(node))[0] == 200
    after = scrape(node)[labels]
    assert all(after[name] >= last[name] for name in COUNTERS)
    shows(node, lambda: {labels: after, storage: of_kernel(node, netns, "net1")})


def test_off_shows_nothing(make: Callable[[str], Node]) -> None:
    node = make("off")
    netns = node.add_netns()
    assert node.cni("ADD", "c2", netns, "two").code == 0
    text = node.metrics(PORT)
    assert "multus_network_receive" not in text
