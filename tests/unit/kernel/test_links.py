"""Descriptions of links, byte for byte as pyroute2 writes them."""

from __future__ import annotations

import errno
import struct
from typing import Any

import pytest
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from multus_daemon.kernel import links
from multus_daemon.kernel.links import Link

MAC = "02:00:00:00:00:0a"


def encoded(**fields: Any) -> bytes:
    message = ifinfmsg()
    for name, value in fields.items():
        message[name] = value
    message.reset()
    message.encode()
    return bytes(message.data[16:])


def test_a_description() -> None:
    info = [("IFLA_INFO_KIND", "macvlan"), ("IFLA_INFO_DATA", {"attrs": [("IFLA_MACVLAN_MODE", "vepa")]})]
    body = encoded(
        index=9,
        flags=0x1 | 0x100 | 0x200,
        attrs=[
            ("IFLA_IFNAME", "eth0"),
            ("IFLA_ADDRESS", MAC),
            ("IFLA_MTU", 1400),
            ("IFLA_LINK", 4),
            ("IFLA_MASTER", 5),
            ("IFLA_TXQLEN", 1000),
            ("IFLA_OPERSTATE", "LOWERLAYERDOWN"),
            ("IFLA_LINKINFO", {"attrs": info}),
        ],
    )
    assert links.decode(body) == Link(
        index=9,
        name="eth0",
        mac=MAC,
        mtu=1400,
        is_up=True,
        operstate="LOWERLAYERDOWN",
        kind="macvlan",
        master=5,
        peer=4,
        is_promiscuous=True,
        is_allmulti=True,
        tx_queue_length=1000,
        mode="vepa",
    )


def test_a_description_without_anything() -> None:
    assert links.decode(encoded(index=1)) == Link(1, "", "", 0, False, "UNKNOWN", "")
    assert links.decode(encoded(index=1) + struct.pack("=HHBxxx", 5, 16, 99)).operstate == ""


@pytest.mark.parametrize("tail", [b"\3\0\3\0", b"\x10\0\3\0eth0", b"\xff\xff\3\0eth0"])
def test_an_attribute_that_is_cut_off(tail: bytes) -> None:
    with pytest.raises(OSError, match="cut off") as caught:
        links.decode(encoded(index=1) + tail)
    assert caught.value.errno == errno.EBADMSG
