"""Messages about links, byte for byte as pyroute2 writes and reads them."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from typing import Any

import pytest
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from multus_daemon.kernel import links
from multus_daemon.kernel.links import Link, Rtnl
from multus_daemon.kernel.transport import NLM_F_CREATE, NLM_F_ECHO, NLM_F_EXCL, Request

MAC = "02:00:00:00:00:0a"


def encoded(**fields: Any) -> bytes:
    message = ifinfmsg()
    for name, value in fields.items():
        message[name] = value
    message.reset()
    message.encode()
    return bytes(message.data[16:])


def veth(mtu: list[Any], others: list[Any]) -> bytes:
    peer = {"attrs": [("IFLA_IFNAME", "eth0"), ("IFLA_NET_NS_FD", 7), *mtu, *others]}
    info = [("IFLA_INFO_KIND", "veth"), ("IFLA_INFO_DATA", {"attrs": [("VETH_INFO_PEER", peer)]})]
    attrs = [("IFLA_IFNAME", "veth1"), *mtu, *others, ("IFLA_LINKINFO", {"attrs": info})]
    return encoded(flags=1, change=1, attrs=attrs)


def bridge(name: str, own: list[Any], data: list[Any]) -> bytes:
    info = [("IFLA_INFO_KIND", "bridge"), *data]
    return encoded(attrs=[("IFLA_IFNAME", name), *own, ("IFLA_LINKINFO", {"attrs": info})])


SKIP_STATS = ("IFLA_EXT_MASK", 8)
NEW = NLM_F_CREATE | NLM_F_EXCL


class Recorded(Rtnl):
    """Keeps the requests instead of sending them."""

    def __init__(self) -> None:
        self.made: list[Request] = []

    def request(self, request: Request) -> list[bytes]:
        self.made.append(request)
        return []

    def look_up(self, request: Request) -> bytes:
        self.made.append(request)
        return encoded(index=9)


NEW_BRIDGE = bridge(
    "br0", [("IFLA_MTU", 1400), ("IFLA_ADDRESS", MAC)], [("IFLA_INFO_DATA", {"attrs": [("IFLA_BR_VLAN_FILTERING", 1)]})]
)
NEW_VETH = veth([("IFLA_MTU", 1400)], [("IFLA_ADDRESS", MAC)])


@pytest.mark.parametrize(
    ("call", "kind", "flags", "expected"),
    [
        (lambda kernel: kernel.link("eth0"), 18, 0, encoded(attrs=[("IFLA_IFNAME", "eth0"), SKIP_STATS])),
        (lambda kernel: kernel.link_at(9), 18, 0, encoded(index=9, attrs=[SKIP_STATS])),
        (lambda kernel: kernel.add_veth("veth1", "eth0", 7), 16, NEW | NLM_F_ECHO, veth([], [])),
        (
            lambda kernel: kernel.add_veth("veth1", "eth0", 7, mtu=1400, mac=MAC, peer_mac=MAC),
            16,
            NEW | NLM_F_ECHO,
            NEW_VETH,
        ),
        (lambda kernel: kernel.add_bridge("br"), 16, NEW, bridge("br", [], [])),
        (lambda kernel: kernel.add_bridge("br0", mtu=1400, mac=MAC, vlan_filtering=True), 16, NEW, NEW_BRIDGE),
        (lambda kernel: kernel.set_up(9), 16, 0, encoded(index=9, flags=1, change=1)),
        (lambda kernel: kernel.set_promiscuous(9, False), 16, 0, encoded(index=9, flags=0, change=0x100)),
        (lambda kernel: kernel.rename(9, "eth1"), 19, 0, encoded(index=9, attrs=[("IFLA_IFNAME", "eth1")])),
        (lambda kernel: kernel.set_mac(9, MAC), 19, 0, encoded(index=9, attrs=[("IFLA_ADDRESS", MAC)])),
        (lambda kernel: kernel.set_mtu(9, 1400), 19, 0, encoded(index=9, attrs=[("IFLA_MTU", 1400)])),
        (lambda kernel: kernel.set_tx_queue_length(9, 7), 19, 0, encoded(index=9, attrs=[("IFLA_TXQLEN", 7)])),
        (lambda kernel: kernel.set_master(9, 4), 19, 0, encoded(index=9, attrs=[("IFLA_MASTER", 4)])),
        (lambda kernel: kernel.delete_link(9), 17, 0, encoded(index=9)),
    ],
)
def test_requests(call: Callable[[Rtnl], object], kind: int, flags: int, expected: bytes) -> None:
    kernel = Recorded()
    call(kernel)
    assert kernel.made == [Request(kind, expected, flags)]


def decoded(body: bytes) -> Any:
    message = ifinfmsg(struct.pack("=IHHII", 16 + len(body), 16, 0, 1, 0) + body)
    message.decode()
    return message


# pyroute2's classes do not write `bcqueuelen`, so what they read has to do.
def test_all_of_a_macvlan_is_what_another_library_reads() -> None:
    kernel = Recorded()
    kernel.add_macvlan("veth0", 7, 9, mode="vepa", mtu=1400, mac=MAC, broadcast_queue=5)
    (request,) = kernel.made
    message = decoded(request.body)
    names = ("IFLA_IFNAME", "IFLA_LINK", "IFLA_NET_NS_FD", "IFLA_MTU", "IFLA_ADDRESS")
    assert [message.get_attr(name) for name in names] == ["veth0", 7, 9, 1400, MAC]
    assert message.get_nested("IFLA_LINKINFO", "IFLA_INFO_KIND") == "macvlan"
    assert message.get_nested("IFLA_LINKINFO", "IFLA_INFO_DATA", "IFLA_MACVLAN_MODE") == "vepa"
    assert struct.pack("=HHI", 8, 7, 5) in request.body
    assert (request.kind, request.flags) == (16, NEW)


def test_what_is_not_said_of_a_macvlan_is_not_sent() -> None:
    kernel = Recorded()
    kernel.add_macvlan("veth0", 7, 9, mode="bridge")
    message = decoded(kernel.made[0].body)
    assert [name for name, _ in message["attrs"]] == ["IFLA_IFNAME", "IFLA_LINK", "IFLA_NET_NS_FD", "IFLA_LINKINFO"]


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
