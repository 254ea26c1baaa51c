"""CRI-O's way to call plugins: ocicni, the library that it has for this, by the tool of its source tree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.cluster.multus import MultusProcess
from tests.e2e.cluster.real_node import LINKS, RealNode
from tests.e2e.cluster.workload import BRIDGE, leftovers, network, status, two_networks
from tests.netns import beside
from tests.programs import given

RUNS: Final = ("ocicni, with which CRI-O calls plugins",)
pytest_plugins = ["tests.e2e.cluster.fixtures"]

NETNS = "/run/netns/p1"
CARD = "ocicni0"
_LIMITS = dict.fromkeys(("ingressRate", "ingressBurst", "egressRate", "egressBurst"), 1_000_000)
_ADDRESS = {"ipam": {"type": "static", "addresses": [{"address": "10.93.0.2/24", "gateway": "10.93.0.1"}]}}
BUILTINS: dict[str, list[dict[str, Any]]] = {
    "ptp": [{"type": "ptp", "ipMasq": True, **_ADDRESS}],
    "bandwidth": [{"type": "ptp", **_ADDRESS}, {"type": "bandwidth", **_LIMITS}],
    "portmap": [{"type": "ptp", **_ADDRESS}, {"type": "portmap", "capabilities": {"portMappings": True}}],
    "firewall": [{"type": "ptp", **_ADDRESS}, {"type": "firewall", "backend": "iptables"}],
    "sbr": [{"type": "ptp", **_ADDRESS}, {"type": "sbr"}],
    "tuning": [{"type": "ptp", **_ADDRESS}, {"type": "tuning", "mtu": 1400, "mac": "02:00:00:00:00:77"}],
    "host-device": [{"type": "host-device", "device": CARD, **_ADDRESS}],
    "tap": [{"type": "tap", **_ADDRESS}],
    "vlan": [{"type": "vlan", "master": "eth0", "vlanId": 7, **_ADDRESS}],
    "ipvlan": [{"type": "ipvlan", "master": "eth0", **_ADDRESS}],
    "dummy": [{"type": "dummy", **_ADDRESS}],
    "vrf": [{"type": "ptp", **_ADDRESS}, {"type": "vrf", "vrfname": "red"}],
}
_KINDS = ("vlan", "ipvlan", "dummy", "vrf")


@pytest.fixture
def ocicni() -> Path:
    return given("WIDE_OCICNI")


@pytest.fixture
def node(ocicni: Path, real_node: RealNode, request: pytest.FixtureRequest) -> Iterator[RealNode]:
    """A node with our daemon, and a namespace; the pod `p1` of two networks is no kubelet's."""
    daemon = MultusProcess(real_node)
    daemon.install()
    daemon.start()
    two_networks(real_node)
    for name, plugins in BUILTINS.items():
        network(real_node, name, *plugins)
    networks = getattr(request, "param", "blue,green@fast")
    real_node.pod("p1", networks=networks, schedulingGates=[{"name": "example.com/never"}])
    real_node.machine.run("ip", "netns", "add", "p1")
    yield real_node
    real_node.machine.run("sh", "-c", f"ip netns delete p1; ip link delete {BRIDGE}; true")
    real_node.server.delete_pod("p1", "default", grace=0)
    daemon.uninstall()
    assert real_node.links() == LINKS


def test_a_pod_is_added_asked_for_and_deleted(node: RealNode, ocicni: Path) -> None:
    def call(verb: str) -> str:
        return node.machine.run(str(ocicni), verb, "default", "p1", "c1", NETNS)

    added = call("add")
    entries = status(node.server.get("v1", "Pod", "p1"))
    assert [(entry["name"], entry["interface"]) for entry in entries] == [
        ("primary", "eth0"),
        ("default/blue", "net1"),
        ("default/green", "fast"),
    ]
    # CRI-O knows only the cluster network.
    assert added.splitlines() == [f"IP: {entries[0]['ips'][0]}/16 (eth0 {entries[0]['mac']})"]
    assert call("status") == added
    for _ in range(2):
        # The kubelet asks CRI-O until it has heard that it is done.
        call("del")
    assert leftovers(node) == []


def test_a_namespace_that_has_gone_is_deleted(node: RealNode, ocicni: Path) -> None:
    node.machine.run(str(ocicni), "add", "default", "p1", "c1", NETNS)
    node.machine.run("ip", "netns", "delete", "p1")
    node.machine.run(str(ocicni), "del", "default", "p1", "c1", NETNS)
    assert leftovers(node) == []


def _asked(builtin: str) -> str:
    ports = (
        {"portMappings": [{"hostPort": 8053, "containerPort": 53, "protocol": "udp"}]} if builtin == "portmap" else {}
    )
    return json.dumps([{"name": builtin, **ports}])


@pytest.mark.parametrize(
    ("builtin", "node"),
    [
        pytest.param(name, _asked(name), id=name, marks=beside.needs_kind(name) if name in _KINDS else ())
        for name in BUILTINS
    ],
    indirect=["node"],
)
def test_what_a_built_in_has_just_made_is_as_it_says(builtin: str, node: RealNode, ocicni: Path) -> None:
    """CRI-O asks at once after an ADD, and fails the pod if CHECK fails."""
    node.machine.run("sh", "-c", f"ip link add {CARD} type veth peer name {CARD}b; ip link set {CARD}b up")
    try:
        added = node.machine.run(str(ocicni), "add", "default", "p1", "c1", NETNS)
        assert [entry["name"] for entry in status(node.server.get("v1", "Pod", "p1"))] == [
            "primary",
            f"default/{builtin}",
        ]
        assert node.machine.run(str(ocicni), "status", "default", "p1", "c1", NETNS) == added
        node.machine.run(str(ocicni), "del", "default", "p1", "c1", NETNS)
    finally:
        node.machine.run("ip", "link", "del", CARD)
    assert leftovers(node) == []
