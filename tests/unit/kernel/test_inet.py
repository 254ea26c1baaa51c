"""Messages about addresses and routes, byte for byte as pyroute2 writes and reads them."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import pytest
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from multus_daemon.kernel import inet
from multus_daemon.kernel.inet import Address, IpInterface, Route
from multus_daemon.kernel.transport import NLM_F_CREATE, NLM_F_EXCL, Request

V4, V6 = socket.AF_INET, socket.AF_INET6
NEW = NLM_F_CREATE | NLM_F_EXCL


def encoded(message: Any, **fields: Any) -> bytes:
    for name, value in fields.items():
        message[name] = value
    message.reset()
    message.encode()
    return bytes(message.data[16:])


def interface(text: str) -> IpInterface:
    return ipaddress.ip_interface(text)


# --- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "broadcast", "expected"),
    [
        ("10.1.2.3/24", True, "10.1.2.255"),
        ("10.1.2.3/24", False, None),
        ("10.1.2.3/30", True, "10.1.2.3"),
        ("10.1.2.3/31", True, None),
        ("10.1.2.3/32", True, None),
        ("fd00::3/64", True, None),
    ],
)
def test_an_address_is_added_and_deleted(text: str, broadcast: bool, expected: str | None) -> None:
    ip, _, length = text.partition("/")
    family = V6 if ":" in ip else V4
    attributes = [("IFA_LOCAL", ip), ("IFA_ADDRESS", ip)]
    plain = encoded(ifaddrmsg(), family=family, prefixlen=int(length), index=9, attrs=attributes)
    more = [("IFA_BROADCAST", expected)] if expected else []
    body = encoded(ifaddrmsg(), family=family, prefixlen=int(length), index=9, attrs=[*attributes, *more])
    assert inet.add_address(9, interface(text), broadcast=broadcast) == Request(20, body, NEW)
    assert inet.delete_address(9, interface(text)) == Request(21, plain)


@pytest.mark.parametrize(("text", "family", "flags"), [("10.1.2.3/32", V4, 0), ("fd00::3/64", V6, 2)])
def test_an_address_without_duplicate_address_detection(text: str, family: int, flags: int) -> None:
    ip, _, length = text.partition("/")
    attributes = [("IFA_LOCAL", ip), ("IFA_ADDRESS", ip)]
    body = encoded(ifaddrmsg(), family=family, prefixlen=int(length), flags=flags, index=9, attrs=attributes)
    assert inet.add_address(9, interface(text), dad=False) == Request(20, body, NEW)


def test_addresses_are_asked_for() -> None:
    assert inet.list_addresses(9, V6) == Request(22, encoded(ifaddrmsg(), family=V6, index=9))


@pytest.mark.parametrize(
    ("fields", "attributes", "expected"),
    [
        (
            {"family": V4, "prefixlen": 24},
            [("IFA_ADDRESS", "10.1.2.9"), ("IFA_LOCAL", "10.1.2.3"), ("IFA_FLAGS", 0x280)],
            Address(interface("10.1.2.3/24"), 0x280),
        ),
        (
            {"family": V6, "prefixlen": 64, "flags": 0x40},
            [("IFA_ADDRESS", "fd00::3")],
            Address(interface("fd00::3/64"), 0x40),
        ),
        (
            # The attribute has more bits than the field, and counts where it is 0 as well.
            {"family": V6, "prefixlen": 64, "flags": 0x08},
            [("IFA_ADDRESS", "fd00::3"), ("IFA_FLAGS", 0)],
            Address(interface("fd00::3/64"), 0),
        ),
    ],
)
def test_an_address_is_read(fields: dict[str, int], attributes: list[Any], expected: Address) -> None:
    assert inet.decode_address(encoded(ifaddrmsg(), index=9, attrs=attributes, **fields)) == (9, expected)


# --- routes ----------------------------------------------------------------------------------------------------------

GATEWAY, SOURCE = ipaddress.ip_address("10.1.2.1"), ipaddress.ip_address("10.1.2.3")
ROUTES: list[tuple[Route, dict[str, Any], list[Any]]] = [
    (
        Route(interface("0.0.0.0/0"), 9, GATEWAY),
        {"family": V4, "dst_len": 0, "table": 254},
        [("RTA_OIF", 9), ("RTA_GATEWAY", "10.1.2.1")],
    ),
    (
        Route(interface("10.9.0.0/16"), 9, GATEWAY, SOURCE, priority=7, table=100),
        {"family": V4, "dst_len": 16, "table": 100},
        [
            ("RTA_OIF", 9),
            ("RTA_DST", "10.9.0.0"),
            ("RTA_GATEWAY", "10.1.2.1"),
            ("RTA_PREFSRC", "10.1.2.3"),
            ("RTA_PRIORITY", 7),
        ],
    ),
    (
        Route(interface("10.9.0.0/16"), 9, scope=inet.SCOPE_LINK, table=1000),
        {"family": V4, "dst_len": 16, "table": 0, "scope": 253},
        [("RTA_OIF", 9), ("RTA_DST", "10.9.0.0"), ("RTA_TABLE", 1000)],
    ),
    (
        Route(interface("fd00::/64"), 9, ipaddress.ip_address("fe80::1")),
        {"family": V6, "dst_len": 64, "table": 254},
        [("RTA_OIF", 9), ("RTA_DST", "fd00::"), ("RTA_GATEWAY", "fe80::1")],
    ),
    (Route(interface("::/0"), 9), {"family": V6, "dst_len": 0, "table": 254}, [("RTA_OIF", 9)]),
]


@pytest.mark.parametrize(("route", "fields", "attributes"), ROUTES)
def test_a_route(route: Route, fields: dict[str, Any], attributes: list[Any]) -> None:
    body = encoded(rtmsg(), attrs=attributes, proto=3, type=1, **fields)
    assert inet.add_route(route) == Request(24, body, NEW)
    assert inet.add_route(route, exclusive=False) == Request(24, body, NLM_F_CREATE)
    assert inet.delete_route(route) == Request(25, encoded(rtmsg(), attrs=attributes, **fields))
    assert inet.decode_routes(body) == [route]


def test_bits_of_the_host_are_sent_for_the_kernel_to_refuse() -> None:
    attributes = [("RTA_OIF", 9), ("RTA_DST", "10.9.1.1")]
    body = encoded(rtmsg(), family=V4, dst_len=16, table=254, attrs=attributes)
    assert inet.delete_route(Route(interface("10.9.1.1/16"), 9)).body == body


def test_routes_are_asked_for() -> None:
    for table, field in ((254, 254), (1000, 0)):
        body = encoded(rtmsg(), family=V4, table=field, attrs=[("RTA_TABLE", table)])
        assert inet.list_routes(V4, table) == Request(26, body)


def test_next_hops() -> None:
    hops = [
        {"oif": 4, "attrs": [("RTA_GATEWAY", "10.1.2.1")]},
        {"oif": 5, "attrs": []},
        {"oif": 6, "attrs": [("RTA_GATEWAY", "10.1.2.3")]},
    ]
    attributes = [("RTA_DST", "10.9.0.0"), ("RTA_MULTIPATH", hops)]
    body = encoded(rtmsg(), family=V4, dst_len=16, table=254, attrs=attributes)
    found = inet.decode_routes(body)
    assert [(route.oif, route.gateway) for route in found] == [(4, GATEWAY), (5, None), (6, SOURCE)]
    assert {str(route.dst) for route in found} == {"10.9.0.0/16"}


def test_a_route_to_nowhere() -> None:
    body = encoded(rtmsg(), family=V4, dst_len=0, table=254, type=7)
    assert inet.decode_routes(body) == [Route(interface("0.0.0.0/0"), 0)]
