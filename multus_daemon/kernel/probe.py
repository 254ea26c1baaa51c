"""Ask the neighbours of a pod's interface who has an address: ARP (RFC 5227) and neighbour discovery (RFC 4861)."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import struct
import time
from typing import Final

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.spec.addresses import Address

log = logging.getLogger(__name__)

_ARP: Final = 0x0806
_IPV6: Final = 0x86DD
_ICMPV6: Final = 58
_SOLICITATION: Final = 135
_ADVERTISEMENT: Final = 136
_EVERY_SECONDS: Final = 0.1
"""Interval of the questions: the first one may be lost while the link comes up."""


def neighbour(netns: PodNetns, ifname: str, address: Address, seconds: float) -> str:
    """Return the MAC address that answers for `address`; empty if none does, or if the interface cannot ask.

    Brings the interface up, without an address.
    """
    try:
        link = netns.pod.find_link(ifname)
        if link is None or not link.mac:
            return ""
        netns.pod.change(link.index, up=True)
        with netns.inside():
            # Protocol 0: nothing arrives before the interface is set.
            opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
        with opened:
            opened.bind((ifname, _ARP if address.version == 4 else _IPV6))
            return _answer(opened, bytes.fromhex(link.mac.replace(":", "")), address, time.monotonic() + seconds)
    except OSError as error:
        log.info("%s is not asked for on %s: %s", address, ifname, error)
        return ""


def _answer(opened: socket.socket, own: bytes, address: Address, end: float) -> str:
    while (left := end - time.monotonic()) > 0:
        opened.send(_question(own, address))
        again = time.monotonic() + min(left, _EVERY_SECONDS)
        while (left := again - time.monotonic()) > 0:
            opened.settimeout(left)
            with contextlib.suppress(TimeoutError):
                frame = opened.recv(2048)
                if (sender := _sender(frame, address)) and sender != own:
                    return sender.hex(":")
    return ""


def _question(own: bytes, address: Address) -> bytes:
    """Return a frame that asks for the address, from nobody: no neighbour learns from it."""
    wanted = address.packed
    if address.version == 4:
        request = struct.pack("!HHBBH6s4s6s4s", 1, 0x0800, 6, 4, 1, own, bytes(4), bytes(6), wanted)
        return b"\xff" * 6 + own + struct.pack("!H", _ARP) + request
    group = ipaddress.IPv6Address("ff02::1:ff00:0").packed[:13] + wanted[13:]
    body = struct.pack("!BBHI16s", _SOLICITATION, 0, 0, 0, wanted)
    ends = bytes(16) + group
    words = struct.unpack("!32H", ends + struct.pack("!II", len(body), _ICMPV6) + body)
    body = body[:2] + struct.pack("!H", 0xFFFF - sum(words) % 0xFFFF) + body[4:]
    header = struct.pack("!IHBB", 6 << 28, len(body), _ICMPV6, 255)
    return b"\x33\x33" + group[12:] + own + struct.pack("!H", _IPV6) + header + ends + body


def _sender(frame: bytes, address: Address) -> bytes:
    """Return the sender of a frame that says that the address is its own; empty for any other frame."""
    if address.version == 4:
        # The sender of a request has the address, too.
        return frame[22:28] if len(frame) >= 42 and frame[28:32] == address.packed else b""
    is_answer = len(frame) >= 78 and frame[20] == _ICMPV6 and frame[54] == _ADVERTISEMENT
    return frame[6:12] if is_answer and frame[62:78] == address.packed else b""
