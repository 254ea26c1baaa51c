"""The built-in sbr beside the reference: rules and routes, packets, drift, undo."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import sbr as plugin
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.plugins.plugin import HostTools
from multus_daemon.plugins.run import ListRunner
from multus_daemon.spec.cni.errors import CniError
from tests.namespaces import entered, remove_netns
from tests.netns import outcome, reference
from tests.netns.direct import Direct
from tests.netns.refusals import refuse_each
from tests.netns.test_malformed import Node
from tests.netns.test_repair import Attached

MakeCall = Callable[..., Call]
SBR = Direct(plugin)
V4 = {"address": "10.1.2.3/24", "gateway": "10.1.2.1", "interface": 1}
NO_GATEWAY = {"address": "10.1.2.3/24", "interface": 1}
SECOND = {"address": "10.5.5.5/24", "interface": 1}
V6 = {"address": "fd00::5/64", "gateway": "fd00::1", "interface": 1}
SINGLE = {"address": "10.3.0.1/32", "gateway": "10.1.2.1", "interface": 1}
OF_HOST = {"address": "10.1.2.1/24", "interface": 0}
OF_NONE = {"address": "10.1.2.3/24", "gateway": "10.1.2.1"}

CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "v4": ([V4], {}),
    "dual": ([V4, V6], {}),
    "v6": ([V6], {}),
    "two": ([NO_GATEWAY, SECOND], {}),
    "of the host": ([OF_HOST, V4], {}),
    "of no interface": ([OF_NONE], {}),
    "of an absent interface": ([V4, {**SECOND, "interface": 7}], {}),
    "single address": ([SINGLE], {}),
    "gateways": ([V4, V6], {"gateways": ["10.1.2.77", "fd00::77"]}),
    "gateway of all": ([NO_GATEWAY, SECOND, V6], {"gateways": ["10.5.5.77"], "addSourceHints": True}),
    "mapped gateway": ([V4], {"gateways": ["::ffff:10.1.2.77"]}),
    "table": ([V4, V6], {"table": 1000}),
    "table and hints": ([V4], {"table": 77, "addSourceHints": True}),
    "hints": ([V4], {"addSourceHints": True}),
    "dual hints": ([V4, SECOND, V6], {"addSourceHints": True}),
}
NEW = ("table and hints", "hints", "dual hints", "gateways", "gateway of all", "mapped gateway")
needs = reference.needs("sbr")
BY_ALL = [pytest.param(case, marks=reference.needs_newest()) if case in NEW else case for case in CASES]


def sbr(path: str, ips: list[dict[str, Any]], **keys: Any) -> dict[str, Any]:
    interfaces = [{"name": "veth9"}, {"name": "eth0", "sandbox": path}]
    given = {"cniVersion": "1.0.0", "interfaces": interfaces, "ips": ips, "routes": [{"dst": "0.0.0.0/0"}]}
    return {"cniVersion": "1.0.0", "name": "testnet", "type": "sbr", "prevResult": given, **keys}


@pytest.fixture
def pod(host: Any, netns: Any) -> Any:
    return prepared(host, netns)


def prepared(host: Any, netns: Any) -> Any:
    """A pod with many routes over eth0, over another link, and in other tables."""
    host.batch(f"link add veth9 type veth peer name eth0 netns {netns.path}", "link set veth9 up")
    netns.batch(
        "link set lo up", "link set eth0 up", "addr add 10.1.2.3/24 dev eth0", "addr add 10.5.5.5/24 dev eth0",
        "addr add 10.3.0.1/32 dev eth0", "addr add fd00::5/64 dev eth0 nodad", "link add br9 type bridge",
        "link set br9 up", "addr add 10.7.0.1/24 dev br9", "route add 10.8.0.0/24 via 10.7.0.9",
        "route add default via 10.1.2.1", "route add 192.0.2.0/24 via 10.1.2.1", "route add 192.0.9.0/24 dev eth0",
        "route add default via 10.1.2.9 metric 50", "route add 192.0.3.0/24 dev eth0 src 10.5.5.5 metric 5",
        "route add 192.0.6.0/24 via 10.77.0.1 dev eth0 onlink proto static", "route add blackhole 192.0.45.0/24",
        "route add 192.0.4.0/24 via 10.1.2.1 table 77", "route add 192.0.8.0/24 via 10.5.5.1",
        "rule add from 192.0.2.77 lookup 101",
    )  # fmt: skip
    netns.batch("route add 192.0.7.0/24 nexthop via 10.1.2.1 nexthop via 10.1.2.7")
    netns.batch(
        "route add default via fd00::1", "route add fd77::/64 via fd00::1", "route add fd78::/64 dev eth0",
        "rule add from fd99::1 lookup 103", options=["-6"],
    )  # fmt: skip
    return netns


def routing(netns: Any) -> list[str]:
    lines = [f"rule {line}" for family in ("-4", "-6") for line in netns.run("ip", "-d", family, "rule").splitlines()]
    for family in ("-4", "-6"):
        found = netns.run("ip", "-d", family, "route", "show", "table", "all").splitlines()
        # Those of the table local, and of br9, whose state changes by itself.
        lines += sorted({f"route {line}" for line in found if "table local" not in line and "fe80" not in line})
    return lines


def run(which: str, verb: str, path: str, config: dict[str, Any]) -> outcome.Outcome:
    call = outcome.builtin if which == "ours" else outcome.of_reference
    return call("sbr", verb, path, config)


@needs
@reference.needs_new()
@pytest.mark.parametrize("case", BY_ALL)
def test_both_leave_the_same(case: str, another_host: Any, make_netns: Any) -> None:
    ips, keys = CASES[case]
    found = []
    for which in ("theirs", "ours"):
        with another_host() as host:
            netns = prepared(host, make_netns())
            config = sbr(netns.path, ips, **keys)
            made = run(which, "ADD", netns.path, config)
            assert not made.failed, made.msg
            assert made.result == config["prevResult"]
            added = routing(netns)
            assert not run(which, "DEL", netns.path, config).failed
            found.append((added, routing(netns)))
    for theirs, ours in zip(*found, strict=True):
        reference.require_same(ours, theirs)


@needs
@reference.needs_new()
@pytest.mark.parametrize("case", BY_ALL)
@pytest.mark.parametrize("ours_adds", [True, False])
def test_each_checks_and_removes_what_the_other_made(case: str, ours_adds: bool, pod: Any) -> None:
    ips, keys = CASES[case]
    config, before = sbr(pod.path, ips, **keys), [line for line in routing(pod) if "rule" in line]
    for verb, ours in (("ADD", ours_adds), ("CHECK", not ours_adds), ("DEL", not ours_adds)):
        made = run("ours" if ours else "theirs", verb, pod.path, config)
        assert not made.failed, made.msg
    assert [line for line in routing(pod) if "rule" in line] == before


@needs
@reference.needs_new()
@pytest.mark.parametrize(
    "keys",
    [
        {"prevResult": None}, {"table": "x"}, {"table": -1}, {"table": 0}, {"prevResult": {"cniVersion": "1.0.0"}},
        {"pod": "ip link del eth0"}, {"gateways": ["x"]}, {"gateways": [""]}, {"gateways": "10.1.2.1"},
        {"gateways": ["10.1.2.77", "10.1.2.78"]}, {"gateways": ["fd00::7", "fd00::8"]},
        {"gateways": ["10.1.2.77", "10.1.2.77"]},
    ],
)  # fmt: skip
def test_both_refuse_for_the_same_reason(keys: dict[str, Any], host: Any, pod: Any) -> None:
    if "gateways" in keys and reference.release() < (1, 10):
        pytest.skip(f"needs v1.10.0 or newer: {reference.HOW}")
    config = sbr(pod.path, [V4, V6]) | keys
    pod.run("sh", "-c", config.pop("pod", "true"))
    before = routing(pod)
    ours = run("ours", "ADD", pod.path, config)
    reference.require_same(routing(pod), before)
    theirs = run("theirs", "ADD", pod.path, config)
    if "Link not found" in theirs.msg:
        assert "No such device" in ours.msg
    elif config.get("table") == -1:
        assert ours.failed
        assert theirs.failed
    else:
        outcome.require_same_failure(ours, theirs)


def test_packets_take_the_routes_of_their_source(host: Any, pod: Any) -> None:
    """A pod with two default routes answers each of its addresses by the link of the address."""
    pod.batch("route del default metric 50")

    def leaves_by(source: str) -> tuple[str, str]:
        (route,) = pod.ip("route", "get", "198.51.100.1", "from", source)
        return route["dev"], route.get("gateway", "")

    assert not run("ours", "ADD", pod.path, sbr(pod.path, [V4])).failed
    pod.batch("route add default via 10.7.0.9 dev br9")
    assert leaves_by("10.1.2.3") == ("eth0", "10.1.2.1")
    assert leaves_by("10.7.0.1") == ("br9", "10.7.0.9")


@pytest.mark.parametrize("case", ["dual", "dual hints", "table"])
@pytest.mark.parametrize("is_done_first", [True, False])
def test_a_failed_add_leaves_the_routes_as_they_were(
    is_done_first: bool, case: str, host: Any, pod: Any, make_call: MakeCall
) -> None:
    """For each request; one that fails may have been carried out."""
    ips, keys = CASES[case]
    before = routing(pod)

    def add() -> None:
        SBR.add(make_call("ADD", pod.path, **sbr(pod.path, ips, **keys)))

    def check(_at: int) -> None:
        reference.require_same(routing(pod), before)

    assert refuse_each(add, check, is_done_first=is_done_first) >= 3


def test_a_route_that_the_kernel_refuses_leaves_the_routes_as_they_were(pod: Any) -> None:
    before = routing(pod)
    config = sbr(pod.path, [{**V4, "gateway": "10.99.0.1"}, V6])
    assert "failed to add route default via 10.99.0.1" in run("ours", "ADD", pod.path, config).msg
    reference.require_same(routing(pod), before)


@pytest.mark.parametrize("gone", ["link", "path", "namespace"])
def test_del_without_the_interface(gone: str, pod: Any) -> None:
    config = sbr(pod.path, [V4, V6])
    assert not run("ours", "ADD", pod.path, config).failed
    if gone == "link":
        pod.run("ip", "link", "del", "eth0")
    elif gone == "namespace":
        remove_netns(Path(pod.path))
    for _ in range(2):
        assert run("ours", "DEL", "" if gone == "path" else pod.path, config) == outcome.Outcome()
    if gone == "link":
        assert not [line for line in routing(pod) if "10.1.2.3" in line or "fd00::5" in line]


# --- in the daemon ---------------------------------------------------------------------------------------------------

BRIDGE: dict[str, Any] = {
    "type": "bridge", "bridge": "br5", "isGateway": True, "ipam": {
        "type": "host-local", "ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00:1::/64"}]],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "192.0.2.0/24"}],
    },
}  # fmt: skip


class Kept(Attached):
    """As the daemon has it: what the kernel had after the ADD is on record."""

    def observe(self) -> None:
        with PodNetns(self.sandbox.netns) as netns:
            (observed,) = netns.observe([(self.attachment.ifname, self.result)])
        self.attachment = replace(self.attachment, observed=observed)


@pytest.fixture
def chain(tools: HostTools, tmp_path: Path) -> ListRunner:
    return ListRunner(outcome.dispatched("prefer", tools), ResultCache(tmp_path / "cache"), "/nowhere")


@pytest.mark.parametrize("keys", [{}, {"addSourceHints": True}])
@pytest.mark.parametrize(
    "command",
    [
        "ip rule del from 10.1.0.2", "ip -6 rule del from fd00:1::2", "ip route flush table 100",
        "ip route del 192.0.2.0/24 table 100",
        "ip -6 route flush table 101", "ip link set net1 down", "ip link del net1", "ip addr flush dev net1",
    ],
)  # fmt: skip
def test_each_part_comes_back(keys: Any, command: str, chain: ListRunner, netns: Any, tmp_path: Path) -> None:
    ipam = BRIDGE["ipam"] | {"dataDir": str(tmp_path / "leases")}
    made = Kept(chain, netns.path, [BRIDGE | {"ipam": ipam}, {"type": "sbr", **keys}])
    made.observe()
    before = rules_and_routes(netns)
    assert made.differences() == []
    netns.run("sh", "-c", command)
    assert made.differences()
    assert made.repair() == []
    assert rules_and_routes(netns) == before


def rules_and_routes(netns: Any) -> set[tuple[Any, ...]]:
    """Source and table of each rule; destination, gateway and table of each route."""
    found: set[tuple[Any, ...]] = set()
    for family in ("-4", "-6"):
        found |= {(rule["src"], rule["table"]) for rule in netns.ip(family, "rule")}
        for route in netns.ip(family, "route", "show", "table", "all"):
            if route.get("table") != "local" and not route["dst"].startswith("fe80"):
                found.add((route["dst"], route.get("gateway"), route.get("table", "main")))
    return found


def test_check_knows_where_the_routes_are(host: Any, netns: Any, tmp_path: Path, tools: HostTools) -> None:
    node = Node(tmp_path, "prefer", tools)
    node.put("web", "n1", [BRIDGE, {"type": "sbr"}], "1.0.0")
    node.engine.declare("n1")
    node.engine.verbs.add(node.engine.request(netns=netns.path))
    node.engine.verbs.check(node.engine.request("CHECK", netns=netns.path))
    netns.batch("route flush table 100")
    with pytest.raises(CniError, match="is not"):
        node.engine.verbs.check(node.engine.request("CHECK", netns=netns.path))
    node.engine.verbs.delete(node.engine.request("DEL", netns=netns.path))
    with entered(netns.path):
        assert [name for _, name in socket.if_nameindex()] == ["lo"]
    assert {source for source, *_ in rules_and_routes(netns)} == {"all"}


def test_addresses_of_other_interfaces_alone_are_refused(pod: Any) -> None:
    """The reference takes all routes of the interface away, and has no table for them."""
    before = routing(pod)
    made = run("ours", "ADD", pod.path, sbr(pod.path, [OF_HOST]))
    assert (made.code, made.msg) == (7, "No IP addresses supplied on interface: eth0")
    assert routing(pod) == before
