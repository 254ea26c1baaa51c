"""The first DEL of a pod ends it, whatever went wrong before: plugins of the reference by what is gone, or was refused.

Engine, chain, record, kernel and plugin binaries are real. After the DEL no record, no lease, no link and no rule is
left; a device that was moved into the pod is the node's again, or went with its namespace.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.plugins.plugin import HostTools
from multus_daemon.spec.cni.errors import CniError
from tests.namespaces import remove_netns
from tests.netns import reference
from tests.netns.test_malformed import Node

KEPT = {"br63", "up0", "up1"}
IPAM: dict[str, Any] = {"type": "host-local", "subnet": "10.63.0.0/24"}
STATIC: dict[str, Any] = {"type": "static", "addresses": [{"address": "10.64.0.2/24"}]}
IPAMS: dict[str, dict[str, Any] | None] = {"host-local": IPAM, "static": STATIC, "none": None}
MASTER = {"master": "up0"}
MAKES: dict[str, dict[str, Any]] = {
    "bridge": {"bridge": "br63", "isGateway": True},
    "dummy": {},
    "host-device": {"device": "up0"},
    "ipvlan": MASTER,
    "macvlan": MASTER,
    "ptp": {},
    "tap": {},
    "vlan": MASTER | {"vlanId": 5},
}
"""Plugins that make an interface, with what they need."""
CHAINED: dict[str, dict[str, Any]] = {
    "bandwidth": {"ingressRate": 8000000, "ingressBurst": 8000000},
    "firewall": {"backend": "iptables"},
    "portmap": {"runtimeConfig": {"portMappings": [{"hostPort": 8063, "containerPort": 80, "protocol": "tcp"}]}},
    "sbr": {},
    "tuning": {"mtu": 1400},
    "vrf": {"vrfname": "red"},
}
"""Plugins behind one that makes an interface."""


def whole(plugin: str, ipam: dict[str, Any] | None = IPAM) -> list[dict[str, Any]]:
    """The plugins of a network with `plugin`."""
    if plugin in MAKES:
        return [{"type": plugin, **MAKES[plugin], **({"ipam": ipam} if ipam else {})}]
    return [*whole("ptp"), {"type": plugin, **CHAINED[plugin]}]


def gone(name: str, netns: Any, host: Any) -> str:
    """Take away what the fault names; return the path that the runtime passes to the DEL."""
    if name == "link":
        for ifname in netns.links() & {"net1"}:
            netns.run("ip", "link", "del", ifname)
    elif name in ("namespace", "path"):
        remove_netns(Path(netns.path))
    elif name == "master":
        # With it go its other end, wherever that is, and the links on top of it.
        host.run("ip", "link", "del", "up1")
    return "" if name == "path" else str(netns.path)


@pytest.fixture
def node(host: Any, tmp_path: Path, tools: HostTools) -> Node:
    """A node with `up0`, and with a binary of each plugin."""
    host.batch("link add up0 type veth peer name up1", "link set up0 up")
    return Node(tmp_path, "fallback", tools)


def require(*plugins: str) -> None:
    """Skip the test without these programs."""
    if not reference.has("loopback", "host-local", "static", *plugins):
        pytest.skip(f"no reference plugins {', '.join(plugins)}: {reference.HOW}")


def add(node: Node, netns: Any, plugins: list[dict[str, Any]], version: str = "1.0.0") -> str:
    """Run the ADD of a pod with these plugins; return its error, empty after a success."""
    node.put("web", "n1", plugins, version)
    node.engine.declare("n1")
    try:
        node.engine.verbs.add(node.engine.request(netns=netns.path))
    except CniError as error:
        return str(error)
    return ""


def require_nothing(node: Node, host: Any) -> None:
    """Nothing of the pod is left: no record, no lease, no rule, and no link on the node but `up0` and the bridge."""
    assert (node.store.containers(), node.leases()) == ([], [])
    assert not [path for path in (node.directory / "cni").rglob("*") if path.is_file()]
    # They go with the namespace, which the kernel removes a little later.
    end = time.monotonic() + 10
    while not host.links() <= KEPT and time.monotonic() < end:
        time.sleep(0.02)
    assert host.links() <= KEPT
    assert [line for line in reference.rules(host) if "n1" in line or "10.63.0.2" in line or "8063" in line] == []


@pytest.mark.weak_spot(64)
@pytest.mark.parametrize("fault", ["nothing", "link", "namespace", "path", "master"])
@pytest.mark.parametrize(
    ("plugin", "ipam"),
    [(plugin, ipam) for plugin in MAKES for ipam in ("host-local", "static", "none")]
    + [(plugin, "host-local") for plugin in CHAINED],
)
def test_what_is_gone_fails_no_del(
    plugin: str, ipam: str, fault: str, node: Node, host: Any, make_netns: Callable[[], Any]
) -> None:
    require(plugin, "ptp")
    netns, plugins = make_netns(), whole(plugin, IPAMS[ipam])
    if plugins[0]["type"] in ("bridge", "ptp"):
        plugins[0]["ipMasq"] = True
    add(node, netns, plugins)
    node.engine.verbs.delete(node.engine.request("DEL", netns=gone(fault, netns, host)))
    require_nothing(node, host)


FAILING: dict[str, list[dict[str, Any]]] = {
    **{
        f"{plugin}-no-link": [{"type": plugin, "ipam": IPAM, **MAKES[plugin], key: "gone0"}]
        for plugin, key in {
            "host-device": "device",
            "ipvlan": "master",
            "macvlan": "master",
            "vlan": "master",
        }.items()
    },
    **{
        f"{plugin}-no-default-route": [{"type": plugin, "ipam": IPAM, **MAKES[plugin], "master": ""}]
        for plugin in ("ipvlan", "macvlan")
    },
    **{f"{plugin}-no-dhcp": whole(plugin, {"type": "dhcp"}) for plugin in MAKES},
    **{
        f"{plugin}-exhausted": whole(plugin, {"type": "static", "addresses": [{"address": "10.64.0.2/24"}] * 2})
        for plugin in MAKES
    },
    "firewall-alone": [{"type": "firewall"}],
    "portmap-bit": [*whole("ptp"), {"type": "portmap", "markMasqBit": 99}],
    "tuning-sysctl": [*whole("ptp"), {"type": "tuning", "sysctl": {"net.ipv4.nowhere": "1"}}],
    "bandwidth-burst": [*whole("ptp"), {"type": "bandwidth", "ingressRate": 8, "ingressBurst": 0}],
    "vrf-no-name": [*whole("ptp"), {"type": "vrf"}],
    "sbr-alone": [{"type": "sbr"}],
    # https://github.com/k8snetworkplumbingwg has these.
    "bond-no-links": [{"type": "bond", "mode": "active-backup", "links": [{"name": "gone0"}], "ipam": IPAM}],
    "ib-sriov-no-device": [{"type": "ib-sriov", "deviceID": "0000:ff:1f.7", "ipam": IPAM}],
    "ovs-no-database": [{"type": "ovs", "bridge": "br0", "ipam": IPAM}],
    "rdma-alone": [{"type": "rdma"}],
    "sriov-no-device": [{"type": "sriov", "deviceID": "0000:ff:1f.7", "ipam": IPAM}],
}
"""Networks whose ADD fails."""
HOST_RULES = ("portmap-bit", "bandwidth-burst")
"""An ADD of these that was cut off may have left something on the host."""


@pytest.mark.parametrize("fault", ["nothing", "link", "namespace", "path"])
@pytest.mark.parametrize("name", FAILING)
def test_an_add_that_fails_leaves_no_record(
    name: str, fault: str, node: Node, host: Any, make_netns: Callable[[], Any]
) -> None:
    require(*(plugin["type"] for plugin in FAILING[name]), "dhcp")
    netns = make_netns()
    assert add(node, netns, FAILING[name])
    assert node.store.containers() == [], "the ADD has undone it"
    if name not in HOST_RULES:
        # After a crash in the middle of the ADD, its end is not known.
        node.record(FAILING[name], netns.path)
    node.engine.verbs.delete(node.engine.request("DEL", netns=gone(fault, netns, host)))
    require_nothing(node, host)
    assert "up0" in host.links()


OLD = """#!/bin/sh
echo '{{"cniVersion": "1.0.0", "code": 1, "msg": "incompatible CNI versions", "details": "{name}"}}'
exit 1
"""
"""A plugin that does not know the version of the configuration."""


@pytest.mark.parametrize("place", ["alone", "last", "ipam", "ipam-of-host-device", "firewall"])
@pytest.mark.parametrize("is_corrected", [False, True])
def test_a_plugin_that_refuses_the_version_fails_no_del(
    place: str, is_corrected: bool, host: Any, make_netns: Callable[[], Any], tmp_path: Path, tools: HostTools
) -> None:
    require("bridge", "firewall", "host-device")
    host.batch("link add up0 type veth peer name up1", "link set up0 up")
    old = tmp_path / "bin" / "old"
    old.parent.mkdir()
    old.write_text(OLD.format(name="old"))
    old.chmod(0o755)
    node = Node(tmp_path, "fallback", tools, bin_dirs=[reference.DIRECTORY, old.parent])
    bridge = whole("bridge")
    networks: dict[str, list[dict[str, Any]]] = {
        "alone": [{"type": "old"}],
        "last": [*bridge, {"type": "old"}],
        "ipam": whole("bridge", {"type": "old"}),
        "ipam-of-host-device": whole("host-device", {"type": "old"}),
        "firewall": [*bridge, {"type": "firewall"}],
    }
    netns = make_netns()
    assert "incompatible CNI version" in add(node, netns, networks[place], "0.3.1")
    assert node.store.containers() == []
    assert "up0" in host.links(), "a device that was moved into the pod is back"
    node.record(networks[place], netns.path, version="0.3.1")
    if is_corrected:
        node.put("web", "n1", bridge, "1.0.0")
    node.engine.verbs.delete(node.engine.request("DEL", netns=netns.path))
    require_nothing(node, host)


def test_a_plugin_that_refuses_what_it_has_added_is_asked_again(
    host: Any, make_netns: Callable[[], Any], tmp_path: Path, tools: HostTools
) -> None:
    """It was replaced by an older one, and what it has left is freed when it is back."""
    require("bridge")
    plugin = tmp_path / "bin" / "fabric"
    plugin.parent.mkdir()
    plugin.write_text('#!/bin/sh\necho \'{"cniVersion": "1.0.0"}\'\n')
    plugin.chmod(0o755)
    node, netns = Node(tmp_path, "fallback", tools, bin_dirs=[reference.DIRECTORY, plugin.parent]), make_netns()
    assert not add(node, netns, [*whole("bridge"), {"type": "fabric"}])
    good = plugin.read_text()
    plugin.write_text(OLD.format(name="fabric"))
    with pytest.raises(CniError, match="^incompatible CNI versions"):
        node.engine.verbs.delete(node.engine.request("DEL", netns=netns.path))
    assert node.store.containers() == ["c1"]
    plugin.write_text(good)
    node.engine.verbs.delete(node.engine.request("DEL", netns=netns.path))
    require_nothing(node, host)


def test_a_device_that_is_in_the_pod_comes_back_although_its_ipam_fails(
    node: Node, host: Any, make_netns: Callable[[], Any]
) -> None:
    require("host-device", "dhcp")
    netns = make_netns()
    assert "up0" not in {*netns.links()}
    assert add(node, netns, whole("host-device", {"type": "dhcp"}))
    assert ("up0" in host.links(), netns.links()) == (True, set())
