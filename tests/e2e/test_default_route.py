"""`default-route` of a network selection, through the whole daemon: kernel, result, cache, status, CHECK and DEL."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from multus_daemon.plugins import cache
from tests.e2e.node import Node
from tests.e2e.test_standalone import status_of

V4, V6 = "10.83.1.1", "fd83:1::1"
ANYWHERE = {4: "0.0.0.0/0", 6: "::/0"}
# With its gateway: CHECK of the reference plugins (1.1.1) does not find a route without.
OTHER = {"dst": "10.90.0.0/16", "gw": "10.83.0.1"}


def dual_stack(node: Node, name: str, number: int, namespace: str, *routes: dict[str, str]) -> None:
    """Declare a ptp network with addresses of both families."""
    ipam = {
        "type": "host-local",
        "ranges": [[{"subnet": f"10.83.{number}.0/24"}], [{"subnet": f"fd83:{number}::/64"}]],
        "routes": list(routes),
        "dataDir": str(node.networks_dir),
    }
    node.network(name, {"cniVersion": "1.0.0", "name": name, "type": "ptp", "ipam": ipam}, namespace)


@pytest.fixture(params=["built in", "reference"])
def node(request: pytest.FixtureRequest, make_node: Callable[..., Node]) -> Node:
    """A dual-stack cluster network with default routes, and one without to ask for; not started."""
    settings = {}
    if request.param == "reference":
        settings = {"binDir": str(request.getfixturevalue("reference")), "builtinPlugins": "off"}
    node = make_node(settings=settings)
    dual_stack(node, "cluster", 0, "kube-system", *({"dst": dst} for dst in ANYWHERE.values()), OTHER)
    dual_stack(node, "storage", 1, "default")
    return node


def kernel(node: Node, netns: str, family: int) -> list[tuple[str, str]]:
    """Gateway and interface of each default route."""
    found = node.ip(f"-{family}", "route", "show", "default", netns=netns)
    return [(item["gateway"], item["dev"]) for item in found]


def cached_routes(node: Node) -> dict[str, list[dict[str, str]]]:
    """The routes in libcni's cache, by interface."""
    entries = [cache.decode(path.read_bytes()) for path in (node.cni_dir / "results").iterdir()]
    return {entry.ifname: (entry.result or {}).get("routes", []) for entry in entries}


@pytest.mark.weak_spot(2, 16, 17)
@pytest.mark.npwg("4.1.2.1.9a")
@pytest.mark.conformance("routes-5", "e2e-4")
@pytest.mark.parametrize("asked", [[V4], [V6], [V4, V6]], ids=["IPv4", "IPv6", "both"])
def test_the_default_route_goes_where_the_pod_asked_for_it(node: Node, asked: list[str]) -> None:
    node.pod("hello", json.dumps([{"name": "storage", "default-route": asked}]))
    node.start()
    before = node.links()
    netns = node.add_netns()
    added = node.cni("ADD", "c1", netns, "hello")
    assert added.code == 0, added.stdout

    moved = {6 if ":" in gateway else 4: gateway for gateway in asked}
    stays = {4: "10.83.0.1", 6: "fd83::1"}
    for family in (4, 6):
        expected = (moved[family], "net1") if family in moved else (stays[family], "eth0")
        assert kernel(node, netns, family) == [expected]
    kept = [{"dst": dst} for family, dst in ANYWHERE.items() if family not in moved]
    assert [route for route in added.json["routes"] if route["dst"] in ANYWHERE.values()] == kept
    assert OTHER in added.json["routes"]
    assert cached_routes(node) == {
        "eth0": added.json["routes"],
        "net1": [{"dst": ANYWHERE[family], "gw": gateway} for family, gateway in moved.items()],
    }
    eth0, net1 = status_of(node, "hello")
    assert (eth0["default"], net1["default"]) == (True, False)
    assert (net1["gateway"], net1["default-route"]) == (asked, asked)
    assert "default-route" not in eth0
    checked = node.cni("CHECK", "c1", netns, "hello")
    assert checked.code == 0, checked.stdout

    again = node.cni("ADD", "c1", netns, "hello")
    assert (again.code, again.stdout) == (0, added.stdout)
    assert node.cni("DEL", "c1", netns, "hello").code == 0
    assert (node.links(netns), node.links(), node.leftovers()) == (["lo"], before, [])


@pytest.mark.parametrize("node", ["reference"], indirect=True)
def test_a_bridge_with_a_default_gateway_of_its_own_gives_way(node: Node) -> None:
    ipam = {"type": "host-local", "subnet": "10.83.5.0/24", "dataDir": str(node.networks_dir)}
    config = {"type": "bridge", "bridge": "mbdr0", "isDefaultGateway": True, "ipam": ipam}
    node.network("lan", {"cniVersion": "1.0.0", "name": "lan", **config}, "default")
    node.pod("hello", json.dumps([{"name": "storage", "default-route": [V4]}, {"name": "lan"}]))
    node.start()
    netns = node.add_netns()
    added = node.cni("ADD", "c1", netns, "hello")
    assert added.code == 0, added.stdout
    assert kernel(node, netns, 4) == [(V4, "net1")]
    assert cached_routes(node)["net2"] == []
    assert node.cni("CHECK", "c1", netns, "hello").code == 0
    assert node.cni("DEL", "c1", netns, "hello").code == 0
    assert node.leftovers() == []
