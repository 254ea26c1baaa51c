"""The rare messages, byte for byte: few kernels of test machines know VLANs of bridges, or all kinds of links.

Expected: ifinfomsg (family AF_BRIDGE, index 9), then the attributes of linux/if_link.h and linux/if_bridge.h.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct

import pytest

from multus_daemon.kernel import rare
from multus_daemon.kernel.links import RTM_DELLINK, RTM_GETLINK, RTM_NEWLINK, RTM_SETLINK, Rtnl
from multus_daemon.kernel.transport import NLM_F_CREATE, NLM_F_EXCL, Request, Socket

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


def test_vlans_are_added() -> None:
    assert rare.add_vlans(9, 5, 5, native=True) == Request(RTM_SETLINK, HEADER + vlans((PVID | UNTAGGED, 5)))
    assert rare.add_vlans(9, 7, 7, native=False) == Request(RTM_SETLINK, HEADER + vlans((0, 7)))
    assert rare.add_vlans(9, 10, 20, native=False) == Request(RTM_SETLINK, HEADER + vlans((BEGIN, 10), (END, 20)))
    assert rare.delete_vlan(9, 1) == Request(RTM_DELLINK, HEADER + vlans((0, 1)))


def test_vlans_are_listed() -> None:
    def port(index: int, attributes: bytes) -> bytes:
        return struct.pack("=BxHiII", 7, 0, index, 0, 0) + attributes

    inner = attribute(2, struct.pack("=HH", PVID | UNTAGGED, 1)) + attribute(2, struct.pack("=HH", 0, 30))
    assert rare.decode_vlans(port(9, attribute(AF_SPEC, inner))) == (9, [1, 30])
    assert rare.decode_vlans(port(10, b"")) == (10, [])
    expected = struct.pack("=BxHiII", 7, 0, 0, 0, 0) + attribute(29, struct.pack("=I", 2))
    assert rare.list_vlans() == Request(RTM_GETLINK, expected)


def test_vlans_of_one_port_are_told_from_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def port(index: int, vlan: int) -> bytes:
        spec = attribute(AF_SPEC, attribute(2, struct.pack("=HH", 0, vlan)))
        return struct.pack("=BxHiII", 7, 0, index, 0, 0) + spec

    monkeypatch.setattr(Socket, "dump", lambda _socket, _request: [port(8, 77), port(9, 1), port(9, 30)])
    with contextlib.closing(Rtnl()) as kernel:
        assert (kernel.vlans(9), kernel.vlans(10)) == ([1, 30], [])


def test_port_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = attribute(4, b"\1") + attribute(33, b"\0")
    made: list[Request] = []
    monkeypatch.setattr(Socket, "request", lambda _socket, request: made.append(request))
    with contextlib.closing(Rtnl()) as kernel:
        kernel.set_port(9, hairpin=True, isolated=False)
    assert made == [Request(RTM_SETLINK, HEADER + attribute(PROTINFO | 0x8000, inner))]


@pytest.mark.parametrize("kind", ["vlan", "ipvlan", "vrf"])
@pytest.mark.parametrize(("error", "known"), [(errno.EOPNOTSUPP, False), (errno.EADDRNOTAVAIL, True)])
def test_a_kind_of_link_that_the_kernel_lacks(
    monkeypatch: pytest.MonkeyPatch, kind: str, error: int, known: bool
) -> None:
    asked: list[Request] = []

    def refuse(_socket: Socket, request: Request) -> None:
        asked.append(request)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Socket, "request", refuse)
    with contextlib.closing(Rtnl()) as kernel:
        assert rare.can_make(kernel, kind) is known
    name, address = attribute(3, b"multus-probe\0"), attribute(1, bytes(6))
    info = attribute(18, attribute(1, kind.encode() + b"\0"))
    assert asked == [Request(RTM_NEWLINK, bytes(16) + name + address + info, NLM_F_CREATE | NLM_F_EXCL)]
