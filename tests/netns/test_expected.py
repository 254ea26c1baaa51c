"""CHECK compares a namespace with the result where the network's plugins do not know the verb."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from msgspec.structs import replace

from multus_daemon.kernel import inet
from multus_daemon.kernel.netns import NamespaceError
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import restore
from multus_daemon.spec.cni.names import IfName
from multus_daemon.spec.cni.result import Interface, IpConfig, Result, Route

NET1 = IfName("net1")
MAIN = 254
ROUTES = (
    Route("0.0.0.0/0", "10.214.1.254", table=MAIN),
    Route("10.99.0.0/16", "10.214.1.9", table=MAIN),
    Route("fd99::/64", table=MAIN),
)
BY_INDEX = Result(
    (Interface("veth0"), Interface("net1", sandbox="/as/it/was/then")),
    (
        IpConfig("10.214.1.2/24", interface=1),
        IpConfig("fd14:1::2/64", interface=1),
        IpConfig("10.0.0.1/24", interface=0),
    ),
    ROUTES,
)
BY_NAME = Result((), (IpConfig("10.214.1.2/24"), IpConfig("fd14:1::2/64")), ROUTES)
"""Holds the same addresses and routes in the form of CNI 0.2.0."""


@pytest.fixture
def netns(netns: Any) -> Any:
    netns.batch(
        "link add net1 type veth peer name peer1",
        "link set dev net1 up",
        "link set dev peer1 up",
        "address add 10.214.1.2/24 dev net1",
        "address add fd14:1::2/64 dev net1 nodad",
        "route add default via 10.214.1.254 dev net1",
        "route add 10.99.0.0/16 via 10.214.1.9 dev net1",
        "route add fd99::/64 dev net1",
    )
    return netns


def first_missing(pod: PodNetns, result: Result) -> str:
    return next((item.what for item in pod.missing(NET1, result)), "")


def missing(netns: Any, result: Result) -> str:
    with PodNetns(netns.path) as pod:
        return first_missing(pod, result)


@pytest.mark.parametrize("result", [BY_INDEX, BY_NAME, Result()], ids=["by index", "by name", "nothing"])
def test_everything_is_there(netns: Any, result: Result) -> None:
    assert missing(netns, result) == ""


@pytest.mark.parametrize("result", [BY_INDEX, BY_NAME], ids=["by index", "by name"])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("link delete net1", 'interface "net1" is not there'),
        ("address delete 10.214.1.2/24 dev net1", 'address 10.214.1.2/24 is not on "net1"'),
        ("address delete fd14:1::2/64 dev net1", 'address fd14:1::2/64 is not on "net1"'),
        ("route delete default", "route to 0.0.0.0/0 via 10.214.1.254 is not there"),
        ("route delete 10.99.0.0/16", "route to 10.99.0.0/16 via 10.214.1.9 is not there"),
        ("route change 10.99.0.0/16 via 10.214.1.8", "route to 10.99.0.0/16 via 10.214.1.9 is not there"),
        ("route delete fd99::/64", "route to fd99::/64 is not there"),
    ],
)
def test_what_was_taken_away_is_named(netns: Any, result: Result, change: str, problem: str) -> None:
    netns.batch(change)
    assert missing(netns, result) == problem


def test_a_route_that_was_moved_to_another_table_is_not_there(netns: Any) -> None:
    netns.batch("route delete 10.99.0.0/16", "route add 10.99.0.0/16 via 10.214.1.9 dev net1 table 100")
    assert missing(netns, BY_INDEX) == "route to 10.99.0.0/16 via 10.214.1.9 is not there"


def test_a_namespace_that_is_not_there(netns: Any) -> None:
    with PodNetns("/nonexistent") as pod, pytest.raises(NamespaceError):
        first_missing(pod, BY_NAME)


OWN_ROUTES = 20_000


@pytest.fixture
def crowded(netns: Any) -> Any:
    """The namespace of a router: it has many routes of its own, half of them in both families."""
    numbers = [(number >> 8, number & 255) for number in range(OWN_ROUTES // 2)]
    netns.batch(
        *(f"route add 10.66.{high}.{low} via 10.214.1.9 dev net1" for high, low in numbers),
        *(f"route add fd66::{high:x}:{low:x} via fd14:1::9 dev net1 table 100" for high, low in numbers),
    )
    return netns


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every route that is decoded from now on, in the kernel's form."""
    found: list[bytes] = []
    decode = inet.decode_routes

    def noting(body: bytes) -> list[inet.Route]:
        found.append(body)
        return decode(body)

    monkeypatch.setattr(inet, "decode_routes", noting)
    return found


def test_only_routes_that_are_compared_are_read(crowded: Any, decoded: list[bytes]) -> None:
    with PodNetns(crowded.path) as pod:
        tracemalloc.start()
        try:
            assert first_missing(pod, BY_INDEX) == ""
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert len(decoded) == 3
    assert peak < 1024 * 1024


def test_a_built_in_reads_no_others_either(crowded: Any, decoded: list[bytes]) -> None:
    result = Result(ips=(IpConfig("10.214.1.2/24"), IpConfig("fd14:1::2/64")), routes=ROUTES[1:])
    with PodNetns(crowded.path) as pod:
        link = pod.pod.link("net1")
        assert list(restore.missing(pod, link, restore.changes(link, result))) == []
        # The subnets' and the two of the result.
        assert len(decoded) == 4
        other = replace(result, routes=(Route("10.98.0.0/16"),))
        assert "10.98.0.0/16" in next(restore.missing(pod, link, restore.changes(link, other))).text


def test_what_an_add_leaves_is_read_of_its_interfaces_only(crowded: Any) -> None:
    crowded.batch(
        "link add net2 type veth peer name peer2",
        "link set dev net2 up",
        "link set dev peer2 up",
        "address add 10.216.1.2/24 dev net2",
        "route add 10.97.0.0/16 nexthop via 10.216.1.1 dev net2 nexthop via 10.214.1.9 dev net1",
    )
    plugged = Result((Interface("net2", sandbox="/as/it/was/then"),), (IpConfig("10.216.1.2/24", interface=0),))
    with PodNetns(crowded.path) as pod:
        tracemalloc.start()
        try:
            (left,) = pod.observe([(IfName("net2"), plugged)])
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert {route.dst for route in left.routes} == {"10.216.1.0/24", "10.97.0.0/16"}
    assert peak < 1024 * 1024


# --- what an ADD left ------------------------------------------------------------------------------------------------


def observed(netns: Any, result: Result) -> Result:
    with PodNetns(netns.path) as pod:
        (found,) = pod.observe([(NET1, result)])
    return found


def test_an_interface_of_the_host_with_the_same_name_is_none_of_the_containers(netns: Any) -> None:
    own, others = Interface("net1", sandbox="/as/it/was/then"), Interface("net1")
    left = observed(netns, Result((own, others), (IpConfig("10.214.1.2/24", interface=0),)))
    (interface,) = left.interfaces
    assert (interface.name, interface.sandbox) == (own.name, own.sandbox)
    assert left.ips == (IpConfig("10.214.1.2/24", interface=0),)


@pytest.mark.parametrize("result", [BY_INDEX, BY_NAME], ids=["by index", "by name"])
@pytest.mark.parametrize(
    "change",
    [
        "link delete net1",
        "address delete 10.214.1.2/24 dev net1",
        "route delete 10.99.0.0/16",
        "route delete fd99::/64",
    ],
)
def test_what_is_not_there_after_the_add_is_not_missing_later(netns: Any, result: Result, change: str) -> None:
    netns.batch(change)
    assert missing(netns, observed(netns, result)) == ""


@pytest.mark.parametrize("result", [BY_INDEX, BY_NAME], ids=["by index", "by name"])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("address delete 10.214.1.2/24 dev net1", 'address 10.214.1.2/24 is not on "net1"'),
        ("address delete fd14:1::2/64 dev net1", 'address fd14:1::2/64 is not on "net1"'),
        ("route delete default", "route to 0.0.0.0/0 via 10.214.1.254 is not there"),
        ("route delete 10.99.0.0/16", "route to 10.99.0.0/16 via 10.214.1.9 is not there"),
        # The kernel made it with the address, and no result names it.
        ("route delete 10.214.1.0/24", "route to 10.214.1.0/24 is not there"),
        ("route delete fd14:1::/64", "route to fd14:1::/64 is not there"),
    ],
)
def test_what_the_add_left_is_missing_later(netns: Any, result: Result, change: str, problem: str) -> None:
    with_gateway = Result(result.interfaces, result.ips, (Route("0.0.0.0/0", "10.214.1.254"), *result.routes[1:]))
    left = observed(netns, with_gateway)
    netns.batch(change)
    assert missing(netns, left) == problem


def test_a_moved_route_must_stay_in_its_table(netns: Any) -> None:
    """Another network's default route, as sbr leaves it in the main table, is none of this one's."""
    netns.batch(
        "route delete default",
        "route add default via 10.214.1.254 dev net1 table 100",
        "link add eth0 type veth peer name peer0",
        "link set dev eth0 up",
        "link set dev peer0 up",
        "address add 10.215.1.2/24 dev eth0",
        "route add default via 10.215.1.1 dev eth0",
    )
    left = observed(netns, Result(BY_INDEX.interfaces, BY_INDEX.ips, (Route("0.0.0.0/0", "10.214.1.254"),)))
    assert Route("0.0.0.0/0", "10.214.1.254", table=100) in left.routes
    assert not [route for route in left.routes if route.gw == "10.215.1.1"]
    netns.batch("route delete default table 100")
    assert missing(netns, left) == "route to 0.0.0.0/0 via 10.214.1.254 is not there"
