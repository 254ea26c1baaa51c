"""ptp and loopback beside the reference plugins: what both leave in the kernel must be the same."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.builtin import loopback, ptp
from multus_daemon.builtin.contract import Call
from multus_daemon.cni.result import to_object

pytestmark = pytest.mark.netns

MakeCall = Callable[..., Call]

REFERENCE = Path("/usr/lib/cni")
needs_reference = pytest.mark.skipif(
    not all((REFERENCE / name).exists() for name in ("ptp", "static", "loopback")),
    reason=f"reference plugins are not in {REFERENCE}: apt-get install containernetworking-plugins",
)

# Without what differs from link to link or from moment to moment. Debian's v1.1.1 also differs from v1.9.1, whose
# state is ours: its links have a txqlen of 0, and it does not know keep_addr_on_down.
_LINK_KEYS = ("mtu", "flags", "operstate", "link_type", "qdisc")
_ADDRESS_KEYS = ("family", "local", "prefixlen", "broadcast", "scope", "label", "nodad", "dadfailed", "noprefixroute")
_SYSCTLS = ("accept_ra", "disable_ipv6", "accept_dad")
_FORWARDING = ("ipv4/ip_forward", "ipv6/conf/all/forwarding")


def run_reference(plugin: str, verb: str, path: str, config: dict[str, Any], ifname: str = "eth0") -> Any:
    done = subprocess.run(
        [str(REFERENCE / plugin)],
        input=json.dumps(config).encode(),
        env={
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": "container1",
            "CNI_NETNS": path,
            "CNI_IFNAME": ifname,
            "CNI_PATH": str(REFERENCE),
            "PATH": os.environ["PATH"],
        },
        capture_output=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout) if done.stdout else None


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
    for _ in range(100):
        links = host.ip("addr", "show", "dev", peer) + pod.ip("addr", "show", "dev", "eth0")
        tentative = [item for link in links for item in link["addr_info"] if "tentative" in item]
        if all("LOWER_UP" in link["flags"] for link in links) and all(item["scope"] == "link" for item in tentative):
            break
        time.sleep(0.05)
    return state("host", host, peer, "PEER") + state("pod", pod, "eth0", "eth0")


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


@needs_reference
@pytest.mark.parametrize("case", CASES)
async def test_ptp_leaves_the_same_state_and_result(
    case: str, host: Any, make_netns: Any, make_call: MakeCall, ipam: Any
) -> None:
    addresses, routes, keys = CASES[case]
    dns = {"nameservers": ["192.0.2.53"], "search": ["example.org"]}
    section = {"type": "static", "addresses": addresses, "routes": routes, "dns": dns}
    config = {"cniVersion": "1.0.0", "name": "testnet", "type": "ptp", "ipam": section, **keys}
    first, second = make_netns(), make_netns()

    expected = run_reference("ptp", "ADD", first.path, config)
    expected_state = whole_state(host, first)
    run_reference("ptp", "DEL", first.path, config)

    ipam.result = {"cniVersion": "1.0.0", "ips": addresses, "routes": routes, "dns": dns}
    result = to_object(await ptp.Ptp().add(make_call("ADD", second.path, ipam=section, **keys)), "1.0.0")
    assert whole_state(host, second) == expected_state

    for item in (expected, result):
        item["interfaces"][0]["name"] = "PEER"
        item["interfaces"][1]["sandbox"] = "SANDBOX"
        for interface in item["interfaces"]:
            assert len(interface.pop("mac")) == 17
    assert result == expected


@needs_reference
async def test_each_removes_and_checks_what_the_other_made(
    host: Any, netns: Any, make_call: MakeCall, ipam: Any
) -> None:
    section = {"type": "static", "addresses": [V4], "routes": [{"dst": "0.0.0.0/0"}]}
    config = {"cniVersion": "1.0.0", "name": "testnet", "type": "ptp", "ipam": section}
    ipam.result = {"ips": [V4], "routes": [{"dst": "0.0.0.0/0"}]}

    previous = run_reference("ptp", "ADD", netns.path, config)
    await ptp.Ptp().check(make_call("CHECK", netns.path, prevResult=previous))
    await ptp.Ptp().delete(make_call("DEL", netns.path))
    assert (host.links(), netns.links()) == (set(), set())

    previous = to_object(await ptp.Ptp().add(make_call("ADD", netns.path)), "1.0.0")
    run_reference("ptp", "CHECK", netns.path, config | {"prevResult": previous})
    run_reference("ptp", "DEL", netns.path, config)
    assert (host.links(), netns.links()) == (set(), set())


@needs_reference
async def test_loopback_result_is_the_same(netns: Any, make_call: MakeCall) -> None:
    config = {"cniVersion": "1.0.0", "name": "testnet", "type": "loopback"}
    expected = run_reference("loopback", "ADD", netns.path, config, "lo")
    run_reference("loopback", "DEL", netns.path, config, "lo")
    result = to_object(await loopback.Loopback().add(make_call("ADD", netns.path)), "1.0.0")
    # v1.1.1 wrote an empty dns, which newer ones leave out.
    assert result == {key: value for key, value in expected.items() if value}
