"""Default routes of a namespace, replaced by those that were asked for, as `ip route` shows them."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from multus_daemon.kernel.netns import NamespaceError
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.spec.cni.names import IfName
from multus_daemon.spec.cni.result import Route
from tests.waiting import until

V4 = Route("0.0.0.0/0", "10.214.1.254")
V6 = Route("::/0", "fd14:1::fe")
NET1 = IfName("net1")


@pytest.fixture
def netns(netns: Any) -> Any:
    """Two links with an address of each family, no default route."""
    for number, ifname in enumerate(("eth0", "net1")):
        netns.batch(
            f"link add {ifname} type veth peer name peer{number}",
            f"link set dev {ifname} up",
            f"link set dev peer{number} up",
            f"address add 10.214.{number}.2/24 dev {ifname}",
            f"address add fd14:{number}::2/64 dev {ifname} nodad",
        )
    # The kernel gives each of the four a link-local address, with routes, a moment later.
    until(lambda: link_local(netns) >= 4)
    return netns


def link_local(netns: Any) -> int:
    """Number of link-local addresses that are ready."""
    found = [item for link in netns.ip("-6", "addr", "show") for item in link["addr_info"]]
    return sum(item["scope"] == "link" and "tentative" not in item for item in found)


def defaults(netns: Any, family: int) -> list[tuple[str, str, int]]:
    """Gateway, interface and metric of each default route for packets of any source, in the kernel's order."""
    return [
        (item.get("gateway", item.get("type", "")), item.get("dev", ""), item.get("metric", 0))
        for item in netns.ip(f"-{family}", "route", "show", "default")
        if "from" not in item
    ]


def everything(netns: Any) -> list[str]:
    """All routes of all tables, in detail, but for what counts down or is multicast."""
    lines = [*netns.run("ip", "-d", "route", "show", "table", "all").splitlines()]
    lines += netns.run("ip", "-6", "-d", "route", "show", "table", "all").splitlines()
    return [line for line in lines if "multicast" not in line]


def move(netns: Any, *routes: Route, ifname: IfName = NET1) -> None:
    with PodNetns(netns.path) as pod:
        pod.default_routes.replace(ifname, routes)


@pytest.mark.weak_spot(2)
@pytest.mark.npwg("4.1.2.1.9a")
@pytest.mark.conformance("routes-1")
@pytest.mark.parametrize("existing", [("via", "10.214.0.1", "dev", "eth0"), ("dev", "eth0")], ids=["gateway", "device"])
def test_ipv4(netns: Any, existing: Sequence[str]) -> None:
    """A default route without gateway on eth0 goes too."""
    netns.run("ip", "route", "add", "default", *existing)
    move(netns, V4)
    assert defaults(netns, 4) == [("10.214.1.254", "net1", 0)]
    assert "10.214.1.254 dev net1" in netns.run("ip", "route", "get", "192.0.2.1")


@pytest.mark.weak_spot(2)
@pytest.mark.conformance("routes-1")
def test_ipv6(netns: Any) -> None:
    netns.run("ip", "-6", "route", "add", "default", "via", "fd14:0::1", "dev", "eth0")
    move(netns, V6)
    assert defaults(netns, 6) == [("fd14:1::fe", "net1", 1024)]
    assert "via fd14:1::fe dev net1" in netns.run("ip", "-6", "route", "get", "2001:db8::1")


def test_a_link_local_gateway(netns: Any) -> None:
    netns.run("ip", "-6", "route", "add", "default", "via", "fe80::1", "dev", "eth0")
    move(netns, Route("::/0", "fe80::1"))
    assert defaults(netns, 6) == [("fe80::1", "net1", 1024)]


@pytest.mark.conformance("routes-2")
def test_without_a_default_route_before(netns: Any) -> None:
    move(netns, V4, V6)
    assert defaults(netns, 4) == [("10.214.1.254", "net1", 0)]
    assert defaults(netns, 6) == [("fd14:1::fe", "net1", 1024)]


@pytest.mark.npwg("4.1.2.1.9b")
def test_of_several_gateways_the_first_is_preferred(netns: Any) -> None:
    move(
        netns,
        V4,
        V6,
        Route("0.0.0.0/0", "10.214.1.253", priority=1),
        Route("::/0", "fd14:1::fd", priority=1025),
        Route("0.0.0.0/0", "10.214.1.252", priority=2),
    )
    assert defaults(netns, 4) == [("10.214.1.254", "net1", 0), ("10.214.1.253", "net1", 1), ("10.214.1.252", "net1", 2)]
    assert defaults(netns, 6) == [("fd14:1::fe", "net1", 1024), ("fd14:1::fd", "net1", 1025)]


@pytest.mark.weak_spot(16)
@pytest.mark.parametrize(("wanted", "other"), [(V4, 6), (V6, 4)])
def test_the_other_family_is_left_alone(netns: Any, wanted: Route, other: int) -> None:
    netns.run("ip", "route", "add", "default", "via", "10.214.0.1")
    netns.run("ip", "-6", "route", "add", "default", "via", "fd14:0::1")
    before = defaults(netns, other)
    move(netns, wanted)
    assert defaults(netns, other) == before != []


def test_the_same_again_changes_nothing(netns: Any) -> None:
    move(netns, V4, V6)
    before = everything(netns)
    move(netns, V4, V6)
    assert everything(netns) == before


def every_kind(netns: Any) -> None:
    """Default routes of every kind that the kernel has, and others that are none."""
    netns.batch(
        # Two of one metric: the order counts.
        "route add default via 10.214.0.1 src 10.214.0.2 mtu 1300 advmss 1200",
        "route append default via 10.214.1.9 dev net1 proto static",
        "route add default metric 5 proto dhcp nexthop via 10.214.0.1 weight 3 nexthop via 10.214.1.1",
        "route add default via 198.51.100.1 dev eth0 onlink metric 6",
        "route add default dev eth0 scope link metric 7",
        "route add unreachable default metric 900",
        "route add default via 10.214.0.1 table 100",
        "route add 10.215.0.0/16 via 10.214.0.1",
        "route add 0.0.0.0/1 via 10.214.0.1",
    )
    netns.batch(
        "route add default via fd14:0::1 pref high",
        "route add default via fe80::1 dev net1 metric 20 proto ra",
        "route add default metric 5 nexthop via fd14:0::1 nexthop via fd14:1::1 weight 2",
        "route add unreachable default metric 9999",
        "route add default via fd14:0::1 table 100",
        "route add fd15::/16 via fd14:0::1",
        "route add default from fd14:0::2 via fd14:0::1 metric 30",
        options=["-6"],
    )


@pytest.mark.conformance("routes-1")
def test_every_kind_of_default_route_goes_and_no_other(netns: Any) -> None:
    every_kind(netns)
    others = [line for line in everything(netns) if not line.startswith("\t") and " default " not in line]
    others += [line for line in everything(netns) if "table 100" in line or "default from" in line]
    move(netns, V4, V6)
    assert defaults(netns, 4) == [("10.214.1.254", "net1", 0)]
    assert defaults(netns, 6) == [("fd14:1::fe", "net1", 1024)]
    after = everything(netns)
    assert [line for line in after if line not in others] == [
        line for line in after if "10.214.1.254" in line or "fd14:1::fe" in line
    ]
    assert set(others) <= set(after)


@pytest.mark.weak_spot(54)
@pytest.mark.parametrize(
    ("routes", "code", "words"),
    [
        ([Route("0.0.0.0/0", "198.51.100.1")], errno.ENETUNREACH, "198.51.100.1 dev net1 .*invalid gateway"),
        # On another link.
        ([Route("0.0.0.0/0", "10.214.0.1")], errno.ENETUNREACH, "10.214.0.1 dev net1 .*invalid gateway"),
        ([Route("::/0", "2001:db8::1")], errno.EHOSTUNREACH, "2001:db8::1 dev net1"),
        # The pod itself.
        ([Route("::/0", "fd14:1::2")], errno.EINVAL, "fd14:1::2 dev net1"),
        # When the first gateway, or a whole family, is there already.
        ([V4, Route("0.0.0.0/0", "198.51.100.1", priority=1)], errno.ENETUNREACH, "198.51.100.1"),
        ([V4, V6, Route("::/0", "2001:db8::1", priority=1025)], errno.EHOSTUNREACH, "2001:db8::1"),
    ],
)
def test_a_gateway_off_the_link_changes_nothing(
    netns: Any, routes: list[Route], code: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    every_kind(netns)
    before = everything(netns)
    with pytest.raises(OSError, match=f"default route via {words}") as caught:
        move(netns, *routes)
    assert caught.value.errno == code
    assert everything(netns) == before
    assert caplog.text == ""


def test_an_expiring_route_is_put_back_with_its_time(netns: Any) -> None:
    netns.run("ip", "-6", "route", "add", "default", "via", "fe80::1", "dev", "eth0", "proto", "ra", "expires", "600")
    with pytest.raises(OSError, match="2001:db8::1"):
        move(netns, Route("::/0", "2001:db8::1"))
    [route] = netns.ip("-6", "route", "show", "default")
    assert (route["protocol"], route["gateway"]) == ("ra", "fe80::1")
    assert 590 <= route["expires"] <= 600


def test_a_route_by_nexthop_id(netns: Any) -> None:
    netns.run("ip", "nexthop", "add", "id", "7", "via", "10.214.0.1", "dev", "eth0")
    netns.run("ip", "route", "add", "default", "nhid", "7")
    with pytest.raises(OSError, match="198.51.100.1"):
        move(netns, Route("0.0.0.0/0", "198.51.100.1"))
    assert netns.run("ip", "route", "show", "default").split()[:3] == ["default", "nhid", "7"]
    move(netns, V4)
    assert defaults(netns, 4) == [("10.214.1.254", "net1", 0)]


def test_routes_of_a_link_without_carrier_are_put_back(netns: Any, caplog: pytest.LogCaptureFixture) -> None:
    every_kind(netns)
    netns.run("ip", "link", "set", "dev", "peer0", "down")
    before = [line.replace(" linkdown", "") for line in everything(netns)]
    with pytest.raises(OSError, match="198.51.100.1"):
        move(netns, Route("0.0.0.0/0", "198.51.100.1"))
    assert [line.replace(" linkdown", "") for line in everything(netns)] == before
    assert caplog.text == ""


def test_what_can_not_be_put_back_is_logged_and_the_cause_raised(
    netns: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    netns.run("ip", "route", "add", "default", "via", "10.214.0.1")
    monkeypatch.setattr("multus_daemon.kernel.routes._Found.description", lambda _: bytes(1))
    with caplog.at_level(logging.ERROR), pytest.raises(OSError, match="via 198.51.100.1"):
        move(netns, Route("0.0.0.0/0", "198.51.100.1"))
    assert "a default route of metric 0 can't be put back" in caplog.text


@pytest.mark.weak_spot(54)
def test_a_link_that_is_not_there_changes_nothing(netns: Any) -> None:
    every_kind(netns)
    before = everything(netns)
    with pytest.raises(OSError, match="No such device") as caught:
        move(netns, V4, ifname=IfName("net9"))
    assert caught.value.errno == errno.ENODEV
    assert everything(netns) == before


def test_a_namespace_that_is_none() -> None:
    with PodNetns("/nonexistent") as pod, pytest.raises(NamespaceError) as caught:
        pod.default_routes.replace(NET1, [V4])
    assert caught.value.is_absent


def test_what_is_replaced_is_known_before_and_comes_back(netns: Any) -> None:
    netns.run("ip", "route", "add", "default", "via", "10.214.0.1", "metric", "5")
    netns.run("ip", "route", "add", "default", "dev", "eth0", "metric", "7")
    netns.run("ip", "-6", "route", "add", "default", "via", "fd14:0::1", "dev", "eth0")
    before = defaults(netns, 4), defaults(netns, 6)
    with PodNetns(netns.path) as pod:
        known = pod.default_routes.replaced_by([V4])
        assert (defaults(netns, 4), defaults(netns, 6)) == before
        assert pod.default_routes.replaced_by([V4, V6]) == {
            "eth0": [*known["eth0"], Route("::/0", "fd14::1", priority=1024)]
        }
        assert pod.default_routes.replace(NET1, [V4]) == known
        assert (defaults(netns, 4), defaults(netns, 6)) == ([("10.214.1.254", "net1", 0)], before[1])
        netns.run("ip", "link", "delete", "net1")
        for _ in range(2):
            pod.default_routes.add(IfName("eth0"), known["eth0"])
    assert (defaults(netns, 4), defaults(netns, 6)) == before
