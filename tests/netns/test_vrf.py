"""The built-in vrf against the kernel and beside the reference plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from multus_daemon.kernel.links import Rtnl
from multus_daemon.plugins.builtin import vrf as plugin
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.spec.cni.errors import CniError, InternalError
from tests.netns import beside, outcome, reference
from tests.netns.beside import link_of
from tests.netns.direct import Direct

MakeCall = Callable[..., Call]

pytestmark = beside.needs_kind("vrf")

VRF = Direct(plugin)


def attached(pod: Any) -> Any:
    """A pod with two interfaces, eth0 and eth1, as earlier plugins leave them."""
    pod.batch(
        "link add eth0 type veth peer name x0",
        "link add eth1 type veth peer name x1",
        *(f"link set {name} up" for name in ("x0", "x1", "eth0", "eth1")),
        "addr add 10.1.1.2/24 dev eth0",
        "addr add fd01::2/64 dev eth0 nodad",
        "addr add 10.2.2.2/24 dev eth1",
        "route add default via 10.1.1.1",
        "route add 10.5.0.0/16 via 10.1.1.9 src 10.1.1.2 metric 77",
    )
    pod.batch("route add default via fd01::1", "route add fd05::/64 via fd01::9 metric 77", options=["-6"])
    reference.settled(pod)
    return pod


@pytest.fixture
def pod(netns: Any) -> Any:
    return attached(netns)


def vrf(path: str, **keys: Any) -> dict[str, Any]:
    ips = [{"interface": 0, "address": address} for address in ("10.1.1.2/24", "fd01::2/64")]
    given = {"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": path}], "ips": ips}
    return {"cniVersion": "1.0.0", "name": "testnet", "type": "vrf", "vrfname": "red", "prevResult": given, **keys}


@pytest.fixture
def call(make_call: MakeCall) -> MakeCall:
    """Makes a call of vrf; keywords as for `make_call`."""
    return lambda verb, path, **keys: make_call(verb, path, **{"ipam": None, **vrf(path, **keys)})


def state(pod: Any) -> list[str]:
    # The reference adds routes in another order, which IPv6 numbers.
    return [line for line in beside.everything(pod, pod) if line.startswith("pod ")]


def test_addresses_and_routes_move_to_the_table(pod: Any, call: MakeCall) -> None:
    # The reference loses such a route.
    pod.batch("route add 10.6.0.0/16 dev eth0")
    before = {family: pod.ip(family, "route", "show") for family in ("-4", "-6")}
    VRF.add(call("ADD", pod.path, table=500))
    assert (link_of(pod)["master"], link_of(pod, "red")["linkinfo"]["info_data"]["table"]) == ("red", 500)
    for family, routes in before.items():
        moved = [
            item for item in pod.ip(family, "route", "show", "vrf", "red") if item.get("type") in (None, "unicast")
        ]
        wanted = [item for item in routes if item["dev"] == "eth0" and not item["dst"].startswith("fe80")]
        assert sorted(item["dst"] for item in moved if not item["dst"].startswith(("fe80", "ff00"))) == sorted(
            item["dst"] for item in wanted
        )
    shown = pod.ip("-6", "addr", "show", "dev", "eth0", "scope", "global")[0]["addr_info"]
    assert [item["local"] for item in shown if item] == ["fd01::2"]


def test_the_last_interface_takes_the_vrf_along(pod: Any, call: MakeCall) -> None:
    for ifname in ("eth0", "eth1"):
        VRF.add(call("ADD", pod.path, ifname=ifname))
    VRF.delete(call("DEL", pod.path))
    assert (link_of(pod).get("master"), link_of(pod, "eth1")["master"]) == (None, "red")
    for path in (pod.path, pod.path, f"{pod.path}-gone", ""):
        VRF.delete(call("DEL", path, ifname="eth1"))
    assert "red" not in pod.links()


def test_del_without_the_interface_removes_the_vrf(pod: Any, call: MakeCall) -> None:
    """The reference fails, and leaves it."""
    VRF.add(call("ADD", pod.path))
    pod.batch("link del eth0")
    VRF.delete(call("DEL", pod.path))
    assert "red" not in pod.links()


def test_del_leaves_what_is_not_its_own(pod: Any, call: MakeCall) -> None:
    pod.batch("link add blue type vrf table 9", "link set eth0 master blue", "link add red type bridge")
    VRF.delete(call("DEL", pod.path))
    assert link_of(pod)["master"] == "blue"
    assert {"blue", "red"} <= pod.links()


@pytest.mark.parametrize("method", ["add_link", "change", "batch"])
def test_a_failed_step_leaves_nothing(pod: Any, call: MakeCall, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    before = state(pod)
    real, failures = getattr(Rtnl, method), [OSError(5, "no luck")]

    def fail(*arguments: Any, **keys: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*arguments, **keys)

    monkeypatch.setattr(Rtnl, method, fail)
    with pytest.raises(InternalError, match="no luck"):
        VRF.add(call("ADD", pod.path))
    assert "red" not in pod.links()
    reference.require_same(state(pod), before)


@pytest.mark.parametrize(
    ("change", "keys", "words"),
    [
        ("link set eth0 nomaster", {}, '"eth0" is not in VRF "red"'),
        ("link set red down", {}, '"red" is down'),
        ("link del red", {}, 'VRF "red" is not there'),
        ("", {"vrfname": "blue"}, 'VRF "blue" is not there'),
        ("", {"vrfname": "eth1"}, '"eth1" is a veth interface, not a vrf'),
        ("", {"table": 9}, 'table of VRF "red" is 1, not 9'),
    ],
)
def test_check_sees_what_has_changed(pod: Any, call: MakeCall, change: str, keys: dict[str, Any], words: str) -> None:
    VRF.add(call("ADD", pod.path))
    VRF.check(call("CHECK", pod.path))
    if change:
        pod.batch(change)
    with pytest.raises(CniError, match=words):
        VRF.check(call("CHECK", pod.path, **keys))


# --- beside the reference --------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "first-table": {},
    "table": {"table": 500},
    "large-table": {"table": 4294967295},
    "1.1.0": {"cniVersion": "1.1.0"},
}
SETUPS = {"none": "link set lo up", "others": "link add blue type vrf table 1", "same": "link add red type vrf table 7"}
needs = [reference.needs("vrf"), reference.needs_new()]


@pytest.mark.parametrize("case", [pytest.param(case, marks=needs) for case in CASES])
@pytest.mark.parametrize("setup", SETUPS)
def test_both_leave_the_same(case: str, setup: str, make_netns: Any) -> None:
    if setup == "same" and "table" in CASES[case]:
        pytest.skip("both refuse")
    found = []
    for add in (outcome.of_reference, outcome.builtin):
        netns = attached(make_netns())
        netns.batch(SETUPS[setup])
        given = vrf(netns.path, **CASES[case])
        made = add("vrf", "ADD", netns.path, given)
        assert (made.msg, made.result) == ("", given["prevResult"] | {"cniVersion": given["cniVersion"]})
        found.append(state(netns))
    reference.require_same(found[1], found[0])


@pytest.mark.parametrize("case", [pytest.param(case, marks=needs) for case in CASES])
@pytest.mark.parametrize("ours_adds", [True, False])
def test_each_checks_and_removes_what_the_other_made(case: str, ours_adds: bool, pod: Any) -> None:
    before = pod.links()
    given = vrf(pod.path, **CASES[case])
    for verb, ours in (("ADD", ours_adds), ("CHECK", not ours_adds), ("DEL", not ours_adds)):
        call = outcome.builtin if ours else outcome.of_reference
        assert call("vrf", verb, pod.path, given).msg == ""
    assert (pod.links(), link_of(pod).get("master")) == (before, None)


@pytest.mark.parametrize(
    ("keys", "setup"),
    [
        ({"vrfname": ""}, ""),
        ({"vrfname": None}, ""),
        ({"vrfname": "eth1"}, ""),
        ({"vrfname": 5}, ""),
        ({"prevResult": None}, ""),
        *(({"table": value}, "") for value in (-1, 2**32, "5")),
        ({"table": 5}, "link add red type vrf table 7"),
        ({}, "link add red type vrf table 7;link set eth0 master red"),
        ({}, "link add br0 type bridge;link set eth0 master br0"),
        ({}, "link set eth0 down;link set eth0 name eth7"),
    ],
)
@pytest.mark.parametrize("_", [pytest.param("", marks=needs)])
def test_both_refuse_for_the_same_reason(_: str, keys: dict[str, Any], setup: str, make_netns: Any) -> None:
    made = []
    for add in (outcome.builtin, outcome.of_reference):
        netns = attached(make_netns())
        netns.batch(*filter(None, setup.split(";")))
        before = netns.links()
        made.append(add("vrf", "ADD", netns.path, vrf(netns.path) | keys))
        if add is outcome.builtin:
            assert netns.links() == before
    ours, theirs = made
    if "could not get link" in theirs.msg:
        assert 'failed to get "eth0": No such device' in ours.msg
    else:
        outcome.require_same_failure(ours, theirs)
