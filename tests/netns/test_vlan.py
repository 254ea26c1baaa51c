"""The built-in vlan against the kernel and beside the reference plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from multus_daemon.plugins.builtin import vlan as plugin
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.spec.cni.errors import CniError, InternalError
from multus_daemon.spec.cni.result import to_object
from tests.netns import beside, reference
from tests.netns.beside import DEFAULTS, V4, V6, link_of
from tests.netns.direct import Direct

MakeCall = Callable[..., Call]

pytestmark = beside.needs_kind("vlan")

VLAN = Direct(plugin)


def vlan(addresses: Any = None, routes: Any = (), **keys: Any) -> dict[str, Any]:
    return beside.config("vlan", addresses, routes, **{"master": "up0", "vlanId": 5, **keys})


@pytest.fixture
def call(host: Any, make_call: MakeCall) -> MakeCall:
    """Makes a call of vlan on `up0`; keywords as for `make_call`."""
    beside.with_master(host)
    return lambda verb, path, **keys: make_call(verb, path, **{"type": "vlan", "master": "up0", "vlanId": 5, **keys})


def test_containers_of_one_vlan_reach_each_other(host: Any, make_netns: Any, call: MakeCall, ipam: Any) -> None:
    """Each on its own uplink, as on two nodes; those of another VLAN do not."""
    host.batch(
        "link add up1 type veth peer name wire1", "link set up1 up", "link set wire1 up", "link add br0 type bridge"
    )
    host.batch("link set wire0 master br0", "link set wire1 master br0", "link set br0 up")
    pods = [make_netns() for _ in range(3)]
    own: tuple[dict[str, Any], ...] = ({}, {"master": "up1"}, {"vlanId": 6})
    for number, (pod, keys) in enumerate(zip(pods, own, strict=True), 2):
        ipam.result = {"ips": [{"address": f"10.213.7.{number}/24"}]}
        VLAN.add(call("ADD", pod.path, **keys))
    assert pods[0].reaches("10.213.7.3")
    assert not pods[0].reaches("10.213.7.4", wait=0.5)


def test_a_vlan_that_another_pod_has(make_netns: Any, call: MakeCall, ipam: Any) -> None:
    VLAN.add(call("ADD", make_netns().path))
    netns = make_netns()
    with pytest.raises(InternalError, match='failed to create vlan on "up0": File exists'):
        VLAN.add(call("ADD", netns.path))
    assert netns.links() == set()


@pytest.mark.parametrize("method", ["add_link", "change", "batch"])
def test_a_failed_step_leaves_nothing(
    host: Any, netns: Any, call: MakeCall, ipam: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    beside.fails_and_leaves_nothing(VLAN, call("ADD", netns.path), host, netns, ipam, monkeypatch, method)


def test_del_needs_neither_master_nor_namespace(netns: Any, call: MakeCall, ipam: Any) -> None:
    VLAN.add(call("ADD", netns.path))
    for path in (netns.path, netns.path, f"{netns.path}-gone", ""):
        VLAN.delete(call("DEL", path, master="gone0"))
    assert netns.links() == set()
    assert ipam.verbs == ["ADD", *["DEL"] * 4]


@pytest.mark.parametrize(
    ("change", "keys", "words"),
    [
        ("addr flush dev eth0", {}, 'address 10.213.7.2/24 is not on "eth0"'),
        ("link set eth0 down", {}, '"eth0" is down'),
        ("link del eth0", {}, 'interface "eth0" is not there'),
        ("", {"vlanId": 6}, 'VLAN of "eth0" is 5, not 6'),
        ("", {"master": "gone0"}, "failed to lookup master"),
        ("", {"mtu": 1451}, "invalid MTU 1451"),
    ],
)
def test_check_sees_what_has_changed(
    netns: Any, call: MakeCall, ipam: Any, change: str, keys: dict[str, Any], words: str
) -> None:
    previous = to_object(VLAN.add(call("ADD", netns.path)), "1.0.0")
    VLAN.check(call("CHECK", netns.path, prevResult=previous))
    if change:
        netns.batch(change)
    with pytest.raises(CniError, match=words):
        VLAN.check(call("CHECK", netns.path, prevResult=previous, **keys))


def test_the_address_of_the_master_is_no_difference(host: Any, netns: Any, call: MakeCall, ipam: Any) -> None:
    """The link has it, and follows."""
    previous = to_object(VLAN.add(call("ADD", netns.path)), "1.0.0")
    host.batch(f"link set up0 address {beside.MAC}")
    assert link_of(netns)["address"] == beside.MAC
    VLAN.check(call("CHECK", netns.path, prevResult=previous))


# --- beside the reference --------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "l2": vlan(),
    "l2-dns": vlan(ipam={}, dns={"search": ["example.com"]}),
    "no-id": vlan([V4], vlanId=0),
    "v4": vlan([V4], DEFAULTS[:1], vlanId=4094),
    "v4-route": vlan([V4], [{"dst": "198.51.100.0/24", "gw": "10.213.7.9"}]),
    "dual": vlan([V4, V6], DEFAULTS, mtu=1300),
    "mtu": vlan([V4], mtu=1450),
    "in-container": vlan([V4], linkInContainer=True),
    "1.1.0": vlan([V4], cniVersion="1.1.0"),
}
needs = [reference.needs("vlan", "static"), reference.needs_new()]
# Without IPAM.
newest = [*needs, reference.needs_newest()]
ALL_CASES = [pytest.param(case, marks=newest if case.startswith("l2") else needs) for case in CASES]


@pytest.mark.parametrize("case", ALL_CASES)
def test_both_leave_the_same(case: str, another_host: Any, make_netns: Any) -> None:
    beside.same(CASES[case], beside.masters(CASES[case]), another_host, make_netns, ifname="net1")


@pytest.mark.parametrize("case", ALL_CASES)
@pytest.mark.parametrize("ours_adds", [True, False])
def test_each_checks_and_removes_what_the_other_made(case: str, ours_adds: bool, host: Any, netns: Any) -> None:
    beside.each_other(CASES[case], beside.masters(CASES[case]), host, netns, ours_adds=ours_adds)


@pytest.mark.parametrize(
    "keys",
    [
        *({"master": value} for value in ("gone0", "", None)),
        *({"mtu": value} for value in (1451, -1, "1400")),
        *({"vlanId": value} for value in (4095, -1, "5")),
        {"ipam": {"type": "static", "addresses": []}},
        {"ipam": {"type": "no-such-plugin"}},
        {"linkInContainer": True, "master": "gone0"},
    ],
)
@pytest.mark.parametrize("_", [pytest.param("", marks=needs)])
def test_both_refuse_for_the_same_reason(_: str, keys: dict[str, Any], host: Any, make_netns: Any) -> None:
    beside.refuse(vlan([V4]) | keys, beside.masters(keys), host, make_netns)
