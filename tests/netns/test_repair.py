"""What somebody breaks of an attachment is reported, and brought back by the built-ins that made it.

MULTUS_REPAIRS: number of random breaks, 300 by default; they are spread over the configurations.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from dataclasses import replace as with_values
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.plugins.plugin import Difference, HostTools
from multus_daemon.plugins.run import Chain
from multus_daemon.spec.attachment import BUILT_IN, Attachment, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import InvalidNetnsError
from multus_daemon.spec.cni.names import ContainerId, IfName
from tests import calls
from tests.netns import outcome, reference
from tests.netns.conftest import remove_netns
from tests.planning import plan_one

ROUNDS = 3
BREAKS = int(os.environ.get("MULTUS_REPAIRS", "300"))
V4 = [{"subnet": "10.1.0.0/24"}]
OTHER_V4 = [{"subnet": "10.2.0.0/24"}]
V6 = [{"subnet": "fd00:1::/64"}]
ROUTES = [{"dst": "0.0.0.0/0"}, {"dst": "192.0.2.0/24"}]


class Attached:
    """An attachment of a list of plugins."""

    def __init__(
        self, chain: Chain, path: str, plugins: list[dict[str, Any]], *, version: str = "1.0.0", **known: Any
    ) -> None:
        self.chain = chain
        self.sandbox = Sandbox(ContainerId("container1"), path)
        fields = {"cniVersion": version, "name": "testnet", "plugins": plugins}
        attachment = Attachment("web/testnet", conf.parse(json.dumps(fields).encode()), IfName("net1"), **known)
        planned = plan_one(chain, self.sandbox, attachment)
        result = calls.add(chain, self.sandbox, planned)
        self.attachment = planned.with_result(result)

    @property
    def port(self) -> str:
        """Name of the host's end."""
        return next(item.name for item in self.attachment.result.interfaces if item.name.startswith("veth"))

    def found(self) -> list[Difference]:
        with PodNetns(self.sandbox.netns) as netns:
            return self.chain.differences(self.sandbox, self.attachment, netns)

    def differences(self) -> list[str]:
        return [item.text for item in self.found()]

    def repair(self) -> list[str]:
        """Repair as the daemon does; return what is still different then."""
        with PodNetns(self.sandbox.netns) as netns:
            for _ in range(ROUNDS):
                found = self.chain.differences(self.sandbox, self.attachment, netns)
                for item in found:
                    if item.repair:
                        item.repair()
                if not found:
                    break
        return self.differences()

    def check(self) -> None:
        calls.check(self.chain, self.sandbox, self.attachment)


@pytest.fixture
def chain(tools: HostTools, tmp_path: Path) -> Chain:
    return Chain(outcome.dispatched("prefer", tools), ResultCache(tmp_path / "cache"), "/nowhere")


@dataclass(frozen=True)
class Case:
    """A configuration, and the ways to break an attachment of it; `{port}` is the host's end."""

    plugins: list[dict[str, Any]]
    pod: tuple[str, ...] = ()
    """Commands in the pod's namespace."""
    host: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    """Commands on the host before the ADD."""
    pod_setup: tuple[str, ...] = ()
    sysctls: tuple[tuple[str, str], ...] = field(default=())
    """Sysctls of the host that break it."""
    pod_sysctls: tuple[tuple[str, str], ...] = field(default=())


def _ipam(*ranges: list[dict[str, Any]], routes: list[dict[str, str]] | None = None) -> dict[str, Any]:
    return {"type": "host-local", "ranges": list(ranges), "routes": ROUTES if routes is None else routes}


def _bridge(**keys: Any) -> dict[str, Any]:
    return {"type": "bridge", "bridge": "br0", "isGateway": True, "ipam": _ipam(V4), **keys}


def _ptp(**keys: Any) -> dict[str, Any]:
    return {"type": "ptp", "ipam": _ipam(V4), **keys}


def _macvlan(**keys: Any) -> dict[str, Any]:
    return {"type": "macvlan", "master": "up0", "ipam": _ipam(V4, routes=[{"dst": "192.0.2.0/24"}]), **keys}


IN_POD = (
    "ip link del net1",
    "ip link set net1 down",
    "ip link set net1 address 02:00:00:00:00:11",
    "ip addr del 10.1.0.2/24 dev net1",
    "ip route del 192.0.2.0/24",
    "ip route flush dev net1",
)
PAIR_ON_HOST = ("ip link del {port}", "ip link set {port} down", "ip link set {port} address 02:00:00:00:00:12")
PORT = ("ip link set {port} nomaster", "ip link set {port} mtu 1300")
BRIDGE = ("ip link del br0", "ip link set br0 down", "ip addr flush dev br0 scope global")
MTU = ("ip link set net1 mtu 1400",)
DEFAULT = ("ip route del default",)
V6_IN_POD = ("ip -6 addr del fd00:1::2/64 dev net1", "ip -6 route flush dev net1")
V4_FORWARD = (("net/ipv4/ip_forward", "0"),)
V6_FORWARD = (("net/ipv6/conf/all/forwarding", "0"),)
MASTER = ("link add up0 type veth peer name up1", "link set up0 up", "link set up1 up")
TUNING = {
    "type": "tuning",
    "mac": "02:00:00:00:00:22",
    "mtu": 1420,
    "promisc": True,
    "allmulti": True,
    "txQLen": 77,
    "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1", "net.ipv4.tcp_fin_timeout": "0x20"},
}
TUNED = (
    "ip link set net1 mtu 1300",
    "ip link set net1 promisc off",
    "ip link set net1 allmulticast off",
    "ip link set net1 txqueuelen 5",
)
UNTUNED = (("net/ipv4/conf/net1/arp_filter", "0"), ("net/ipv4/tcp_fin_timeout", "30"))

CASES = {
    "bridge": Case([_bridge()], (*IN_POD, *MTU, *DEFAULT), (*PAIR_ON_HOST, *PORT, *BRIDGE), sysctls=V4_FORWARD),
    "bridge-default-gateway": Case(
        [_bridge(isDefaultGateway=True, isGateway=None, ipam=_ipam(V4, routes=[{"dst": "192.0.2.0/24"}]))],
        (*IN_POD, *DEFAULT),
        (*PAIR_ON_HOST, *BRIDGE),
    ),
    "bridge-layer-2": Case(
        [_bridge(isGateway=None, ipam={})],
        ("ip link del net1", "ip link set net1 down", *MTU),
        (*PAIR_ON_HOST, *PORT, *BRIDGE[:2]),
    ),
    "bridge-disabled": Case(
        [_bridge(isGateway=None, ipam={}, disableContainerInterface=True)], ("ip link del net1",), PAIR_ON_HOST
    ),
    "bridge-dual": Case(
        [_bridge(ipam=_ipam(V4, V6, routes=[*ROUTES, {"dst": "::/0"}]), mtu=1450)],
        (*IN_POD, *V6_IN_POD, *MTU, *DEFAULT, "ip -6 route del default"),
        (*PAIR_ON_HOST, *PORT, *BRIDGE),
        sysctls=(*V4_FORWARD, *V6_FORWARD),
        pod_sysctls=(("net/ipv6/conf/net1/disable_ipv6", "1"),),
    ),
    "bridge-two-ranges": Case(
        [_bridge(isGateway=None, ipam=_ipam(V4, OTHER_V4))],
        (*IN_POD, "ip addr del 10.2.0.2/24 dev net1"),
        (*PAIR_ON_HOST, *PORT),
    ),
    "bridge-force": Case(
        [_bridge(forceAddress=True, ipam=_ipam(V4, OTHER_V4))],
        IN_POD,
        (*PAIR_ON_HOST, *BRIDGE),
        setup=("link add br0 type bridge", "addr add 10.77.0.1/24 dev br0"),
    ),
    "bridge-port": Case(
        [_bridge(hairpinMode=True, portIsolation=True)],
        IN_POD,
        (*PORT, *BRIDGE, "bridge link set dev {port} hairpin off", "bridge link set dev {port} isolated off"),
    ),
    "bridge-promiscuous": Case([_bridge(promiscMode=True)], IN_POD, (*BRIDGE, "ip link set br0 promisc off")),
    "bridge-iptables": Case(
        [_bridge(ipMasq=True, ipMasqBackend="iptables", macspoofchk=True, ipam=_ipam(V4, V6))],
        ("ip link del net1",),
        (
            "iptables -w -t nat -F",
            "iptables -w -t nat -F POSTROUTING",
            "ip6tables -w -t nat -F",
            "nft flush table bridge nat",
            "nft delete table bridge nat",
            "nft flush chain bridge nat cni-br-iface-container1-net1-mac",
        ),
    ),
    "bridge-nftables": Case(
        [_bridge(ipMasq=True, ipMasqBackend="nftables", ipam=_ipam(V4, V6))],
        ("ip link del net1",),
        (
            "nft flush chain inet cni_plugins_masquerade masq_checks",
            "nft flush chain inet cni_plugins_masquerade postrouting",
            "nft delete table inet cni_plugins_masquerade",
        ),
    ),
    "ptp": Case([_ptp()], (*IN_POD, *MTU, *DEFAULT, "ip route del 10.1.0.1"), PAIR_ON_HOST, sysctls=V4_FORWARD),
    "ptp-dual": Case(
        [_ptp(ipam=_ipam(V4, V6, routes=[*ROUTES, {"dst": "::/0"}]), mtu=1450)],
        (*IN_POD, *V6_IN_POD, *MTU, "ip -6 route del default"),
        (
            *PAIR_ON_HOST,
            "ip addr flush dev {port} scope global",
            "ip -6 addr flush dev {port} scope global",
            "ip route flush dev {port}",
            "ip -6 route del fd00:1::2",
        ),
        sysctls=(*V4_FORWARD, *V6_FORWARD),
    ),
    "ptp-masquerading": Case([_ptp(ipMasq=True)], ("ip link del net1",), ("iptables -w -t nat -F",)),
    "macvlan": Case([_macvlan()], IN_POD, setup=MASTER),
    "macvlan-master": Case([_macvlan(mtu=1400)], (*IN_POD, "ip link set net1 mtu 1300"), setup=MASTER),
    "macvlan-dual": Case(
        [_macvlan(ipam=_ipam(V4, V6, routes=[{"dst": "192.0.2.0/24"}, {"dst": "2001:db8::/32"}]))],
        (*IN_POD, *V6_IN_POD),
        setup=MASTER,
    ),
    "macvlan-in-pod": Case([_macvlan(linkInContainer=True, mode="private")], IN_POD, pod_setup=MASTER),
    "bridge-tuning": Case([_bridge(), TUNING], (*IN_POD, *TUNED), PAIR_ON_HOST, pod_sysctls=UNTUNED),
    "ptp-tuning": Case([_ptp(), TUNING], (*IN_POD, *TUNED), PAIR_ON_HOST, pod_sysctls=UNTUNED),
    "loopback": Case([{"type": "loopback"}], ("ip link set lo down", "ip addr del 127.0.0.1/8 dev lo")),
}


def attached(case: Case, chain: Chain, host: Any, netns: Any, tmp_path: Path, **known: Any) -> Attached:
    """Attach a configuration, with leases of its own."""
    host.batch(*case.setup)
    netns.batch(*case.pod_setup)
    plugins = []
    for plugin in case.plugins:
        keys = {key: value for key, value in plugin.items() if value is not None}
        if keys.get("ipam"):
            keys["ipam"] = keys["ipam"] | {"dataDir": str(tmp_path / "ipam")}
        if plugin["type"] == "tuning":
            keys["dataDir"] = str(tmp_path / "tuning")
        plugins.append(keys)
    return Attached(chain, netns.path, plugins, **known)


def breaks(case: Case, host: Any, netns: Any, made: Attached) -> list[tuple[str, Callable[[], object]]]:
    """Every way to break the attachment, by name. A command fails if another one has removed its object."""

    def command(side: Any, text: str) -> Callable[[], object]:
        line = text.format(port=made.port) if "{port}" in text else text
        return lambda: side.run("sh", "-c", f"{line} 2>/dev/null || true")

    def sysctl(side: Any, name: str, value: str) -> Callable[[], object]:
        return lambda: side.run("sh", "-c", f"echo {value} >/proc/sys/{name} 2>/dev/null || true")

    return [
        *((text, command(netns, text)) for text in case.pod),
        *((text, command(host, text)) for text in case.host),
        *((name, sysctl(host, name, value)) for name, value in case.sysctls),
        *((name, sysctl(netns, name, value)) for name, value in case.pod_sysctls),
    ]


_VOLATILE = re.compile(r'"(protocol|ifindex|link_index|txqlen|flags|preferred_life_time|valid_life_time)"')


def state(side: Any, ifname: str) -> list[str]:
    """Link, addresses and routes of an interface, as lines."""
    (link,) = side.ip("addr", "show", "dev", ifname)
    addresses = [f"{item['local']}/{item['prefixlen']}" for item in link["addr_info"] if item["scope"] != "link"]
    routes = [
        " ".join(str(route.get(key, "")) for key in ("dst", "gateway", "prefsrc", "scope", "metric"))
        for family in ("-4", "-6")
        for route in side.ip(family, "route", "show", "dev", ifname)
        if not route["dst"].startswith(("fe80:", "ff00:"))
    ]
    return sorted([f"{link['address']} {link['mtu']} {link['flags'].count('UP')}", *addresses, *routes])


@pytest.mark.parametrize("name", CASES)
def test_an_untouched_attachment_has_no_difference(
    host: Any, netns: Any, chain: Chain, tmp_path: Path, name: str
) -> None:
    made = attached(CASES[name], chain, host, netns, tmp_path)
    assert made.attachment.is_built_in
    assert made.differences() == []


@pytest.mark.parametrize("name", CASES)
def test_each_object_comes_back(host: Any, netns: Any, chain: Chain, tmp_path: Path, name: str) -> None:
    """One at a time; the break is reported, and the kernel is as it was after the repair."""
    case = CASES[name]
    made = attached(case, chain, host, netns, tmp_path)
    ifname = "lo" if name == "loopback" else "net1"
    before = state(netns, ifname)
    for what, do in breaks(case, host, netns, made):
        do()
        found = made.found()
        assert found, f"not seen: {what}"
        assert all(item.repair for item in found), what
        assert made.repair() == [], what
        assert state(netns, ifname) == before, what
