"""The messages about ports of a bridge, byte for byte: few kernels of test machines know VLANs of bridges.

Expected: ifinfomsg (family AF_BRIDGE, index 9), then the attributes of linux/if_link.h and linux/if_bridge.h.
"""

from __future__ import annotations

import struct
from typing import Any

import pytest
from pyroute2.netlink.rtnl import RTM_DELLINK, RTM_GETLINK, RTM_SETLINK

from multus_daemon.netlink import rtnl
from multus_daemon.netlink.rtnl import Rtnl

HEADER = struct.pack("=BxHiII", 7, 0, 9, 0, 0)
AF_SPEC, PROTINFO = 26, 12
MASTER, PVID, UNTAGGED, BEGIN, END = 1, 2, 4, 8, 16


def attribute(kind: int, payload: bytes) -> bytes:
    length = 4 + len(payload)
    return struct.pack("=HH", length, kind) + payload + bytes(-length % 4)


def vlans(*items: tuple[int, int]) -> bytes:
    inner = attribute(0, struct.pack("=H", MASTER)) + b"".join(
        attribute(2, struct.pack("=HH", *item)) for item in items
    )
    return attribute(AF_SPEC, inner)


class RecordingSocket:
    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.answers: list[Any] = []

    def request(self, kind: int, message: Any, flags: int = 0, *, answer: Any = None) -> list[Any]:
        message.reset()
        message.encode()
        self.sent.append((kind, bytes(message.data[16:])))
        return []

    def dump(self, kind: int, message: Any, *, answer: Any) -> list[Any]:
        self.request(kind, message)
        found = [answer(data) for data in self.answers]
        for item in found:
            item.decode()
        return found


@pytest.fixture
def socket(monkeypatch: pytest.MonkeyPatch) -> RecordingSocket:
    made = RecordingSocket()
    monkeypatch.setattr(rtnl, "Socket", lambda: made)
    return made


def test_vlans_are_added(socket: RecordingSocket) -> None:
    kernel = Rtnl()
    kernel.add_vlans(9, 5, 5, native=True)
    kernel.add_vlans(9, 7, 7)
    kernel.add_vlans(9, 10, 20)
    kernel.delete_vlan(9, 1)
    assert socket.sent == [
        (RTM_SETLINK, HEADER + vlans((PVID | UNTAGGED, 5))),
        (RTM_SETLINK, HEADER + vlans((0, 7))),
        (RTM_SETLINK, HEADER + vlans((BEGIN, 10), (END, 20))),
        (RTM_DELLINK, HEADER + vlans((0, 1))),
    ]


def test_vlans_are_listed(socket: RecordingSocket) -> None:
    def link(index: int, attributes: bytes) -> bytes:
        body = struct.pack("=BxHiII", 7, 0, index, 0, 0) + attributes
        return struct.pack("=IHHII", 16 + len(body), 16, 0, 1, 0) + body

    inner = attribute(2, struct.pack("=HH", PVID | UNTAGGED, 1)) + attribute(2, struct.pack("=HH", 0, 30))
    socket.answers = [
        link(8, attribute(AF_SPEC, attribute(2, struct.pack("=HH", 0, 77)))),
        link(9, attribute(AF_SPEC, inner)),
        link(10, b""),
    ]
    assert (Rtnl().vlans(9), Rtnl().vlans(10)) == ([1, 30], [])
    ((kind, sent), _) = socket.sent
    assert (kind, sent) == (RTM_GETLINK, struct.pack("=BxHiII", 7, 0, 0, 0, 0) + attribute(29, struct.pack("=I", 2)))


def test_port_settings(socket: RecordingSocket) -> None:
    Rtnl().set_port(9, hairpin=True, isolated=False)
    inner = attribute(4, b"\1") + attribute(33, b"\0")
    assert socket.sent == [(RTM_SETLINK, HEADER + attribute(PROTINFO | 0x8000, inner))]


def test_a_bridge_with_vlans(socket: RecordingSocket) -> None:
    Rtnl().add_bridge("br0", mtu=1400, vlan_filtering=True)
    ((_, sent),) = socket.sent
    info = attribute(1, b"bridge\0") + attribute(2, attribute(7, b"\1"))
    expected = attribute(3, b"br0\0") + attribute(4, struct.pack("=I", 1400)) + attribute(18, info)
    assert sent == struct.pack("=BxHiII", 0, 0, 0, 0, 0) + expected
