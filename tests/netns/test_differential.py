"""The built-ins beside the reference plugins: what both leave in the kernel must be the same."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any, Final

import pytest

from multus_daemon.plugins.builtin import bridge, loopback, ptp
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.result import to_object
from tests.netns import outcome, reference
from tests.netns.direct import Direct

RUNS: Final = ("reference plugins, earlier", "reference plugins, Debian's")
MakeCall = Callable[..., Call]

BRIDGE, LOOPBACK, PTP = Direct(bridge), Direct(loopback), Direct(ptp)

# Without what differs from link to link or from moment to moment. Debian's v1.1.1 also differs from v1.9.1, whose
# state is ours: its links have a txqlen of 0, and it does not know keep_addr_on_down.
_LINK_KEYS = ("mtu", "flags", "operstate", "link_type", "qdisc")
_ADDRESS_KEYS = ("family", "local", "prefixlen", "broadcast", "scope", "label", "nodad", "dadfailed", "noprefixroute")
_SYSCTLS = ("accept_ra", "disable_ipv6", "accept_dad")
_FORWARDING = ("ipv4/ip_forward", "ipv6/conf/all/forwarding")


def state(side: str, netns: Any, ifname: str, called: str) -> list[str]:
    """The link `ifname`, renamed to `called`, its addresses and sysctls, and all routes; one line for each."""
    text = netns.run("ip", "-j", "addr", "show", "dev", ifname)
    (link,) = json.loads(text)
    routes = [
        {key: value for key, value in route.items() if key != "flags"}
        for family in ("-4", "-6")
        for route in netns.ip(family, "route", "show", "table", "all")
        if not route["dst"].startswith(("fe80:", "ff00:"))
    ]
    found = [
        *(f"link {key}: {link[key]}" for key in _LINK_KEYS if key in link),
        *(
            "address " + " ".join(f"{key} {item[key]}" for key in _ADDRESS_KEYS if key in item)
            for item in link["addr_info"]
            if item["scope"] != "link"
        ),
        *sorted("route " + " ".join(f"{key} {route[key]}" for key in sorted(route)) for route in routes),
        *(f"{name}: {netns.sysctl(f'net/ipv6/conf/{ifname}/{name}')}" for name in _SYSCTLS),
        *(f"{name}: {netns.sysctl(f'net/{name}')}" for name in _FORWARDING),
    ]
    return [f"{side}: {line}".replace(ifname, called) for line in found]


def whole_state(host: Any, pod: Any) -> list[str]:
    """Both sides, once the carrier has been seen and IPv6 has settled."""
    (peer,) = host.links()
    links: list[Any] = []
    for _ in range(100):
        links = host.ip("addr", "show", "dev", peer) + pod.ip("addr", "show", "dev", "eth0")
        tentative = [item for link in links for item in link["addr_info"] if "tentative" in item]
        if all("LOWER_UP" in link["flags"] for link in links) and all(item["scope"] == "link" for item in tentative):
            break
        time.sleep(0.05)
    has_ipv6 = any(
        item["family"] == "inet6" and item["scope"] == "global" for link in links for item in link["addr_info"]
    )
    found = state("host", host, peer, "PEER") + state("pod", pod, "eth0", "eth0")
    before: list[str] = []
    # The kernel puts the local route of an IPv6 address in place a moment after the address is not tentative any more.
    while has_ipv6 and found != before:
        time.sleep(0.05)
        before, found = found, state("host", host, peer, "PEER") + state("pod", pod, "eth0", "eth0")
    return found


V4 = {"address": "10.213.7.2/24", "gateway": "10.213.7.1"}
V6 = {"address": "fd21:7::2/64", "gateway": "fd21:7::1"}

CASES: dict[str, tuple[list[dict[str, str]], list[dict[str, Any]], dict[str, Any]]] = {
    "v4": ([V4], [], {}),
    "v4-default": ([V4], [{"dst": "0.0.0.0/0"}], {}),
    "v4-default-gw": ([V4], [{"dst": "0.0.0.0/0", "gw": "10.213.7.1"}], {}),
    "v4-mtu": ([V4], [{"dst": "0.0.0.0/0"}], {"mtu": 1380}),
    "v4-routes": (
        [V4],
        [{"dst": "10.96.0.0/12"}, {"dst": "192.168.0.0/16", "gw": "10.213.7.254"}, {"dst": "198.51.100.7/32"}],
        {},
    ),
    "v4-/30": ([{"address": "10.213.7.2/30", "gateway": "10.213.7.1"}], [], {}),
    "v4-/31": ([{"address": "10.213.7.2/31", "gateway": "10.213.7.3"}], [], {}),
    "v4-two": ([V4, {"address": "10.214.7.2/16", "gateway": "10.214.0.1"}], [{"dst": "0.0.0.0/0"}], {}),
    "v6": ([V6], [{"dst": "::/0"}], {}),
    "v6-routes": ([V6], [{"dst": "2001:db8::/32"}, {"dst": "2001:db8:1::/48", "gw": "fd21:7::9"}], {}),
    "dual": ([V4, V6], [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}], {"mtu": 1400}),
    "dual-v6-first": ([V6, V4], [{"dst": "::/0"}, {"dst": "0.0.0.0/0"}], {}),
}


@reference.needs("ptp", "static", "loopback")
@pytest.mark.parametrize("case", CASES)
def test_ptp_leaves_the_same_state_and_result(
    case: str, host: Any, make_netns: Any, make_call: MakeCall, ipam: Any
) -> None:
    addresses, routes, keys = CASES[case]
    reference.require_masquerade(keys)
    dns = {"nameservers": ["192.0.2.53"], "search": ["example.org"]}
    section = {"type": "static", "addresses": addresses, "routes": routes, "dns": dns}
    config = {"cniVersion": "1.0.0", "name": "testnet", "type": "ptp", "ipam": section, **keys}
    first, second, third = make_netns(), make_netns(), make_netns()

    expected = reference.run("ptp", "ADD", first.path, config)
    expected_state = whole_state(host, first)
    reference.run("ptp", "DEL", first.path, config)

    ipam.result = {"cniVersion": "1.0.0", "ips": addresses, "routes": routes, "dns": dns}
    PTP.add(make_call("ADD", second.path, ipam=section, dad=True, **keys))
    assert whole_state(host, second) == expected_state
    PTP.delete(make_call("DEL", second.path, ipam=section, **keys))
    # Without the key the one difference is that nobody looks for duplicates of an IPv6 address, and on the
    # host's end of the link-local one.
    result = to_object(PTP.add(make_call("ADD", third.path, ipam=section, **keys)), "1.0.0")
    if any(":" in item["address"] for item in addresses):
        expected_state = [text.replace("host: accept_dad: 1", "host: accept_dad: 0") for text in expected_state]
    assert [text.replace(" nodad True", "") for text in whole_state(host, third)] == expected_state

    for item in (expected, result):
        item["interfaces"][0]["name"] = "PEER"
        item["interfaces"][1]["sandbox"] = "SANDBOX"
        for interface in item["interfaces"]:
            assert len(interface.pop("mac")) == 17
    assert result == expected


@reference.needs("ptp", "static", "loopback")
def test_loopback_result_is_the_same(netns: Any, make_call: MakeCall) -> None:
    config = {"cniVersion": "1.0.0", "name": "testnet", "type": "loopback"}
    expected = reference.run("loopback", "ADD", netns.path, config, ifname="lo")
    reference.run("loopback", "DEL", netns.path, config, ifname="lo")
    result = to_object(LOOPBACK.add(make_call("ADD", netns.path)), "1.0.0")
    # v1.1.1 wrote an empty dns, which newer ones leave out.
    assert result == {key: value for key, value in expected.items() if value}


# --- bridge ----------------------------------------------------------------------------------------------------------

needs_bridge = reference.needs("bridge", "static")
needs_new = pytest.mark.skipif(reference.is_old(), reason=f"needs v1.9.1 or newer, not v1.1.1: {reference.HOW}")

DUAL = [V4, V6]
BOTH_DEFAULTS = [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]

# Addresses (None: no IPAM), routes, keys of the configuration. What v1.1.1 knows comes first.
BRIDGES: dict[str, tuple[list[dict[str, str]] | None, list[dict[str, Any]], dict[str, Any]]] = {
    "l3": ([V4], [], {}),
    "l3-named": ([V4], [], {"bridge": "br-test", "mtu": 1400}),
    "l2": (None, [], {}),
    "l2-mac": (None, [], {"runtimeConfig": {"mac": "02:00:00:00:00:77"}}),
    "gateway": ([V4], [{"dst": "0.0.0.0/0"}], {"isGateway": True}),
    "gateway-derived": ([{"address": "10.213.7.2/24"}], [{"dst": "192.0.2.0/24"}], {"isGateway": True}),
    "default-gateway": ([V4], [], {"isDefaultGateway": True}),
    "default-gateway-there": ([V4], [{"dst": "0.0.0.0/0", "gw": "10.213.7.9"}], {"isDefaultGateway": True}),
    "gateway-dual": (DUAL, BOTH_DEFAULTS, {"isGateway": True}),
    "gateway-v6-first": ([V6, V4], BOTH_DEFAULTS, {"isGateway": True}),
    "default-gateway-dual": (DUAL, [], {"isDefaultGateway": True}),
    "two-v6": ([V6, {"address": "fd21:8::2/64"}], [], {"isGateway": True}),
    "v6-only": ([V6], [], {"isDefaultGateway": True}),
    "hairpin": ([V4], [], {"hairpinMode": True}),
    "promiscuous": ([V4], [], {"promiscMode": True}),
    "masquerade": ([V4], [], {"isDefaultGateway": True, "ipMasq": True}),
    "masquerade-dual": (DUAL, [], {"isDefaultGateway": True, "ipMasq": True}),
    "dns": ([V4], [], {"dns": {"search": ["example.com"]}}),
}
NEW_BRIDGES: dict[str, tuple[list[dict[str, str]] | None, list[dict[str, Any]], dict[str, Any]]] = {
    "isolated": ([V4], [], {"portIsolation": True}),
    "isolated-hairpin": ([V4], [], {"portIsolation": True, "hairpinMode": True}),
    "down": (None, [], {"disableContainerInterface": True}),
    "dad": (DUAL, BOTH_DEFAULTS, {"isGateway": True, "enabledad": True}),
    "spoof-check": ([V4], [], {"macspoofchk": True}),
    "spoof-check-l2-mac": (None, [], {"macspoofchk": True, "args": {"cni": {"mac": "02:00:00:00:00:78"}}}),
    "masquerade-nft": (DUAL, [], {"isDefaultGateway": True, "ipMasq": True, "ipMasqBackend": "nftables"}),
    "masquerade-iptables": (DUAL, [], {"isDefaultGateway": True, "ipMasq": True, "ipMasqBackend": "iptables"}),
}


def bridge_config(addresses: Any, routes: Any, keys: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {"cniVersion": "1.0.0", "name": "testnet", "type": "bridge", **keys}
    if addresses is not None:
        config["ipam"] = {"type": "static", "addresses": addresses, "routes": routes}
    return config


def without_what_is_old(lines: list[str]) -> list[str]:
    if not reference.is_old():
        return lines
    return [line for line in lines if "keep_addr_on_down" not in line]


def both_sides(host: Any, pod: Any) -> list[str]:
    lines = [f"host {line}" for line in reference.state(host, with_rules=True)]
    return without_what_is_old([*lines, *(f"pod {line}" for line in reference.state(pod))])


def comparable(result: dict[str, Any]) -> dict[str, Any]:
    for item in result["interfaces"]:
        assert len(item.pop("mac")) == 17
        if "sandbox" in item:
            item["sandbox"] = "SANDBOX"
        if item["name"].startswith("veth"):
            item["name"] = "PORT"
    return {key: value for key, value in result.items() if value}


@needs_bridge
@pytest.mark.parametrize("case", [*BRIDGES, *(pytest.param(case, marks=needs_new) for case in NEW_BRIDGES)])
def test_bridge_leaves_the_same_state_and_result(
    case: str, host: Any, another_host: Any, make_netns: Any, make_call: MakeCall, ipam: Any
) -> None:
    addresses, routes, keys = (BRIDGES | NEW_BRIDGES)[case]
    reference.require_masquerade(keys)
    config = bridge_config(addresses, routes, keys)
    first, second = make_netns(), make_netns()
    expected = reference.run("bridge", "ADD", first.path, config)
    expected_state = both_sides(host, first)
    reference.run("bridge", "DEL", first.path, config)
    expected_rest = reference.rules(host)

    ipam.result = {"cniVersion": "1.0.0", "ips": addresses or [], "routes": routes}
    call_keys = config | {"ipam": config.get("ipam")}
    with another_host() as ours:
        result = to_object(BRIDGE.add(make_call("ADD", second.path, **call_keys)), "1.0.0")
        reference.require_same(both_sides(ours, second), expected_state)
        BRIDGE.delete(make_call("DEL", second.path, **call_keys))
        reference.require_same(reference.rules(ours), expected_rest)
    assert comparable(result) == comparable(expected)


@needs_bridge
@pytest.mark.parametrize("case", [*BRIDGES, *(pytest.param(case, marks=needs_new) for case in NEW_BRIDGES)])
def test_each_removes_and_checks_what_the_other_bridge_made(
    case: str, host: Any, another_host: Any, make_netns: Any, make_call: MakeCall, ipam: Any
) -> None:
    addresses, routes, keys = (BRIDGES | NEW_BRIDGES)[case]
    reference.require_masquerade(keys)
    config = bridge_config(addresses, routes, keys)
    call_keys = config | {"ipam": config.get("ipam")}
    ipam.result = {"cniVersion": "1.0.0", "ips": addresses or [], "routes": routes}
    left: list[list[str]] = []
    for ours in (True, False):
        netns = make_netns()
        with another_host() as side:
            before = side.links()
            if ours:
                previous = to_object(BRIDGE.add(make_call("ADD", netns.path, **call_keys)), "1.0.0")
                # Before v1.10.0 it can't check without an IPAM plugin, v1.1.1 not a route through a gateway of its own.
                can_check = addresses is not None or reference.release() >= (1, 10)
                if can_check and not (reference.is_old() and case == "gateway-derived"):
                    reference.run("bridge", "CHECK", netns.path, config | {"prevResult": previous})
                reference.run("bridge", "DEL", netns.path, config | {"prevResult": previous})
            else:
                previous = reference.run("bridge", "ADD", netns.path, config)
                BRIDGE.check(make_call("CHECK", netns.path, **call_keys, prevResult=previous))
                BRIDGE.delete(make_call("DEL", netns.path, **call_keys, prevResult=previous))
            assert netns.links() == set()
            assert side.links() - before == {keys.get("bridge", "cni0")}
            left.append(reference.rules(side))
    reference.require_same(*left)
    assert not [line for line in left[0] if "container1" in line or "-A CNI-" in line]


# Bridges that are there before the ADD: of another program, and one whose last port has gone, which has no MAC address.
_PORT = "ip link add p0 type veth peer name p1 && ip link set p0 master cni0 up && ip link set p1 up"
PREPARED = {
    "down": "ip link add cni0 type bridge",
    "up": "ip link add cni0 type bridge && ip link set cni0 up",
    "with an address": "ip link add cni0 address 02:00:00:00:00:05 type bridge",
    "with a port": f"ip link add cni0 type bridge && ip link set cni0 up && {_PORT}",
    "without its last port": f"ip link add cni0 type bridge && ip link set cni0 up && {_PORT} && ip link delete p0",
}


@needs_bridge
@pytest.mark.parametrize("prepared", PREPARED)
@pytest.mark.parametrize("case", ["l2", "l3", "gateway"])
def test_a_bridge_that_is_there_keeps_its_address_with_a_gateway(
    case: str, prepared: str, another_host: Any, make_netns: Any, tools: Any
) -> None:
    """Without one, it has that of a port, and all pods would be reported with another one."""
    if reference.release() < (1, 10) and prepared == "without its last port":
        pytest.skip(f"v1.9.1 fails; needs v1.10.0 or newer: {reference.HOW}")
    addresses, routes, keys = BRIDGES[case]
    config = bridge_config(addresses, routes, keys)
    kept = []
    for run in (outcome.of_reference, functools.partial(outcome.builtin, tools=tools)):
        with another_host() as side:
            side.run("sh", "-c", PREPARED[prepared])
            found = []
            for number in (2, 3):
                text = json.dumps(config).replace("10.213.7.2/", f"10.213.7.{number}/")
                made = run("bridge", "ADD", make_netns().path, json.loads(text))
                assert not made.failed, made.msg
                assert made.result
                (link,) = side.ip("link", "show", "dev", "cni0")
                assert made.result["interfaces"][0]["mac"] == link["address"]
                found.append(link["address"])
            kept.append(found[0] == found[1] or case != "gateway")
            assert "00:00:00:00:00:00" not in found
    assert kept == [True, True]


VLAN, TRUNK = {"vlan": 5}, {"vlanTrunk": [{"id": 10}]}


@needs_bridge
@pytest.mark.parametrize(
    ("keys", "prepare"),
    [
        ({"vlan": 4095}, ""),
        ({"vlan": -1}, ""),
        ({"bridge": "other0"}, "ip link add other0 type veth peer name other1"),
        ({"hairpinMode": True, "promiscMode": True}, ""),
        ({"runtimeConfig": {"mac": "nonsense"}}, ""),
        ({"isGateway": True}, "ip link add cni0 type bridge && ip addr add 10.9.9.9/24 dev cni0"),
        ({"mtu": 10}, ""),
        ({"isDefaultGateway": True, "routes": [{"dst": "0.0.0.0/0"}]}, ""),
        pytest.param({"vlanTrunk": [{"minID": 5}]}, "", marks=needs_new),
        pytest.param({"vlanTrunk": [{"minID": 5, "maxID": 4}]}, "", marks=needs_new),
        pytest.param({"vlanTrunk": [{"id": 0}]}, "", marks=needs_new),
        pytest.param(TRUNK, "ip link add cni0 type bridge", marks=needs_new),
        pytest.param({"disableContainerInterface": True}, "", marks=needs_new),
        ({"cniArgs": "FOO=1"}, ""),
        (VLAN, ""),
        (VLAN, "ip link add cni0 type bridge"),
    ],
)
def test_both_refuse_for_the_same_reason(
    keys: dict[str, Any], prepare: str, host: Any, another_host: Any, make_netns: Any, make_call: MakeCall
) -> None:
    keys = dict(keys)
    args = keys.pop("cniArgs", "")
    config = bridge_config([V4], keys.pop("routes", []), keys)
    words = []
    for ours in (False, True):
        netns = make_netns()
        with another_host() as side:
            if prepare:
                side.run("sh", "-c", prepare)
            if ours:
                with pytest.raises(CniError) as caught:
                    BRIDGE.add(make_call("ADD", netns.path, cni_args=args, **config))
                words.append(outcome.Outcome(msg=caught.value.msg).words)
                assert netns.links() == set()
                assert not [name for name in side.links() if name.startswith("veth")]
            else:
                done = reference.call("bridge", "ADD", netns.path, config, args=args)
                if not done.returncode and keys in (VLAN, TRUNK):
                    pytest.skip("bridges of this kernel have VLANs")
                assert done.returncode == 1, done.stdout
                words.append(outcome.Outcome(msg=json.loads(done.stdout)["msg"]).words)
    assert len(words[0] & words[1]) >= 3, words


@needs_bridge
@needs_new
@pytest.mark.parametrize("backend", [None, "iptables", "nftables"])
@pytest.mark.parametrize("ours_adds", [True, False])
def test_masquerading_of_ptp(
    backend: str | None, ours_adds: bool, host: Any, another_host: Any, make_netns: Any, make_call: MakeCall, ipam: Any
) -> None:
    section = {"type": "static", "addresses": DUAL, "routes": BOTH_DEFAULTS}
    config = {"cniVersion": "1.0.0", "name": "testnet", "type": "ptp", "ipam": section, "ipMasq": True}
    config |= {} if backend is None else {"ipMasqBackend": backend}
    ipam.result = {"ips": DUAL, "routes": BOTH_DEFAULTS}
    netns, other = make_netns(), make_netns()
    reference.run("ptp", "ADD", other.path, config)
    expected = both_sides(host, other)
    with another_host() as side:
        if ours_adds:
            PTP.add(make_call("ADD", netns.path, dad=True, **config))
            reference.require_same(both_sides(side, netns), expected)
            reference.run("ptp", "DEL", netns.path, config)
        else:
            reference.run("ptp", "ADD", netns.path, config)
            PTP.delete(make_call("DEL", netns.path, **config))
        assert not [line for line in reference.rules(side) if "container1" in line or "CNI-" in line]
