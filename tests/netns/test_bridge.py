"""The built-in bridge against the kernel: what it makes, keeps, removes, refuses, and takes back when it fails."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multus_daemon import deadlines
from multus_daemon.kernel.links import Rtnl
from multus_daemon.plugins.builtin import bridge, bridge_port, interfaces, masquerade, spoofing, veth
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.plugin import HostTools, ToolNotFoundError
from multus_daemon.runtime import deadline
from multus_daemon.runtime.deadline import Interrupted
from multus_daemon.spec.attachment import ToolExit
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    InternalError,
    InvalidEnvironmentError,
    InvalidNetworkConfigError,
    TryAgainLaterError,
)
from multus_daemon.spec.cni.result import to_object
from tests.aside import Aside, together
from tests.namespaces import remove_netns
from tests.netns.direct import Direct
from tests.programs import require
from tests.waiting import PATIENCE

MakeCall = Callable[..., Call]

BRIDGE = Direct(bridge)

V4 = {"address": "10.213.7.2/24", "gateway": "10.213.7.1"}
V6 = {"address": "fd21:7::2/64", "gateway": "fd21:7::1"}


@pytest.fixture
def call(make_call: MakeCall) -> MakeCall:
    """Makes a call of bridge on `br-test`; keywords as for `make_call`."""

    def make(verb: str, path: str, **keys: Any) -> Call:
        return make_call(verb, path, **{"type": "bridge", "bridge": "br-test", **keys})

    return make


def addresses(netns: Any, ifname: str) -> set[str]:
    """Addresses with prefix length, without link-local ones."""
    (link,) = netns.ip("addr", "show", "dev", ifname)
    return {f"{item['local']}/{item['prefixlen']}" for item in link["addr_info"] if item["scope"] != "link"}


def ports(host: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(host.run("bridge", "-d", "-j", "link") or "[]")
    return found


def mac_of(netns: Any, ifname: str) -> str:
    (link,) = netns.ip("link", "show", "dev", ifname)
    return str(link["address"])


def rules(host: Any) -> str:
    """All rules, but for tables that are empty."""
    return str(host.run("sh", "-c", "nft list ruleset; iptables -w -t nat -S; ip6tables -w -t nat -S"))


def next_address(ipam: Any, number: int) -> None:
    ipam.result = {"ips": [{"address": f"10.213.7.{number}/24", "gateway": "10.213.7.1"}]}


# --- what it makes ---------------------------------------------------------------------------------------------------


def test_add_makes_what_it_reports(host: Any, netns: Any, call: MakeCall, ipam: Any) -> None:
    made = call("ADD", netns.path, isGateway=True, mtu=1400)
    result = BRIDGE.add(made)

    (port,) = ports(host)
    assert (port["master"], port["state"], port["hairpin"], port["isolated"]) == ("br-test", "forwarding", False, False)
    assert to_object(result, "1.0.0") == {
        "cniVersion": "1.0.0",
        "interfaces": [
            {"name": "br-test", "mac": mac_of(host, "br-test")},
            {"name": port["ifname"], "mac": mac_of(host, port["ifname"])},
            {"name": "eth0", "mac": mac_of(netns, "eth0"), "sandbox": netns.path},
        ],
        "ips": [{"interface": 2, "address": "10.213.7.2/24", "gateway": "10.213.7.1"}],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    assert addresses(host, "br-test") == {"10.213.7.1/24"}
    assert addresses(netns, "eth0") == {"10.213.7.2/24"}
    for side, name in ((host, "br-test"), (host, port["ifname"]), (netns, "eth0")):
        (link,) = side.ip("link", "show", "dev", name)
        assert (link["mtu"], link["operstate"]) == (1400, "UP")
    assert host.sysctl("net/ipv4/ip_forward") == "1"
    assert netns.reaches("10.213.7.1")
    assert host.reaches("10.213.7.2")
    assert ipam.calls == [("stub", made.invocation)]


def test_the_ipam_plugin_finds_the_interface(netns: Any, call: MakeCall, ipam: Any) -> None:
    """The plugin dhcp asks for an address through it."""
    seen: list[set[str]] = []
    ipam.hook = lambda _verb: seen.append(netns.links())
    BRIDGE.add(call("ADD", netns.path))
    assert seen == [{"eth0"}]


def test_containers_reach_each_other(host: Any, make_netns: Any, call: MakeCall, ipam: Any) -> None:
    pods = [make_netns() for _ in range(3)]
    for number, pod in enumerate(pods, 2):
        ipam.result = {
            "ips": [
                {"address": f"10.213.7.{number}/24", "gateway": "10.213.7.1"},
                {"address": f"fd21:7::{number}/64", "gateway": "fd21:7::1"},
            ]
        }
        BRIDGE.add(call("ADD", pod.path))
    assert pods[0].reaches("10.213.7.4")
    assert pods[1].reaches("fd21:7::4")
    # No gateway is asked for, so none is made, and nothing is forwarded.
    assert addresses(host, "br-test") == set()
    assert host.sysctl("net/ipv4/ip_forward") == "0"


def test_isolated_ports_reach_the_gateway_only(host: Any, make_netns: Any, call: MakeCall, ipam: Any) -> None:
    pods = [make_netns() for _ in range(2)]
    for number, pod in enumerate(pods, 2):
        next_address(ipam, number)
        BRIDGE.add(call("ADD", pod.path, isGateway=True, portIsolation=True))
    assert [port["isolated"] for port in ports(host)] == [True, True]
    assert pods[0].reaches("10.213.7.1")
    assert not pods[0].reaches("10.213.7.3", wait=0.3)


def test_the_bridge_keeps_its_mac_as_ports_come_and_go(host: Any, make_netns: Any, call: MakeCall, ipam: Any) -> None:
    pods = [make_netns() for _ in range(2)]
    BRIDGE.add(call("ADD", pods[0].path, isGateway=True))
    before = mac_of(host, "br-test")
    next_address(ipam, 3)
    made = BRIDGE.add(call("ADD", pods[1].path, isGateway=True))
    # A bridge whose address nobody has set takes the lowest one of its ports.
    host.run("ip", "link", "set", made.interfaces[1].name, "address", "02:00:00:00:00:01")
    BRIDGE.delete(call("DEL", pods[0].path))
    assert mac_of(host, "br-test") == before == made.interfaces[0].mac


def test_a_bridge_that_has_lost_its_last_port_becomes_a_gateway(
    host: Any, netns: Any, call: MakeCall, ipam: Any
) -> None:
    host.run("ip", "link", "add", "br-test", "type", "bridge")
    BRIDGE.add(call("ADD", netns.path))
    BRIDGE.delete(call("DEL", netns.path))
    assert mac_of(host, "br-test") == "00:00:00:00:00:00"
    result = BRIDGE.add(call("ADD", netns.path, isGateway=True))
    assert mac_of(host, "br-test") == result.interfaces[0].mac == result.interfaces[1].mac
    BRIDGE.delete(call("DEL", netns.path))
    assert mac_of(host, "br-test") == result.interfaces[0].mac


def test_an_existing_bridge_is_used_as_it_is(host: Any, netns: Any, call: MakeCall) -> None:
    host.run("ip", "link", "add", "br-test", "mtu", "1300", "type", "bridge")
    BRIDGE.add(call("ADD", netns.path, mtu=1200))
    (link,) = host.ip("link", "show", "dev", "br-test")
    # Not by us: it follows its lowest port.
    assert (link["mtu"], link["operstate"]) == (1200, "UP")
    assert [port["master"] for port in ports(host)] == ["br-test"]


@pytest.mark.parametrize(
    ("args", "keys", "expected"),
    [
        ("MAC=02-00-00-00-00-01", {}, "02:00:00:00:00:01"),
        ("IgnoreUnknown=1;K8S_POD_NAME=x;MAC=02:00:00:00:00:01", {"args": {"cni": {}}}, "02:00:00:00:00:01"),
        ("MAC=02:00:00:00:00:01", {"args": {"cni": {"mac": "0200.0000.0002"}}}, "02:00:00:00:00:02"),
        (
            "MAC=02:00:00:00:00:01",
            {"args": {"cni": {"mac": "02:00:00:00:00:02"}}, "runtimeConfig": {"mac": "02:00:00:00:00:AB"}},
            "02:00:00:00:00:ab",
        ),
    ],
)
def test_mac(args: str, keys: dict[str, Any], expected: str, netns: Any, call: MakeCall) -> None:
    result = BRIDGE.add(call("ADD", netns.path, cni_args=args, **keys))
    assert mac_of(netns, "eth0") == result.interfaces[2].mac == expected


def test_an_interface_that_stays_down(netns: Any, call: MakeCall) -> None:
    began = time.monotonic()
    result = BRIDGE.add(call("ADD", netns.path, ipam={}, disableContainerInterface=True))
    assert time.monotonic() - began < 5
    (link,) = netns.ip("link", "show", "dev", "eth0")
    assert "UP" not in link["flags"]
    assert [item.name for item in result.interfaces][0::2] == ["br-test", "eth0"]


@pytest.mark.parametrize(("keys", "expected"), [({}, "0"), ({"enabledad": True}, "1")])
def test_duplicate_address_detection(
    keys: dict[str, Any], expected: str, netns: Any, call: MakeCall, ipam: Any
) -> None:
    netns.detect_duplicates()
    ipam.result = {"ips": [V6]}
    BRIDGE.add(call("ADD", netns.path, **keys))
    assert netns.sysctl("net/ipv6/conf/eth0/accept_dad") == expected
    assert netns.sysctl("net/ipv4/conf/eth0/arp_notify") == "1"
    (link,) = netns.ip("addr", "show", "eth0")
    assert not any("tentative" in item for item in link["addr_info"] if item["scope"] == "global")


# --- addresses of a bridge that has some -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("present", "ips", "force", "expected"),
    [
        (["10.213.7.1/24"], [V4], False, {"10.213.7.1/24"}),
        (["10.9.9.9/24"], [V4], False, None),
        (["10.9.9.9/24"], [V4], True, {"10.213.7.1/24"}),
        (["10.213.7.1/16"], [V4], False, None),
        (["fd21:9::1/64"], [V6], False, {"fd21:9::1/64", "fd21:7::1/64"}),
        (["fd21:7::9/48"], [V6], False, None),
        (["fd21:7::9/48", "fd21:9::1/64"], [V6], True, {"fd21:9::1/64", "fd21:7::1/64"}),
    ],
)
def test_the_gateways_address_beside_others(
    present: list[str], ips: Any, force: bool, expected: Any, host: Any, netns: Any, call: MakeCall, ipam: Any
) -> None:
    host.run("ip", "link", "add", "br-test", "type", "bridge")
    for address in present:
        host.run("ip", "addr", "add", address, "dev", "br-test", *(["nodad"] if ":" in address else []))
    ipam.result = {"ips": ips}
    made = call("ADD", netns.path, isGateway=True, forceAddress=force)
    if expected is None:
        with pytest.raises(InternalError, match='"br-test" already has an IP address different from'):
            BRIDGE.add(made)
        assert (addresses(host, "br-test"), netns.links(), ports(host)) == (set(present), set(), [])
    else:
        BRIDGE.add(made)
        assert addresses(host, "br-test") == expected


def test_two_networks_share_a_bridge(host: Any, make_netns: Any, call: MakeCall, ipam: Any) -> None:
    first, second = make_netns(), make_netns()
    BRIDGE.add(call("ADD", first.path, name="net-a", isGateway=True))
    next_address(ipam, 3)
    BRIDGE.add(call("ADD", second.path, name="net-b", isGateway=True))
    BRIDGE.delete(call("DEL", first.path, name="net-a", isGateway=True))
    assert addresses(host, "br-test") == {"10.213.7.1/24"}
    assert second.reaches("10.213.7.1")


# --- masquerading and MAC addresses ----------------------------------------------------------------------------------


@pytest.fixture
def outside(host: Any, make_netns: Any) -> Any:
    """A namespace behind the host, which does not know the containers' network."""
    netns = make_netns()
    host.batch(
        f"link add up0 type veth peer name eth0 netns {netns.path}",
        "addr add 192.0.2.1/24 dev up0",
        "link set up0 up",
    )
    netns.batch("addr add 192.0.2.2/24 dev eth0", "link set eth0 up")
    return netns


@pytest.mark.parametrize("backend", ["iptables", "nftables"])
def test_masquerading_lets_containers_out(backend: str, host: Any, netns: Any, outside: Any, call: MakeCall) -> None:
    keys: dict[str, Any] = {"isGateway": True, "ipMasqBackend": backend}
    BRIDGE.add(call("ADD", netns.path, **keys))
    assert not netns.reaches("192.0.2.2", wait=0.3)
    BRIDGE.delete(call("DEL", netns.path, **keys))
    keys["ipMasq"] = True
    BRIDGE.add(call("ADD", netns.path, **keys))
    assert netns.reaches("192.0.2.2", wait=5)
    for _ in range(2):
        BRIDGE.delete(call("DEL", netns.path, **keys))
        assert not [line for line in rules(host).splitlines() if "CNI-" in line or "container1" in line]


def test_the_default_backend_is_what_the_host_has(host: Any, netns: Any, call: MakeCall, ipam: Any, tools: Any) -> None:
    class WithoutIptables:
        def run(self, tool: str, arguments: Any, stdin: bytes = b"") -> ToolExit:
            if "tables" in tool:
                raise ToolNotFoundError(f"{tool} is not there")
            done: ToolExit = tools.run(tool, arguments, stdin)
            return done

    made = replace(call("ADD", netns.path, isGateway=True, ipMasq=True), tools=WithoutIptables())
    BRIDGE.add(made)
    assert "cni_plugins_masquerade" in rules(host)
    BRIDGE.delete(replace(made, invocation=replace(made.invocation, verb="DEL")))
    assert "masquerade comment" not in rules(host)
    forced = call("ADD", netns.path, isGateway=True, ipMasq=True, ipMasqBackend="iptables")
    with pytest.raises(InternalError, match=r"^failed to masquerade: iptables is not there"):
        BRIDGE.add(replace(forced, tools=WithoutIptables()))
    assert (netns.links(), ports(host)) == (set(), [])


@pytest.mark.parametrize("backend", ["iptables", "nftables"])
@pytest.mark.parametrize("path", ["", "gone"])
def test_a_container_whose_namespace_has_gone_leaves_no_rules(
    path: str, backend: str, host: Any, netns: Any, call: MakeCall, ipam: Any
) -> None:
    """Rules for an address that the next container gets."""
    keys = {"isGateway": True, "ipMasq": True, "ipMasqBackend": backend, "macspoofchk": True}
    BRIDGE.add(call("ADD", netns.path, **keys))
    assert "container1" in rules(host)
    remove_netns(Path(netns.path))
    BRIDGE.delete(call("DEL", path and netns.path, **keys))
    assert not [line for line in rules(host).splitlines() if "CNI-" in line or "container1" in line]
    assert ipam.verbs == ["ADD", "DEL"]


@pytest.mark.parametrize("backend", ["iptables", "nftables"])
def test_a_del_that_was_cut_off_after_the_interface_is_finished_by_the_next(
    backend: str, host: Any, netns: Any, call: MakeCall, ipam: Any
) -> None:
    """The ADD was cut off as well: there is no result, and the interface is gone."""
    keys: dict[str, Any] = {"isGateway": True, "ipMasq": True, "ipMasqBackend": backend}
    BRIDGE.add(call("ADD", netns.path, **keys))
    next_address(ipam, 3)
    BRIDGE.add(call("ADD", netns.path, ifname="net1", **keys))
    netns.run("ip", "link", "delete", "eth0")
    BRIDGE.delete(call("DEL", netns.path, **keys))
    left = rules(host)
    assert ("10.213.7.3" in left, "10.213.7.2 " in left) == (True, False)
    netns.run("ip", "link", "delete", "net1")
    BRIDGE.delete(call("DEL", netns.path, ifname="net1", **keys))
    assert not [line for line in rules(host).splitlines() if "CNI-" in line or "container1" in line]


@pytest.mark.parametrize("backend", ["iptables", "nftables"])
@pytest.mark.parametrize("is_repeated", [False, True])
def test_two_interfaces_on_one_network_are_masqueraded_apart(
    is_repeated: bool, backend: str, host: Any, netns: Any, outside: Any, call: MakeCall, ipam: Any
) -> None:
    keys: dict[str, Any] = {"isGateway": True, "ipMasq": True, "ipMasqBackend": backend}
    BRIDGE.add(call("ADD", netns.path, **keys))
    next_address(ipam, 3)
    BRIDGE.add(call("ADD", netns.path, ifname="net1", **keys))
    netns.run("ip", "route", "add", "192.0.2.0/24", "via", "10.213.7.1", "dev", "net1", "src", "10.213.7.3")
    for _ in range(1 + is_repeated):
        BRIDGE.delete(call("DEL", netns.path, **keys))
    assert netns.reaches("192.0.2.2")
    BRIDGE.delete(call("DEL", netns.path, ifname="net1", **keys))
    assert not [line for line in rules(host).splitlines() if "CNI-" in line or "container1" in line]


def test_another_mac_address_is_dropped(host: Any, netns: Any, call: MakeCall) -> None:
    keys = {"isGateway": True, "macspoofchk": True}
    BRIDGE.add(call("ADD", netns.path, **keys))
    assert netns.reaches("10.213.7.1")
    netns.run("ip", "link", "set", "eth0", "address", "02:00:00:00:00:99")
    assert not netns.reaches("10.213.7.1", wait=0.3)
    for _ in range(2):
        BRIDGE.delete(call("DEL", netns.path, **keys))
        assert "container1" not in rules(host)


def test_rules_about_mac_addresses_that_stay_fail_the_del(
    host: Any, netns: Any, call: MakeCall, ipam: Any, tools: HostTools
) -> None:
    """All else is done; the next DEL finds them."""
    made = to_object(BRIDGE.add(call("ADD", netns.path, macspoofchk=True)), "1.0.0")
    before = rules(host)
    delete = call("DEL", netns.path, macspoofchk=True, prevResult=made)
    for at in (1, 2):
        with pytest.raises(InternalError, match=r"^failed to teardown spoof-check: nft failed .*not permitted"):
            BRIDGE.delete(replace(delete, tools=FailingTools(tools, at)))
        assert (netns.links(), ports(host), ipam.verbs[-1]) == (set(), [], "DEL")
        assert [line for line in rules(host).splitlines() if "container1" in line]
    assert rules(host) == before
    BRIDGE.delete(delete)
    assert "container1" not in rules(host)


@pytest.mark.parametrize("is_made", [True, False])
def test_a_del_without_nft(is_made: bool, host: Any, netns: Any, call: MakeCall) -> None:
    """An ADD that was done had it, and has left rules; one that found no nft has left none."""

    class WithoutNft:
        def run(self, tool: str, arguments: Any, stdin: bytes = b"") -> ToolExit:
            raise ToolNotFoundError(f"{tool} is not there")

    made = call("ADD", netns.path, macspoofchk=True)
    delete = replace(call("DEL", netns.path, macspoofchk=True), tools=WithoutNft())
    if is_made:
        result = BRIDGE.add(made)
        with pytest.raises(InternalError, match=r"^failed to teardown spoof-check: nft is not there"):
            BRIDGE.delete(replace(delete, prev_result=result))
    else:
        with pytest.raises(InternalError, match=r"^failed to setup spoof-check: nft is not there"):
            BRIDGE.add(replace(made, tools=WithoutNft()))
        BRIDGE.delete(delete)


# --- refusals before anything is touched -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"mtu": "large"}, DecodingFailureError, "failed to load netconf: mtu: an integer is needed"),
        ({"vlan": 4095}, InvalidNetworkConfigError, r"invalid VLAN ID 4095 \(must be between 0 and 4094\)"),
        ({"vlan": -1}, InvalidNetworkConfigError, "invalid VLAN ID -1"),
        ({"vlanTrunk": [{"minID": 5}]}, InvalidNetworkConfigError, ".* simultaneously, maxID is missing"),
        ({"vlanTrunk": [{"maxID": 5}]}, InvalidNetworkConfigError, ".* simultaneously, minID is missing"),
        ({"vlanTrunk": [{"minID": 5, "maxID": 4}]}, InvalidNetworkConfigError, "minID is greater than maxID"),
        ({"vlanTrunk": [{"minID": 0, "maxID": 4}]}, InvalidNetworkConfigError, "incorrect trunk minID parameter"),
        ({"vlanTrunk": [{"minID": 1, "maxID": 4095}]}, InvalidNetworkConfigError, "incorrect trunk maxID parameter"),
        ({"vlanTrunk": [{"id": 4095}]}, InvalidNetworkConfigError, "incorrect trunk id parameter"),
        ({"vlanTrunk": [5]}, DecodingFailureError, ".*vlanTrunk: each item must be an object"),
        ({"hairpinMode": True, "promiscMode": True}, InvalidNetworkConfigError, "cannot set hairpin mode and prom"),
        ({"disableContainerInterface": True}, InvalidNetworkConfigError, "cannot use IPAM when Disable"),
        ({"bridge": ""}, InvalidNetworkConfigError, 'failed to create bridge "": interface name is empty'),
        ({"bridge": "a-name-that-is-long"}, InvalidNetworkConfigError, ".*interface name is too long"),
        ({"runtimeConfig": {"mac": "nonsense"}}, InvalidNetworkConfigError, "address nonsense: invalid MAC address"),
        ({"args": {"cni": {"mac": "02:00:00:00:00:00:00:01"}}}, InvalidNetworkConfigError, "address .* invalid MAC"),
        ({"cni_args": "FOO=1"}, InvalidEnvironmentError, 'ARGS: unknown args ."FOO".'),
    ],
)
def test_what_can_be_refused_is_refused_first(
    keys: dict[str, Any], error: type[CniError], message: str, host: Any, netns: Any, call: MakeCall, ipam: Any
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        BRIDGE.add(call("ADD", netns.path, **keys))
    assert (host.links(), netns.links(), ipam.calls) == (set(), set(), [])


# --- VLANs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def has_vlans(host: Any) -> bool:
    """Return whether the kernel filters VLANs in bridges (CONFIG_BRIDGE_VLAN_FILTERING)."""
    host.run("sh", "-c", "ip link add probe0 type bridge vlan_filtering 1 2>/dev/null || true")
    found = "probe0" in host.links()
    if found:
        host.run("ip", "link", "del", "probe0")
    return found


def test_vlans(has_vlans: bool, host: Any, make_netns: Any, call: MakeCall, ipam: Any) -> None:
    if not has_vlans:
        pytest.skip("the kernel's bridges have no VLANs: needs one with CONFIG_BRIDGE_VLAN_FILTERING")
    first, second, other = make_netns(), make_netns(), make_netns()
    keys: dict[str, Any] = {"isGateway": True, "vlan": 5, "vlanTrunk": [{"minID": 10, "maxID": 12}, {"id": 20}]}
    result = BRIDGE.add(call("ADD", first.path, **keys))
    assert [item.name for item in result.interfaces][3:] == ["br-test.5"]
    next_address(ipam, 3)
    BRIDGE.add(call("ADD", second.path, **keys))
    next_address(ipam, 4)
    BRIDGE.add(call("ADD", other.path, vlan=6))
    (port,) = [
        item for item in json.loads(host.run("bridge", "-j", "vlan")) if item["ifname"] == result.interfaces[1].name
    ]
    assert [item["vlan"] for item in port["vlans"]] == [5, 10, 11, 12, 20]
    assert addresses(host, "br-test.5") == {"10.213.7.1/24"}
    assert first.reaches("10.213.7.1")
    assert first.reaches("10.213.7.3")
    assert not first.reaches("10.213.7.4", wait=0.3)


@pytest.mark.parametrize("keys", [{"vlan": 5}, {"vlanTrunk": [{"id": 5}]}, {"vlanTrunk": []}])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_kernel_without_vlans_says_so(
    is_there: bool, keys: dict[str, Any], has_vlans: bool, host: Any, netns: Any, call: MakeCall, ipam: Any
) -> None:
    if has_vlans:
        pytest.skip("the kernel's bridges have VLANs: needs one without CONFIG_BRIDGE_VLAN_FILTERING")
    if is_there:
        host.run("ip", "link", "add", "br-test", "type", "bridge")
    if is_there and keys == {"vlanTrunk": []}:
        BRIDGE.add(call("ADD", netns.path, **keys))
        return
    expected = 'failed to set up vlan tag on interface "veth' if is_there else 'failed to create bridge "br-test": '
    with pytest.raises(InternalError, match=f"^{expected}.*: Operation not supported"):
        BRIDGE.add(call("ADD", netns.path, **keys))
    assert (host.links(), netns.links()) == ({"br-test"} if is_there else set(), set())
    assert ipam.calls == []


# --- failures in the middle ------------------------------------------------------------------------------------------

EVERYTHING: dict[str, Any] = {"isGateway": True, "ipMasq": True, "macspoofchk": True, "hairpinMode": True}


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Rtnl, "change master"),
        (Rtnl, "set_port"),
        (bridge_port, "add_address"),
        (Rtnl, "batch"),
        (Rtnl, "change mac"),
        (bridge_port, "_until_forwarding"),
        (interfaces, "enable_forwarding"),
        (veth, "ignore_advertisements"),
        (spoofing, "add"),
        (masquerade, "add"),
    ],
)
@pytest.mark.parametrize("is_done_first", [False, True])
def test_a_failing_step_leaves_nothing_of_the_container(
    is_done_first: bool,
    owner: Any,
    name: str,
    host: Any,
    netns: Any,
    call: MakeCall,
    ipam: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The bridge is there, as of the second ADD on.
    host.run("sh", "-c", "ip link add br-test type bridge && ip link set br-test up")
    before = rules(host)
    name, _, attribute = name.partition(" ")
    real = getattr(owner, name)

    def refuse(*arguments: Any, **keywords: Any) -> Any:
        is_meant = not attribute or attribute in keywords
        if is_done_first or not is_meant:
            real(*arguments, **keywords)
        if is_meant:
            raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, refuse)
        with pytest.raises((PermissionError, InternalError), match="Operation not permitted"):
            BRIDGE.add(call("ADD", netns.path, **EVERYTHING))
    assert (netns.links(), ports(host)) == (set(), [])
    left = [line for line in rules(host).splitlines() if "container1" in line or "CNI-" in line]
    assert (left, "container1" in before) == ([], False)
    assert ipam.verbs in ([], ["ADD", "DEL"])
    # And nothing is in the way of the next try.
    BRIDGE.add(call("ADD", netns.path, **EVERYTHING))


class FailingTools:
    """The real tools, but call number `at`, from 1, does nothing and fails."""

    def __init__(self, tools: HostTools, at: int) -> None:
        self._tools, self._at = tools, at
        self.calls: list[str] = []

    def run(self, tool: str, arguments: Any, stdin: bytes = b"") -> ToolExit:
        self.calls.append(tool)
        if len(self.calls) == self._at:
            return ToolExit(4, b"", f"{tool}: Operation not permitted")
        return self._tools.run(tool, arguments, stdin)


@pytest.mark.parametrize("backend", ["iptables", "nftables"])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_a_failing_tool_leaves_nothing_of_the_container(
    at: int, backend: str, host: Any, netns: Any, call: MakeCall, ipam: Any, tools: Any
) -> None:
    keys = EVERYTHING | {"ipMasqBackend": backend}
    ipam.result = {"ips": [V4, V6]}
    failing = FailingTools(tools, at)
    add = replace(call("ADD", netns.path, **keys), tools=failing)
    if backend == "nftables" and at in (3, 4, 5):
        # At 3 it is tried again without comments, for old kernels; two transactions are all that it takes.
        BRIDGE.add(add)
        assert len(failing.calls) == (4 if at == 3 else 3)
        return
    with pytest.raises(InternalError, match=r"tables(-restore)? failed|nft failed .*not permitted") as caught:
        BRIDGE.add(add)
    assert "Operation not permitted" in str(caught.value)
    assert (netns.links(), ports(host)) == (set(), [])
    assert not [line for line in rules(host).splitlines() if "container1" in line or "CNI-" in line]
    assert ipam.verbs == ([] if at == 1 else ["ADD", "DEL"])
    # One that fails in a DEL is told, and the next DEL does the rest, though the interface has gone.
    previous = to_object(BRIDGE.add(call("ADD", netns.path, **keys)), "1.0.0")
    delete = call("DEL", netns.path, **keys, prevResult=previous)
    what = "teardown spoof-check" if at <= 2 else "stop masquerading"
    with pytest.raises(InternalError, match=f"^failed to {what}"):
        BRIDGE.delete(replace(delete, tools=FailingTools(tools, at)))
    assert netns.links() == set()
    BRIDGE.delete(delete)
    assert not [line for line in rules(host).splitlines() if "container1" in line or "CNI-" in line]


def test_ipam_failure_is_passed_on_and_undone(host: Any, netns: Any, call: MakeCall, ipam: Any) -> None:
    ipam.errors["ADD"] = CniError("no addresses left", "pool 1", code=117)
    with pytest.raises(CniError, match="no addresses left") as caught:
        BRIDGE.add(call("ADD", netns.path, macspoofchk=True))
    assert (caught.value.code, caught.value.details) == (117, "pool 1")
    assert ipam.verbs == ["ADD", "DEL"]
    assert (netns.links(), ports(host), "container1" in rules(host)) == (set(), [], False)


def test_no_addresses(netns: Any, call: MakeCall, ipam: Any) -> None:
    ipam.result = {"cniVersion": "1.0.0"}
    with pytest.raises(InternalError, match=r"^IPAM plugin returned missing IP config"):
        BRIDGE.add(call("ADD", netns.path))
    assert ipam.verbs == ["ADD", "DEL"]
    assert netns.links() == set()


def test_a_port_that_does_not_come_up(
    host: Any, netns: Any, call: MakeCall, ipam: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "BRIDGE_PORT_UP_SECONDS", 0.1)
    ipam.hook = lambda verb: verb == "ADD" and host.run("ip", "link", "set", ports(host)[0]["ifname"], "down")
    with pytest.raises(InternalError, match=r"^bridge port in error state: down"):
        BRIDGE.add(call("ADD", netns.path))
    assert (netns.links(), ports(host), ipam.verbs) == (set(), [], ["ADD", "DEL"])


@pytest.mark.parametrize("moment", ["ipam", "settling", "masquerading"])
def test_a_stop_undoes_everything(
    moment: str, host: Any, netns: Any, call: MakeCall, ipam: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("iptables", "nft")
    reached = threading.Event()
    keys = dict(EVERYTHING)
    if moment == "ipam":

        def hook(verb: str) -> None:
            if verb == "ADD":
                reached.set()
                deadline.pause(PATIENCE)

        ipam.hook = hook
    elif moment == "settling":
        netns.detect_duplicates()
        # It takes longer than this test.
        netns.set_sysctl("net/ipv6/conf/default/dad_transmits", "30")
        keys["enabledad"] = True
        ipam.result = {"ips": [V6]}

        def settle(verb: str) -> None:
            if verb == "ADD":
                threading.Timer(0.2, reached.set).start()

        ipam.hook = settle
    else:
        real = masquerade.add

        def add(*arguments: Any) -> None:
            real(*arguments)
            reached.set()
            deadline.pause(PATIENCE)

        monkeypatch.setattr(masquerade, "add", add)
    work = Aside(BRIDGE.add, call("ADD", netns.path, **keys))
    assert reached.wait(PATIENCE)
    assert not work.done
    work.stop()
    with pytest.raises(Interrupted):
        work.result()
    assert (netns.links(), ports(host), ipam.verbs) == (set(), [], ["ADD", "DEL"])
    assert not [line for line in rules(host).splitlines() if "container1" in line or "CNI-" in line]


# --- DEL -------------------------------------------------------------------------------------------------------------


def test_delete_can_be_repeated_and_leaves_the_bridge(host: Any, netns: Any, call: MakeCall, ipam: Any) -> None:
    BRIDGE.add(call("ADD", netns.path, isGateway=True))
    for _ in range(2):
        BRIDGE.delete(call("DEL", netns.path, isGateway=True))
        assert (host.links(), netns.links()) == ({"br-test"}, set())
    assert addresses(host, "br-test") == {"10.213.7.1/24"}
    assert ipam.verbs == ["ADD", "DEL", "DEL"]


@pytest.mark.parametrize("path", ["", "/nonexistent/netns"])
@pytest.mark.parametrize("keys", [{}, {"ipMasq": True, "macspoofchk": True}])
def test_delete_without_namespace(path: str, keys: dict[str, Any], call: MakeCall, ipam: Any) -> None:
    BRIDGE.delete(call("DEL", path, **keys))
    assert ipam.verbs == ["DEL"]


def test_delete_goes_on_past_ipam(host: Any, netns: Any, call: MakeCall, ipam: Any) -> None:
    keys = {"isGateway": True, "ipMasq": True}
    BRIDGE.add(call("ADD", netns.path, **keys))
    ipam.errors["DEL"] = TryAgainLaterError("locked")
    with pytest.raises(TryAgainLaterError, match="locked"):
        BRIDGE.delete(call("DEL", netns.path, **keys))
    assert netns.links() == set()
    assert "CNI-" not in rules(host)


def test_delete_takes_a_configuration_that_no_add_would(netns: Any, call: MakeCall, ipam: Any) -> None:
    """A DEL that fails is repeated until the pod is gone: it must not fail because the ADD did."""
    bad = {"vlan": 9999, "mtu": "large", "hairpinMode": True, "promiscMode": True, "ipMasq": "yes", "macspoofchk": 1}
    BRIDGE.delete(call("DEL", netns.path, cni_args="FOO=1", **bad))
    assert ipam.verbs == ["DEL"]


# --- CHECK, STATUS ---------------------------------------------------------------------------------------------------


def added(netns: Any, call: MakeCall, **keys: Any) -> dict[str, Any]:
    return to_object(BRIDGE.add(call("ADD", netns.path, **keys)), "1.0.0")


def test_check_finds_all_as_it_was_made(netns: Any, call: MakeCall, ipam: Any) -> None:
    previous = added(netns, call, isGateway=True)
    BRIDGE.check(call("CHECK", netns.path, isGateway=True, prevResult=previous))
    assert ipam.verbs == ["ADD", "CHECK"]


@pytest.mark.parametrize(
    ("side", "damage", "message"),
    [
        ("pod", "ip addr flush dev eth0", 'address 10.213.7.2/24 is not on "eth0"'),
        ("pod", "ip link del eth0", 'interface "eth0" is not there'),
        ("pod", "ip route del default", "route to 0.0.0.0/0 via 10.213.7.1 is not on"),
        ("pod", "ip link set eth0 address 02:00:00:00:00:01", 'MAC address of "eth0" is 02:00:00:00:00:01, not'),
        ("host", "ip link del br-test", 'bridge "br-test" is not there'),
        ("host", "ip link set br-test address 02:00:00:00:00:01", '"br-test" is 02:00:00:00:00:01, not'),
        ("host", "ip link set br-test promisc on", 'bridge "br-test" is promiscuous, and promiscMode is false'),
        ("host", "ip link set PORT nomaster", "port veth.* is not on bridge br-test"),
        ("host", "ip link set PORT address 02:00:00:00:00:01", 'MAC address of "veth.*" is 02:00:00:00:00:01, not'),
    ],
)
def test_check_finds_damage(side: str, damage: str, message: str, host: Any, netns: Any, call: MakeCall) -> None:
    previous = added(netns, call, isGateway=True)
    (netns if side == "pod" else host).run(*damage.replace("PORT", previous["interfaces"][1]["name"]).split())
    with pytest.raises(InternalError, match=message):
        BRIDGE.check(call("CHECK", netns.path, prevResult=previous))


@pytest.mark.parametrize("is_made_by_add", [True, False])
def test_the_ports_of_other_pods_are_no_damage(
    is_made_by_add: bool, host: Any, make_netns: Any, call: MakeCall
) -> None:
    """The kernel gives a bridge the lowest MAC address of its ports unless somebody has set one."""
    if not is_made_by_add:
        host.batch("link add br-test type bridge", "link set br-test up")
    pods = [make_netns() for _ in range(3)]
    results = [to_object(BRIDGE.add(call("ADD", pod.path, ipam=None)), "1.0.0") for pod in pods]
    before = mac_of(host, "br-test")
    host.run("ip", "link", "set", results[1]["interfaces"][1]["name"], "address", "02:00:00:00:00:01")
    assert (mac_of(host, "br-test") == before) is is_made_by_add
    for number in (0, 2):
        BRIDGE.check(call("CHECK", pods[number].path, ipam=None, prevResult=results[number]))
    host.run("ip", "link", "set", "br-test", "address", "02:00:00:00:00:02")
    with pytest.raises(InternalError, match='MAC address of bridge "br-test" is 02:00:00:00:00:02, not'):
        BRIDGE.check(call("CHECK", pods[0].path, ipam=None, prevResult=results[0]))


def test_check_needs_a_fitting_previous_result(netns: Any, call: MakeCall) -> None:
    previous = added(netns, call)
    with pytest.raises(InvalidNetworkConfigError, match=r"^Required prevResult missing"):
        BRIDGE.check(call("CHECK", netns.path))
    with pytest.raises(InternalError, match='bridge "br-other" is not there'):
        BRIDGE.check(call("CHECK", netns.path, bridge="br-other", prevResult=previous))
    previous["interfaces"][2]["sandbox"] = "/run/netns/another"
    with pytest.raises(InternalError, match=r"^Sandbox in prevResult doesn't match configured netns"):
        BRIDGE.check(call("CHECK", netns.path, prevResult=previous))


# --- the daemon's side -----------------------------------------------------------------------------------------------


def test_side_by_side_on_a_bridge_that_is_not_there_yet(host: Any, make_netns: Any, call: MakeCall, ipam: Any) -> None:
    pods = [make_netns() for _ in range(8)]
    works = []
    for number, pod in enumerate(pods, 2):
        next_address(ipam, number)
        made = call("ADD", pod.path, container=f"c{number}", isDefaultGateway=True, ipMasq=True)
        own = replace(ipam, calls=ipam.calls, result=dict(ipam.result))
        works.append(functools.partial(BRIDGE.add, replace(made, plugin_for=own.plugin_for)))
    together(*works)
    assert len(ports(host)) == 8
    assert addresses(host, "br-test") == {"10.213.7.1/24"}
    for number, pod in enumerate(pods, 2):
        assert addresses(pod, "eth0") == {f"10.213.7.{number}/24"}
    assert rules(host).count("-j CNI-") == 8
    together(
        *(
            functools.partial(BRIDGE.delete, call("DEL", pod.path, container=f"c{number}", ipMasq=True))
            for number, pod in enumerate(pods, 2)
        )
    )
    assert (host.links(), "CNI-" in rules(host)) == ({"br-test"}, False)
