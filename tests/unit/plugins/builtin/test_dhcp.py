"""The result of a lease."""

from __future__ import annotations

from typing import Any

import pytest

from multus_daemon.kernel.dhcp import Lease
from multus_daemon.plugins.builtin import dhcp
from multus_daemon.spec.cni.errors import InternalError

ACK = {"subnet_mask": "255.255.0.0", "lease_time": 60, "server_id": "10.1.0.1"}


def lease(**options: Any) -> Lease:
    fields = {"interface": "eth0", "server_mac": "02:00:00:00:00:01"}
    return Lease.read({"ack": {"yiaddr": "10.1.2.3", "options": {**ACK, **options}}, **fields})


def routes(**options: Any) -> list[tuple[str, str]]:
    return [(route.dst, route.gw) for route in dhcp._result(lease(**options), 0).routes]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([0, 10, 1, 0, 1], [("0.0.0.0/0", "10.1.0.1")]),
        ([32, 192, 0, 2, 7, 10, 1, 0, 1], [("192.0.2.7/32", "10.1.0.1")]),
        (
            [8, 10, 10, 1, 0, 1, 17, 10, 9, 128, 10, 1, 0, 2],
            [("10.0.0.0/8", "10.1.0.1"), ("10.9.128.0/17", "10.1.0.2")],
        ),
        # Bits behind the length.
        ([9, 10, 255, 10, 1, 0, 1], [("10.128.0.0/9", "10.1.0.1")]),
    ],
)
def test_classless_routes_replace_the_others(value: list[int], expected: list[tuple[str, str]]) -> None:
    """RFC 3442."""
    others = {"router": ["10.1.0.9"], "static_route": [10, 8, 0, 0, 10, 1, 0, 9]}
    assert routes(classless_static_route=value, **others) == expected


@pytest.mark.parametrize("value", [[24, 10, 9], [33, 10, 9, 8, 7, 6, 10, 1, 0, 1], [255], [0, 10, 1, 0]])
def test_classless_routes_that_cannot_be_read(value: list[int]) -> None:
    with pytest.raises(InternalError, match="routes"):
        routes(classless_static_route=value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([10, 8, 7, 6, 10, 1, 0, 9], [("10.0.0.0/8", "10.1.0.9")]),
        (
            [172, 16, 0, 0, 10, 1, 0, 9, 192, 168, 7, 1, 10, 1, 0, 8],
            [("172.16.0.0/16", "10.1.0.9"), ("192.168.7.0/24", "10.1.0.8")],
        ),
        # Half a route.
        ([10, 0, 0, 0, 10, 1], []),
    ],
)
def test_classful_routes(value: list[int], expected: list[tuple[str, str]]) -> None:
    assert routes(static_route=value) == expected


@pytest.mark.parametrize(
    "wrong",
    [{"subnet_mask": "255.0.255.0"}, {"lease_time": 0}, {"server_id": ""}, {"lease_time": None}],
)
def test_an_answer_that_is_no_lease(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, LookupError, TypeError)):
        lease(**wrong)
