"""Pods of two nodes on one additional network: macvlan over a link that joins the nodes, with reference plugins."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.node import Node, ping
from tests.e2e.test_standalone import status_of
from tests.programs import needed

UPLINK = "eth1"
ADDRESSES = ("10.1.1.11/24", "10.1.1.12/24")


@pytest.fixture
def nodes(make_node: Callable[..., Node], reference: Path) -> list[Node]:
    """Two nodes, started, with a cluster network of their own and `default/macvlan` over the link between them."""
    made = [make_node(settings={"builtinPlugins": "fallback"}) for _ in ADDRESSES]
    first, second = (Path(node.host).name for node in made)
    peer = ["peer", "name", UPLINK, "netns", second]
    subprocess.run([needed("ip"), "-n", first, "link", "add", UPLINK, "type", "veth", *peer], check=True)
    macvlan = {
        "type": "macvlan",
        "master": UPLINK,
        "mode": "bridge",
        "capabilities": {"ips": True},
        "ipam": {"type": "static"},
    }
    for node, address in zip(made, ADDRESSES, strict=True):
        node.ip("link", "set", UPLINK, "up")
        for name in ("macvlan", "static", "tuning"):
            (node.bin_dir / name).symlink_to(reference / name)
        node.ptp("cluster", "10.81.0.0/24")
        node.network(
            "macvlan", {"cniVersion": "0.3.1", "name": "lan", "plugins": [macvlan, {"type": "tuning"}]}, "default"
        )
        node.pod("hello", json.dumps([{"name": "macvlan", "ips": [address]}]))
        node.start()
    return made


@pytest.mark.conformance("e2e-2")
def test_pods_of_two_nodes_reach_each_other_at_the_addresses_that_they_asked_for(nodes: list[Node]) -> None:
    spaces = [node.add_netns() for node in nodes]
    for node, netns, address in zip(nodes, spaces, ADDRESSES, strict=True):
        added = node.cni("ADD", "c1", netns, "hello")
        assert added.code == 0, added.stdout
        [net1] = [link for link in node.ip("-d", "address", netns=netns) if link["ifname"] == "net1"]
        assert net1["linkinfo"]["info_kind"] == "macvlan"
        assert [f"{item['local']}/{item['prefixlen']}" for item in net1["addr_info"] if item["family"] == "inet"] == [
            address
        ]
        assert status_of(node, "hello")[1]["ips"] == [address.partition("/")[0]]
    for netns, other in zip(spaces, reversed(ADDRESSES), strict=True):
        assert ping(netns, other.partition("/")[0], "net1")
    for node, netns in zip(nodes, spaces, strict=True):
        assert node.cni("DEL", "c1", netns, "hello").code == 0
        assert (node.links(netns), node.leftovers()) == (["lo"], [])
