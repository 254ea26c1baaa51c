"""What somebody breaks of an attachment is reported, and brought back by the built-ins that made it.

MULTUS_REPAIRS: number of random breaks, 1,000 by default, spread over the configurations; MULTUS_REPAIRS_SEED: others.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from dataclasses import replace as with_values
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.plugins.plugin import HostTools
from multus_daemon.plugins.process import ProcessRunner
from multus_daemon.plugins.run import ListRunner
from multus_daemon.plugins.select import Plugins
from multus_daemon.spec.attachment import BUILT_IN, Attachment, Difference, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import CniError, InvalidNetnsError
from multus_daemon.spec.cni.names import ContainerId, IfName
from tests import calls
from tests.namespaces import remove_netns
from tests.netns import beside, outcome, reference
from tests.planning import plan_one

ROUNDS = 3
BREAKS = int(os.environ.get("MULTUS_REPAIRS", "1000"))
SEED = os.environ.get("MULTUS_REPAIRS_SEED", "")
V4 = [{"subnet": "10.1.0.0/24"}]
OTHER_V4 = [{"subnet": "10.2.0.0/24"}]
V6 = [{"subnet": "fd00:1::/64"}]
ROUTES = [{"dst": "0.0.0.0/0"}, {"dst": "192.0.2.0/24"}]


class Attached:
    """An attachment of a list of plugins."""

    def __init__(
        self, chain: ListRunner, path: str, plugins: list[dict[str, Any]], *, version: str = "1.0.0", **known: Any
    ) -> None:
        self.chain = chain
        self.sandbox = Sandbox(ContainerId("container1"), path)
        fields = {"cniVersion": version, "name": "testnet", "plugins": plugins}
        attachment = Attachment("web/testnet", conf.parse(json.dumps(fields).encode()), IfName("net1"), **known)
        planned = plan_one(chain, self.sandbox, attachment)
        result = calls.add(chain, self.sandbox, planned)
        self.attachment = planned.with_result(result)
        self.result = result

    @property
    def port(self) -> str:
        """Name of the host's end."""
        return next(item.name for item in self.result.interfaces if item.name.startswith("veth"))

    def found(self) -> list[Difference]:
        with PodNetns(self.sandbox.netns) as netns:
            return self.chain.differences(self.sandbox, self.attachment, netns, asks=True)

    def differences(self) -> list[str]:
        return [item.text for item in self.found()]

    def repair(self) -> list[str]:
        """Repair as the daemon does; return what is still different then."""
        with PodNetns(self.sandbox.netns) as netns:
            for _ in range(ROUNDS):
                found = self.chain.differences(self.sandbox, self.attachment, netns, asks=True)
                for item in found:
                    if item.repair:
                        item.repair()
                if not found:
                    break
        return self.differences()

    def check(self) -> None:
        calls.check(self.chain, self.sandbox, self.attachment)


@pytest.fixture
def chain(tools: HostTools, tmp_path: Path) -> ListRunner:
    return ListRunner(outcome.dispatched("prefer", tools), ResultCache(tmp_path / "cache"), "/nowhere")


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
    kinds: tuple[str, ...] = ()
    """Kinds of links that not every kernel has."""


def _ipam(*ranges: list[dict[str, Any]], routes: list[dict[str, str]] | None = None) -> dict[str, Any]:
    return {"type": "host-local", "ranges": list(ranges), "routes": ROUTES if routes is None else routes}


def _bridge(**keys: Any) -> dict[str, Any]:
    return {"type": "bridge", "bridge": "br0", "isGateway": True, "ipam": _ipam(V4), **keys}


def _ptp(**keys: Any) -> dict[str, Any]:
    return {"type": "ptp", "ipam": _ipam(V4), **keys}


def _macvlan(**keys: Any) -> dict[str, Any]:
    return {"type": "macvlan", "master": "up0", "ipam": _ipam(V4, routes=[{"dst": "192.0.2.0/24"}]), **keys}


def _on_master(kind: str, **keys: Any) -> dict[str, Any]:
    return _macvlan(**keys) | {"type": kind}


def _portmap(**keys: Any) -> dict[str, Any]:
    ports = [{"hostPort": 8080, "containerPort": 80, "protocol": protocol} for protocol in ("tcp", "udp")]
    return {"type": "portmap", "runtimeConfig": {"portMappings": ports}, **keys}


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
    "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1", "net.ipv4.tcp_fin_timeout": "32"},
}
TUNED = (
    "ip link set net1 mtu 1300",
    "ip link set net1 promisc off",
    "ip link set net1 allmulticast off",
    "ip link set net1 txqueuelen 5",
)
UNTUNED = (("net/ipv4/conf/net1/arp_filter", "0"), ("net/ipv4/tcp_fin_timeout", "30"))

BANDWIDTH = {
    "type": "bandwidth",
    "ingressRate": 8_000_000,
    "ingressBurst": 1_600_000,
    "egressRate": 8_000_000,
    "egressBurst": 1_600_000,
}
IFB = "bwp9a2f7cdb1bac"
"""Of the container on the network."""
UNLIMITED = (
    "tc qdisc del dev {port} root",
    "tc qdisc del dev {port} ingress",
    f"tc qdisc del dev {IFB} root",
    f"ip link set {IFB} down",
    f"ip link del {IFB}",
)

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
    "vlan": Case([_on_master("vlan", vlanId=5)], IN_POD[:2] + IN_POD[3:], setup=MASTER, kinds=("vlan",)),
    "ipvlan": Case([_on_master("ipvlan", mode="l3")], IN_POD[:2] + IN_POD[3:], setup=MASTER, kinds=("ipvlan",)),
    "dummy": Case([{"type": "dummy", "ipam": _ipam(V4)}], (*IN_POD, *DEFAULT), kinds=("dummy",)),
    "tap": Case([{"type": "tap", "mtu": 1450, "ipam": _ipam(V4)}], (*IN_POD, *MTU, *DEFAULT)),
    "tap-bridge": Case(
        [{"type": "tap", "bridge": "br7"}],
        ("ip link del net1", "ip link set net1 down", "ip link set net1 nomaster"),
        pod_setup=("link add br7 type bridge",),
    ),
    "ptp-vrf": Case(
        [_ptp(), {"type": "vrf", "vrfname": "red"}],
        ("ip link del net1", "ip link set net1 nomaster", "ip link del red", "ip link set red down"),
        PAIR_ON_HOST,
        kinds=("vrf",),
    ),
    "bridge-tuning": Case([_bridge(), TUNING], (*IN_POD, *TUNED), PAIR_ON_HOST, pod_sysctls=UNTUNED),
    "ptp-tuning": Case([_ptp(), TUNING], (*IN_POD, *TUNED), PAIR_ON_HOST, pod_sysctls=UNTUNED),
    "bridge-bandwidth": Case([_bridge(), BANDWIDTH], IN_POD, (*PAIR_ON_HOST, *UNLIMITED)),
    "ptp-bandwidth": Case([_ptp(), BANDWIDTH], IN_POD, (*PAIR_ON_HOST, *UNLIMITED)),
    "ptp-portmap": Case(
        [_ptp(ipam=_ipam(V4, V6)), _portmap(backend="iptables")],
        ("ip link del net1",),
        (
            "iptables -w -t nat -F",
            "ip6tables -w -t nat -F CNI-HOSTPORT-DNAT",
            "iptables -w -t nat -F PREROUTING",
            "iptables -w -t nat -F POSTROUTING",
            "iptables -w -t nat -D CNI-HOSTPORT-DNAT 1",
            "iptables -w -t nat -F CNI-HOSTPORT-MASQ",
            "ip6tables -w -t nat -F CNI-HOSTPORT-SETMARK",
            "echo 0 >/proc/sys/net/ipv4/conf/{port}/route_localnet",
        ),
    ),
    "bridge-portmap-nftables": Case(
        [_bridge(ipam=_ipam(V4, V6)), _portmap(backend="nftables")],
        ("ip link del net1",),
        (
            *("ip link del br0", "nft delete table ip cni_hostport", "nft flush chain ip6 cni_hostport prerouting"),
            *(f"nft flush chain ip cni_hostport {chain}" for chain in ("hostports", "hostports_all", "masquerading")),
        ),
    ),
    "loopback": Case([{"type": "loopback"}], ("ip link set lo down", "ip addr del 127.0.0.1/8 dev lo")),
}


def attached(case: Case, chain: ListRunner, host: Any, netns: Any, tmp_path: Path, **known: Any) -> Attached:
    """Attach a configuration, with leases of its own."""
    for kind in case.kinds:
        beside.require_kind(kind)
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
    host: Any, netns: Any, chain: ListRunner, tmp_path: Path, name: str
) -> None:
    made = attached(CASES[name], chain, host, netns, tmp_path)
    assert made.attachment.is_built_in
    assert made.differences() == []


@pytest.mark.parametrize("name", CASES)
def test_each_object_comes_back(host: Any, netns: Any, chain: ListRunner, tmp_path: Path, name: str) -> None:
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


def test_vlans(host: Any, netns: Any, chain: ListRunner, tmp_path: Path) -> None:
    """The bridge made anew has the VLANs of the ports again, and the gateway in its VLAN."""
    try:
        host.run("ip", "link", "add", "probe0", "type", "bridge", "vlan_filtering", "1")
    except AssertionError:
        pytest.skip("the kernel's bridges have no VLANs: needs one with CONFIG_BRIDGE_VLAN_FILTERING")
    network = _bridge(vlan=5, vlanTrunk=[{"minID": 10, "maxID": 12}], ipam=_ipam(V4, V6))
    made = attached(Case([network]), chain, host, netns, tmp_path)
    assert made.differences() == []
    gateway = ("ip link del br0", "ip link del br0.5", "ip link del br0; ip link del br0.5")
    commands = (*gateway, f"bridge vlan del vid 11 dev {made.port}", "ip link del {port}")
    for command in commands:
        host.run("sh", "-c", command.format(port=made.port))
        assert made.differences(), command
        assert made.repair() == [], command
        for address in ("10.1.0.1", "fd00:1::1"):
            assert netns.reaches(address), (command, address)


@pytest.mark.parametrize("name", CASES)
def test_several_at_once_in_random_order(host: Any, netns: Any, chain: ListRunner, tmp_path: Path, name: str) -> None:
    """The kernel is as it was, CHECK agrees, and what somebody else has made is still there."""
    case = CASES[name]
    made = attached(case, chain, host, netns, tmp_path)
    ifname = "lo" if name == "loopback" else "net1"
    before = state(netns, ifname), state(host, made.port) if "veth" in str(made.result) else []
    for side in (host, netns):
        side.batch("link add other0 type bridge", "addr add 198.51.100.1/24 dev other0", "link set other0 up")
    of_others = state(host, "other0"), state(netns, "other0")
    chosen, left = random.Random(name + SEED), BREAKS / len(CASES)
    ways = breaks(case, host, netns, made)
    while left > 0:
        picked = chosen.sample(ways, min(len(ways), chosen.randint(1, 4)))
        left -= len(picked)
        for _, do in picked:
            do()
        assert made.repair() == [], [what for what, _ in picked]
        after = state(netns, ifname), state(host, made.port) if "veth" in str(made.result) else []
        assert after == before, [what for what, _ in picked]
    assert (state(host, "other0"), state(netns, "other0")) == of_others
    made.check()


@pytest.mark.parametrize("name", ["bridge", "bridge-iptables", "ptp", "macvlan", "bridge-tuning"])
def test_the_pods_other_interfaces_lose_no_packet(
    host: Any, netns: Any, chain: ListRunner, tmp_path: Path, name: str
) -> None:
    """A ping every 10 ms over another interface, while this one is broken and repaired."""
    case = CASES[name]
    made = attached(case, chain, host, netns, tmp_path)
    host.batch(
        f"link add other0 type veth peer name net2 netns {netns.path}",
        "addr add 198.51.100.1/24 dev other0",
        "link set other0 up",
    )
    netns.batch("addr add 198.51.100.2/24 dev net2", "link set net2 up")
    before = state(netns, "net2"), state(host, "other0")
    chosen, ways = random.Random(name + SEED), breaks(case, host, netns, made)
    with ThreadPoolExecutor(max_workers=1) as pool:
        ping = pool.submit(netns.replies, "198.51.100.1", count=300, wait=1, device="net2")
        while not ping.done():
            picked = chosen.sample(ways, chosen.randint(1, min(4, len(ways))))
            for _, do in picked:
                do()
            assert made.repair() == [], [what for what, _ in picked]
    assert ping.result() == 300
    assert (state(netns, "net2"), state(host, "other0")) == before


@pytest.mark.parametrize("name", ["bridge", "bridge-force", "ptp", "macvlan", "bridge-tuning"])
def test_addresses_and_routes_of_others_stay(
    host: Any, netns: Any, chain: ListRunner, tmp_path: Path, name: str
) -> None:
    """A virtual address of keepalived on the pod's interface; another network's gateway and port on the bridge."""
    case = CASES[name]
    made = attached(case, chain, host, netns, tmp_path)
    netns.batch("addr add 10.88.0.1/32 dev net1", "route add 203.0.113.0/24 dev net1 metric 7")
    with_bridge = name.startswith("bridge")
    if with_bridge:
        host.batch("addr add 10.99.0.1/24 dev br0", "link add other0 type veth peer name other1")
        host.batch("link set other0 master br0 up")
    assert made.differences() == []
    removing = ("link del", "br0 down", "flush", "net1 down")
    for what, do in breaks(case, host, netns, made):
        if any(word in what for word in removing):
            # The kernel, or the command, removes what others made too.
            continue
        do()
        assert made.differences(), what
        assert made.repair() == [], what
        assert "10.88.0.1/32" in state(netns, "net1"), what
        assert any(route["dst"] == "203.0.113.0/24" for route in netns.ip("route")), what
        if with_bridge:
            assert "10.99.0.1/24" in state(host, "br0"), what
            (port,) = host.ip("link", "show", "dev", "other0")
            assert port["master"] == "br0", what
    if with_bridge:
        host.run("ip", "addr", "del", "10.1.0.1/24" if name != "bridge-force" else "10.2.0.1/24", "dev", "br0")
        assert made.repair() == []
        assert "10.99.0.1/24" in state(host, "br0")


def test_a_master_that_returns(host: Any, netns: Any, chain: ListRunner, tmp_path: Path) -> None:
    made = attached(CASES["macvlan"], chain, host, netns, tmp_path)
    before = state(netns, "net1")
    host.run("ip", "link", "del", "up0")
    (found,) = made.found()
    assert found.text == 'interface "net1" is not there, and its master "up0" is not there'
    assert found.repair is None
    host.batch(*MASTER)
    assert made.differences() == ['interface "net1" is not there']
    assert made.repair() == []
    assert state(netns, "net1") == before
    made.check()


@pytest.mark.parametrize("name", ["bridge", "ptp", "macvlan"])
def test_a_link_of_somebody_else_under_our_name_stays(
    host: Any, netns: Any, chain: ListRunner, tmp_path: Path, name: str
) -> None:
    made = attached(CASES[name], chain, host, netns, tmp_path)
    netns.batch("link del net1", "link add net1 type bridge")
    links = netns.links(), host.links()
    (found,) = [item for item in made.found() if not item.on_host]
    assert found.text.startswith('"net1" is a bridge interface, not a ')
    assert found.repair is None
    assert made.repair() == [item.text for item in made.found()]
    assert (netns.links(), host.links()) == links


@pytest.mark.parametrize("version", ["0.4.0", "1.0.0"])
@pytest.mark.parametrize("name", ["bridge", "ptp", "macvlan"])
def test_a_renamed_interface_is_not_made_a_second_time(
    host: Any, netns: Any, chain: ListRunner, tmp_path: Path, name: str, version: str
) -> None:
    """It is the pod's doing."""
    made = attached(CASES[name], chain, host, netns, tmp_path, version=version)
    netns.batch("link set net1 down", "link set net1 name mine", "link set mine up")
    (found,) = made.found()
    assert (found.repair, found.by_pod, found.on_host) == (None, True, False)
    assert '"mine"' in found.text
    assert made.repair() == [found.text]
    assert netns.links() == {"mine"}


# --- virtual machines ------------------------------------------------------------------------------------------------


def shape(side: Any) -> list[tuple[Any, ...]]:
    """Each link with what a repair changes."""
    return [
        (
            *(link.get(key) for key in ("ifname", "address", "mtu", "master")),
            "UP" in link["flags"],
            *(item["local"] for item in link["addr_info"] if item["scope"] != "link"),
        )
        for link in side.ip("addr")
    ]


def bind(netns: Any, kind: str, mac: str) -> None:
    """Do to net1 what the bridge binding of KubeVirt does; a link of `kind` is in place of the dummy."""
    (before,) = netns.ip("addr", "show", "dev", "net1")
    addresses = [f"{item['local']}/{item['prefixlen']}" for item in before["addr_info"] if item["scope"] != "link"]
    netns.batch(
        "link set net1 down",
        "link set net1 name net1-nic",
        "addr flush dev net1-nic",
        "link add k6t-net1 type bridge",
        f"link add net1 address {mac or before['address']} type {kind}",
        "link set net1-nic address 02:00:00:00:00:77",
        "link set net1-nic master k6t-net1",
        *(f"link set {name} up" for name in ("k6t-net1", "net1-nic")),
        *(f"addr add {address} dev net1" for address in addresses),
    )


@pytest.mark.parametrize("kind", ["bridge", "veth peer name tap0"])
@pytest.mark.parametrize("name", ["bridge", "bridge-layer-2", "bridge-dual", "ptp", "macvlan", "bridge-tuning"])
def test_the_interface_of_a_virtual_machine_is_well(
    host: Any, netns: Any, chain: ListRunner, tmp_path: Path, name: str, kind: str
) -> None:
    made = attached(CASES[name], chain, host, netns, tmp_path)
    bind(netns, kind, "")
    before = shape(netns), shape(host)
    assert made.found() == []
    assert made.repair() == []
    made.check()
    assert (shape(netns), shape(host)) == before
    netns.run("ip", "link", "set", "net1-nic", "down")
    (found,) = made.found()
    assert (found.text, found.repair, found.by_pod) == ('"net1-nic", which was "net1", is down', None, False)
    with pytest.raises(CniError, match='"net1-nic", which was "net1", is down'):
        made.check()


@pytest.mark.parametrize("version", ["0.4.0", "1.0.0"])
def test_the_host_side_of_a_virtual_machine_is_kept(
    host: Any, netns: Any, chain: ListRunner, tmp_path: Path, version: str
) -> None:
    """Also where the result has no index of the interface."""
    made = attached(CASES["bridge"], chain, host, netns, tmp_path, version=version)
    bind(netns, "bridge", "02:00:00:00:00:78")
    assert made.found() == []
    inside = netns.ip("addr")
    host.run("ip", "link", "set", made.port, "nomaster")
    (found,) = made.found()
    assert (found.text, found.on_host) == (f"port {made.port} is not on bridge br0", True)
    assert made.repair() == []
    (port,) = host.ip("link", "show", "dev", made.port)
    assert port["master"] == "br0"
    assert [item["ifname"] for item in netns.ip("addr")] == [item["ifname"] for item in inside]
    host.run("ip", "link", "del", made.port)
    left = made.repair()
    assert left
    assert netns.links() == {"k6t-net1", "net1"}


# --- what the pod's whole ADD left -----------------------------------------------------------------------------------


def test_ports_of_a_bond_have_its_address_and_mtu(host: Any, netns: Any, chain: ListRunner, tmp_path: Path) -> None:
    """A bridge is in place of the bond, also of one that a later hot-plug makes: nothing is on record of it."""
    made = attached(CASES["bridge-layer-2"], chain, host, netns, tmp_path)
    netns.batch("link add bond0 type bridge", "link set net1 master bond0")
    netns.batch("link set net1 address 02:00:00:00:00:55", "link set net1 mtu 1400")
    assert made.found() == []
    made.check()
    # The bond has let it go, and has put the address back.
    netns.batch("link set net1 nomaster", f"link set net1 address {made.result.interfaces[-1].mac}")
    assert made.differences() == ['MTU of "net1" is 1400, not 1500']


@pytest.mark.parametrize("name", ["bridge", "ptp", "macvlan-master", "bridge-tuning"])
def test_what_a_later_network_has_changed_is_kept(
    host: Any, netns: Any, chain: ListRunner, tmp_path: Path, name: str
) -> None:
    """MAC address, MTU, an address and a route; what somebody changes after the ADD is brought back."""
    made = attached(CASES[name], chain, host, netns, tmp_path)
    netns.batch(
        "link set net1 address 02:00:00:00:00:55",
        "link set net1 mtu 1350",
        "route del 192.0.2.0/24",
        "addr add 10.9.0.1/24 dev net1",
    )
    observed(made)
    left = state(netns, "net1")
    assert made.found() == []
    assert made.repair() == []
    assert state(netns, "net1") == left
    changes = (
        "link set net1 address 02:00:00:00:00:66",
        "link set net1 mtu 1300",
        "addr del 10.1.0.2/24 dev net1",
        "route del 10.1.0.0/24",
    )
    for change in changes:
        netns.run("ip", *change.split())
        assert made.differences(), change
        assert made.repair() == [], change
    assert state(netns, "net1") == left


@pytest.mark.parametrize("name", ["bridge", "ptp", "bridge-tuning"])
def test_a_default_route_that_the_pod_removes(
    host: Any, netns: Any, chain: ListRunner, tmp_path: Path, name: str
) -> None:
    """Nothing outside of the pod does that while the interface is up and has its addresses."""
    made = attached(CASES[name], chain, host, netns, tmp_path)
    netns.run("ip", "route", "del", "default")
    (found,) = made.found()
    assert found.by_pod
    assert made.repair() == []
    for change in ("link set net1 down", "addr flush dev net1", "route flush dev net1"):
        netns.run("ip", *change.split())
        assert {item.by_pod for item in made.found()} == {False}, change
        assert made.repair() == []


def test_a_taken_name_of_the_hosts_end(host: Any, netns: Any, chain: ListRunner, tmp_path: Path) -> None:
    """The pair gets another one, and is found by it."""
    made = attached(CASES["bridge"], chain, host, netns, tmp_path)
    host.batch(f"link del {made.port}", f"link add {made.port} type bridge")
    assert made.repair() == []
    assert netns.reaches("10.1.0.1")
    (other,) = host.ip("-d", "link", "show", "dev", made.port)
    assert other["linkinfo"]["info_kind"] == "bridge"


def test_a_bridge_that_is_no_bridge(host: Any, netns: Any, chain: ListRunner, tmp_path: Path) -> None:
    made = attached(CASES["bridge"], chain, host, netns, tmp_path)
    host.batch("link del br0", "link add br0 type veth peer name br1")
    (found,) = made.found()
    assert (found.text, found.repair, found.on_host) == ('"br0" is a veth interface, not a bridge', None, True)


def test_a_bridge_that_is_made_anew_has_the_recorded_mac(
    host: Any, netns: Any, chain: ListRunner, tmp_path: Path
) -> None:
    """The neighbours of the pods know the gateway by it."""
    made = attached(CASES["bridge"], chain, host, netns, tmp_path)
    (before,) = host.ip("link", "show", "dev", "br0")
    host.run("ip", "link", "del", "br0")
    assert made.repair() == []
    (after,) = host.ip("link", "show", "dev", "br0")
    assert after["address"] == before["address"]
    made.check()


def test_an_exception_comes_before_the_rule_that_masquerades(
    host: Any, netns: Any, chain: ListRunner, tmp_path: Path
) -> None:
    made = attached(CASES["ptp-masquerading"], chain, host, netns, tmp_path)
    rules = host.run("iptables", "-w", "-t", "nat", "-S")
    (exception,) = re.findall("-A (CNI-.* -j ACCEPT)", rules)
    host.run("sh", "-c", f"iptables -w -t nat -D {exception}")
    assert made.differences() == ["masquerading rules for 10.1.0.2 are missing"]
    assert made.repair() == []
    assert host.run("iptables", "-w", "-t", "nat", "-S") == rules


@pytest.mark.parametrize("version", ["0.2.0", "0.3.1", "0.4.0"])
@pytest.mark.parametrize("name", ["bridge", "ptp"])
def test_results_of_old_versions(
    host: Any, netns: Any, chain: ListRunner, tmp_path: Path, name: str, version: str
) -> None:
    """Before 0.3.0 a result names no interface, so the pair gets other names and MAC addresses."""
    case = CASES[name]
    ipam = {"dataDir": str(tmp_path / "ipam"), "type": "host-local", "subnet": "10.1.0.0/24", "routes": ROUTES}
    made = Attached(chain, netns.path, [case.plugins[0] | {"ipam": ipam}], version=version)
    assert made.differences() == []
    for command in ("link set net1 down", "addr flush dev net1", "link del net1"):
        netns.run("ip", *command.split())
        assert made.differences()
        assert made.repair() == []
        assert netns.reaches("10.1.0.1")


def test_a_sysctl_that_the_kernel_shows_otherwise(host: Any, netns: Any, chain: ListRunner, tmp_path: Path) -> None:
    tuning = {"type": "tuning", "sysctl": {"net.ipv4.tcp_fin_timeout": "0x20", "net.ipv4.tcp_rmem": "4096 9000 10000"}}
    made = attached(Case([_bridge(), tuning]), chain, host, netns, tmp_path)
    assert made.differences() == []
    netns.set_sysctl("net/ipv4/tcp_rmem", "4096 8000 10000")
    assert made.differences() == ["sysctl net.ipv4.tcp_rmem is 4096\t8000\t10000, not 4096 9000 10000"]
    assert made.repair() == []


def test_flannel(host: Any, netns: Any, chain: ListRunner, tmp_path: Path) -> None:
    """Its delegate's; also after flanneld has another subnet for the node."""
    subnet = tmp_path / "subnet.env"
    text = "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.3.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"
    subnet.write_text(text)
    keys = {"subnetFile": str(subnet), "dataDir": str(tmp_path / "flannel"), "ipam": {"dataDir": str(tmp_path)}}
    made = Attached(chain, netns.path, [{"type": "flannel", "delegate": {"bridge": "br0"}, **keys}])
    assert made.differences() == []
    subnet.write_text(text.replace("10.244.3", "10.244.9").replace("1450", "1400"))
    before = state(netns, "net1")
    for side, command in ((netns, "link del net1"), (host, "link del br0"), (netns, "link set net1 mtu 1300")):
        side.run("ip", *command.split())
        assert made.differences()
        assert made.repair() == []
        assert state(netns, "net1") == before


def test_a_namespace_that_is_gone(host: Any, netns: Any, chain: ListRunner, tmp_path: Path) -> None:
    made = attached(CASES["bridge"], chain, host, netns, tmp_path)
    remove_netns(Path(netns.path))
    with pytest.raises(InvalidNetnsError, match="No such file or directory"):
        made.differences()


def test_nothing_is_compared_without_a_result(host: Any, netns: Any, chain: ListRunner, tmp_path: Path) -> None:
    made = attached(CASES["bridge"], chain, host, netns, tmp_path)
    netns.run("ip", "link", "del", "net1")
    whole = made.attachment
    for part in (whole.with_result(None), with_values(whole, detached=True), with_values(whole, auxiliary=True)):
        made.attachment = part
        assert made.differences() == []


# --- with binaries ---------------------------------------------------------------------------------------------------


def observed(made: Attached) -> None:
    """Look at the namespace after the ADD, as the daemon does if binaries had a part in it."""
    with PodNetns(made.sandbox.netns) as netns:
        (seen,) = netns.observe([(IfName("net1"), made.result)])
    made.attachment = with_values(made.attachment, observed=seen)


@reference.needs("bridge", "ptp", "macvlan", "host-local")
@pytest.mark.parametrize("name", ["bridge", "ptp", "macvlan"])
def test_what_a_binary_made_is_reported(host: Any, netns: Any, tools: HostTools, tmp_path: Path, name: str) -> None:
    binaries = ListRunner(outcome.dispatched("off", tools), ResultCache(tmp_path / "cache"), str(reference.DIRECTORY))
    ours = ListRunner(outcome.dispatched("prefer", tools), ResultCache(tmp_path / "cache"), str(reference.DIRECTORY))
    # Of a route without a gateway the CHECK of v1.1.1 fails after each ADD.
    ipam = _ipam(V4, routes=[{"dst": "192.0.2.0/24", "gw": "10.1.0.1"}])
    plugin = CASES[name].plugins[0] | {"ipam": ipam}
    made = attached(with_values(CASES[name], plugins=[plugin]), binaries, host, netns, tmp_path)
    assert BUILT_IN not in made.attachment.served_by.values()
    observed(made)
    made.chain = ours
    assert made.differences() == []
    netns.run("ip", "addr", "flush", "dev", "net1")
    found = made.found()
    assert [item.repair for item in found] == [None] * len(found)
    told = " ".join(item.text for item in found)
    # The kernel tells enough (`tests/e2e/test_kept.py` has a CHECK that fails alone).
    assert "CHECK of plugin" not in told
    assert 'address 10.1.0.2/24 is not on "net1"' in told
    assert "route to 192.0.2.0/24 via 10.1.0.1 is not there" in told
    assert made.repair() == [item.text for item in found]


@reference.needs("bridge", "ptp", "macvlan", "host-local")
@pytest.mark.parametrize("name", ["bridge", "ptp", "macvlan"])
def test_what_a_binary_made_for_a_virtual_machine_is_well(
    host: Any, netns: Any, tools: HostTools, tmp_path: Path, name: str
) -> None:
    """Its CHECK fails then, and is not asked."""
    binaries = ListRunner(outcome.dispatched("off", tools), ResultCache(tmp_path / "cache"), str(reference.DIRECTORY))
    made = attached(CASES[name], binaries, host, netns, tmp_path)
    observed(made)
    bind(netns, "bridge", "")
    assert made.found() == []
    netns.run("ip", "link", "del", "net1")
    (found,) = made.found()
    assert found.by_pod
    netns.run("ip", "link", "del", "net1-nic")
    assert {item.by_pod for item in made.found()} == {False}


@reference.needs("portmap")
def test_a_list_with_a_binary(host: Any, netns: Any, tools: HostTools, tmp_path: Path) -> None:
    """The host's side is brought back; inside of the pod the binary's part would be missing."""
    directory = str(reference.DIRECTORY)
    binaries = Plugins(ProcessRunner([directory]), "prefer", excepted=["portmap"], tools=tools)
    mixed = ListRunner(binaries, ResultCache(tmp_path / "cache"), directory)
    plugins = (*CASES["bridge"].plugins, {"type": "portmap", "capabilities": {"portMappings": True}})
    made = attached(with_values(CASES["bridge"], plugins=list(plugins)), mixed, host, netns, tmp_path)
    observed(made)
    assert made.differences() == []
    host.batch(f"link set {made.port} nomaster", "link set br0 down")
    netns.run("ip", "addr", "flush", "dev", "net1")
    repaired = made.repair()
    assert 'address 10.1.0.2/24 is not on "net1"' in repaired
    assert not [text for text in repaired if "br0" in text]
    (port,) = host.ip("link", "show", "dev", made.port)
    assert port["master"] == "br0"


def test_a_binary_is_asked_on_demand_only(netns: Any, tools: HostTools, tmp_path: Path) -> None:
    """`node.keep` compares at each change of the kernel."""
    program, verbs = tmp_path / "fabric", tmp_path / "verbs"
    error = '{"code": 117, "msg": "no rule"}'
    program.write_text(f"""#!/bin/sh
        echo $CNI_COMMAND >> {verbs}
        case $CNI_COMMAND in ADD) echo '{{"cniVersion": "1.0.0"}}' ;; CHECK) echo '{error}'; exit 1 ;; esac""")
    program.chmod(0o755)
    chain = ListRunner(
        Plugins(ProcessRunner([str(tmp_path)]), "prefer", tools=tools), ResultCache(tmp_path), str(tmp_path)
    )
    made = Attached(chain, netns.path, [{"type": "fabric"}])
    with PodNetns(netns.path) as opened:
        assert chain.differences(made.sandbox, made.attachment, opened, asks=False) == []
        assert verbs.read_text().split() == ["ADD"]
        (found,) = chain.differences(made.sandbox, made.attachment, opened, asks=True)
    assert (found.is_certain, found.repair) == (False, None)
    assert "no rule" in found.text
    assert verbs.read_text().split() == ["ADD", "CHECK"]


@reference.needs("bridge", "host-local")
def test_a_binary_without_check(host: Any, netns: Any, tools: HostTools, tmp_path: Path) -> None:
    """What the namespace had after the ADD is compared nevertheless."""
    binaries = ListRunner(outcome.dispatched("off", tools), ResultCache(tmp_path / "cache"), str(reference.DIRECTORY))
    plugin = {"type": "bridge", "bridge": "br0", "ipam": _ipam(V4) | {"dataDir": str(tmp_path / "ipam")}}
    made = Attached(binaries, netns.path, [plugin], version="0.3.1")
    observed(made)
    assert made.differences() == []
    netns.run("ip", "link", "set", "net1", "down")
    routes = ("10.1.0.0/24", "0.0.0.0/0 via 10.1.0.1", "192.0.2.0/24 via 10.1.0.1")
    assert sorted(made.differences()) == sorted(f"route to {route} is not there" for route in routes)


@reference.needs("host-local")
def test_the_addresses_of_a_binary_are_brought_back(host: Any, netns: Any, tools: HostTools, tmp_path: Path) -> None:
    """An IPAM plugin changes nothing in the kernel: what a built-in made with its addresses is the built-in's."""
    binaries = ProcessRunner([str(reference.DIRECTORY)])
    plugins = Plugins(binaries, "prefer", excepted=["host-local"], tools=tools)
    chain = ListRunner(plugins, ResultCache(tmp_path / "cache"), str(reference.DIRECTORY))
    made = attached(CASES["bridge"], chain, host, netns, tmp_path)
    assert made.attachment.served_by == {"bridge": BUILT_IN, "host-local": str(reference.DIRECTORY / "host-local")}
    observed(made)
    assert made.differences() == []
    netns.run("ip", "link", "del", "net1")
    assert made.repair() == []


def test_the_built_in_that_may_not_run_repairs_nothing(
    host: Any, netns: Any, chain: ListRunner, tools: HostTools, tmp_path: Path
) -> None:
    """Mode `off`, set after the ADD."""
    made = attached(CASES["bridge"], chain, host, netns, tmp_path)
    made.chain = ListRunner(
        outcome.dispatched("off", tools, bin_dirs=[tmp_path]), ResultCache(tmp_path / "c"), "/nowhere"
    )
    netns.run("ip", "link", "del", "net1")
    assert all(item.repair is None for item in made.found())
    assert 'interface "net1" is not there' in made.differences()
