"""The built-in ipvlan against the kernel and beside the reference plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from multus_daemon.plugins.builtin import ipvlan as plugin
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.result import to_object
from tests.netns import beside, outcome, reference
from tests.netns.beside import DEFAULTS, V4, V6
from tests.netns.direct import Direct

MakeCall = Callable[..., Call]

pytestmark = beside.needs_kind("ipvlan")

IPVLAN = Direct(plugin)
BEFORE = {"cniVersion": "1.0.0", "interfaces": [{"name": "up0"}], "ips": [V4], "routes": DEFAULTS[:1]}


def ipvlan(addresses: Any = None, routes: Any = (), **keys: Any) -> dict[str, Any]:
    return beside.config("ipvlan", addresses, routes, **{"master": "up0", **keys})


@pytest.fixture
def call(host: Any, make_call: MakeCall) -> MakeCall:
    """Makes a call of ipvlan on `up0`; keywords as for `make_call`."""
    beside.with_master(host)
    return lambda verb, path, **keys: make_call(verb, path, **{"type": "ipvlan", "master": "up0", **keys})


@pytest.mark.parametrize("mode", ["l2", "l3", "l3s"])
def test_containers_reach_each_other(make_netns: Any, call: MakeCall, ipam: Any, mode: str) -> None:
    pods = [make_netns() for _ in range(2)]
    for number, pod in enumerate(pods, 2):
        ipam.result = {"ips": [{"address": f"10.213.7.{number}/24"}]}
        IPVLAN.add(call("ADD", pod.path, mode=mode))
    assert pods[0].reaches("10.213.7.3")


@pytest.mark.parametrize("method", ["add_link", "change", "batch"])
def test_a_failed_step_leaves_nothing(
    host: Any, netns: Any, call: MakeCall, ipam: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    beside.fails_and_leaves_nothing(IPVLAN, call("ADD", netns.path), host, netns, ipam, monkeypatch, method)


@pytest.mark.parametrize(
    ("change", "keys", "words"),
    [
        ("addr flush dev eth0", {}, 'address 10.213.7.2/24 is not on "eth0"'),
        ("link del eth0", {}, 'interface "eth0" is not there'),
        ("link set eth0 type ipvlan mode l3", {}, 'mode of "eth0" is l3, not l2'),
        ("", {"mode": "l3s"}, 'mode of "eth0" is l2, not l3s'),
        ("", {"master": "gone0"}, "failed to lookup master"),
    ],
)
def test_check_sees_what_has_changed(
    netns: Any, call: MakeCall, ipam: Any, change: str, keys: dict[str, Any], words: str
) -> None:
    previous = to_object(IPVLAN.add(call("ADD", netns.path)), "1.0.0")
    IPVLAN.check(call("CHECK", netns.path, prevResult=previous))
    if change:
        netns.batch(change)
    with pytest.raises(CniError, match=words):
        IPVLAN.check(call("CHECK", netns.path, prevResult=previous, **keys))


def test_del_needs_neither_master_nor_namespace(netns: Any, call: MakeCall, ipam: Any) -> None:
    IPVLAN.add(call("ADD", netns.path))
    for path in (netns.path, netns.path, f"{netns.path}-gone", ""):
        IPVLAN.delete(call("DEL", path, master="gone0"))
    assert netns.links() == set()


# --- beside the reference --------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "default-route": ipvlan([V4], master=""),
    "v4": ipvlan([V4], DEFAULTS[:1]),
    "v4-route": ipvlan([V4], [{"dst": "198.51.100.0/24", "gw": "10.213.7.9"}], dns={"search": ["example.com"]}),
    "dual": ipvlan([V4, V6], DEFAULTS, mtu=1300),
    "l3": ipvlan([V4], DEFAULTS[:1], mode="l3"),
    "l3s": ipvlan([V4, V6], DEFAULTS, mode="l3s"),
    "larger-mtu": ipvlan([V4], mtu=1451),
    "negative-mtu": ipvlan([V4], mtu=-1),
    "in-container": ipvlan([V4], linkInContainer=True),
    "1.1.0": ipvlan([V4], cniVersion="1.1.0"),
}
CHAINED = {
    "addresses": ipvlan(prevResult=BEFORE),
    "master": ipvlan([V6], prevResult=BEFORE, master=""),
    "both": ipvlan(prevResult=BEFORE, master="", ipam={}),
}
needs = [reference.needs("ipvlan", "static"), reference.needs_new()]


@pytest.mark.parametrize("case", [pytest.param(case, marks=needs) for case in CASES | CHAINED])
def test_both_leave_the_same(case: str, another_host: Any, make_netns: Any) -> None:
    given = (CASES | CHAINED)[case]
    beside.same(given, beside.masters(given), another_host, make_netns, ifname="net1")


@pytest.mark.parametrize("case", [pytest.param(case, marks=needs) for case in CASES])
@pytest.mark.parametrize("ours_adds", [True, False])
def test_each_checks_and_removes_what_the_other_made(case: str, ours_adds: bool, host: Any, netns: Any) -> None:
    beside.each_other(CASES[case], beside.masters(CASES[case]), host, netns, ours_adds=ours_adds)


@pytest.mark.parametrize(
    "keys",
    [
        {"master": "gone0"},
        {"master": "", "linkInContainer": False, "no-route": True},
        *({"mtu": value} for value in (60, "1400")),
        *({"ipam": value} for value in ({}, None, {"type": "static", "addresses": []}, {"type": "no-such-plugin"})),
        {"master": "", "prevResult": {**BEFORE, "interfaces": [{"name": "up0"}, {"name": "up1"}]}},
        {"master": "", "prevResult": {**BEFORE, "interfaces": []}},
    ],
)
@pytest.mark.parametrize("_", [pytest.param("", marks=needs)])
def test_both_refuse_for_the_same_reason(_: str, keys: dict[str, Any], host: Any, make_netns: Any) -> None:
    has_route = not keys.pop("no-route", False)

    def prepare(side: Any, pod: Any) -> None:
        beside.with_master(side)
        if not has_route:
            side.run("ip", "route", "del", "default")

    beside.refuse(ipvlan([V4]) | keys, prepare, host, make_netns)


@pytest.mark.parametrize("_", [pytest.param("", marks=needs)])
def test_a_mode_that_neither_has(_: str, host: Any, netns: Any) -> None:
    """A newer binary may know it, so the built-in leaves it to that (code 2)."""
    beside.with_master(host)
    given = ipvlan([V4], mode="l4")
    assert outcome.builtin("ipvlan", "ADD", netns.path, given).code == 2
    assert outcome.of_reference("ipvlan", "ADD", netns.path, given).failed
