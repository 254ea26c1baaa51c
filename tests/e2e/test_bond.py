"""A bond of two networks of a pod, by bond-cni, which takes the interfaces that came before it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.node import Node, ping
from tests.programs import given

RUNS: Final = ("bond-cni",)


@pytest.fixture
def bonded(make_node: Callable[..., Node], reference: Path) -> Node:
    """A node with two uplinks to one switch, the networks `left`, `right` and `bond`, and a pod with all three."""
    plugin = given("WIDE_BOND_CNI")
    node = make_node()
    try:
        node.ip("link", "add", "probe", "type", "bond")
    except subprocess.CalledProcessError:
        pytest.skip("the kernel has no bond devices: run `make kernels`")
    node.ip("link", "del", "probe")
    node.ptp("cluster", "10.81.0.0/24")
    shutil.copy(plugin, node.bin_dir / "bond")
    shutil.copy(reference / "static", node.bin_dir / "static")
    node.ip("link", "add", "switch", "type", "bridge")
    node.ip("address", "add", "10.90.0.1/24", "dev", "switch")
    for name in ("left", "right"):
        node.ip("link", "add", name, "up", "type", "veth", "peer", "name", f"{name}port")
        node.ip("link", "set", f"{name}port", "master", "switch", "up")
        node.network(
            name, {"cniVersion": "1.0.0", "name": name, "type": "macvlan", "master": name, "mode": "bridge"}, "default"
        )
    node.ip("link", "set", "switch", "up")
    bond = {
        "mode": "active-backup",
        "failOverMac": 1,
        "miimon": "100",
        "linksInContainer": True,
        "links": [{"name": "net1"}, {"name": "net2"}],
        "ipam": {"type": "static", "addresses": [{"address": "10.90.0.7/24"}]},
    }
    node.network("bond", {"cniVersion": "1.0.0", "name": "bond", "type": "bond", **bond}, "default")
    node.pod("hello", "left,right,bond@bond0")
    node.start()
    return node


def test_a_bond_of_two_networks_outlives_one_of_them(bonded: Node) -> None:
    netns = bonded.add_netns()
    added = bonded.cni("ADD", "c1", netns, "hello")
    assert added.code == 0, added.stdout
    links = {link["ifname"]: link for link in bonded.ip("-d", "address", netns=netns)}
    assert {name: links[name].get("master") for name in ("net1", "net2")} == {"net1": "bond0", "net2": "bond0"}
    assert [item["local"] for item in links["bond0"]["addr_info"] if item["family"] == "inet"] == ["10.90.0.7"]
    assert ping(netns, "10.90.0.1", "bond0")
    active = links["bond0"]["linkinfo"]["info_data"]["active_slave"]
    bonded.ip("link", "set", {"net1": "left", "net2": "right"}[active], "down")
    bonded.wait_until(lambda: ping(netns, "10.90.0.1", "bond0"), "the other port takes over")
    assert bonded.cni("CHECK", "c1", netns, "hello").code == 0


def test_nothing_is_left_of_it(bonded: Node) -> None:
    netns = bonded.add_netns()
    before = bonded.links()
    assert bonded.cni("ADD", "c1", netns, "hello").code == 0
    assert bonded.cni("DEL", "c1", netns, "hello").code == 0
    assert bonded.links(netns) == ["lo"]
    assert bonded.links() == before
    assert bonded.leftovers() == []
