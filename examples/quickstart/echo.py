"""ICMP echo in Python, from inside a network namespace, over one interface: no `ping` program is needed."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time

from multus_daemon.kernel import netns as namespaces

_ANSWER_SECONDS = 0.5


def ping(netns: str, interface: str, address: str, *, seconds: float) -> float | None:
    """Milliseconds until the first answer of `address`, asked again until `seconds` are over; None without one.

    Raises OSError if the namespace can't be entered.
    """
    outcome: list[float | None] = []
    failures: list[OSError] = []

    def body() -> None:
        try:
            with namespaces.opened(netns) as descriptor:
                namespaces.enter(descriptor)
            outcome.append(_until_answered(interface, address, time.monotonic() + seconds))
        except OSError as error:
            failures.append(error)

    # The thread ends inside the namespace; all others stay outside.
    thread = threading.Thread(target=body, name="ping")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return outcome[0]


def _until_answered(interface: str, address: str, deadline: float) -> float | None:
    sequence = 0
    while time.monotonic() < deadline:
        sequence += 1
        try:
            answered = _once(interface, address, sequence)
        except OSError:
            # No route, or no address to send from: an IPv6 address is first tried for a second or two.
            answered = None
        if answered is not None:
            return answered
        time.sleep(0.05)
    return None


def _once(interface: str, address: str, sequence: int) -> float | None:
    version6 = ":" in address
    family, protocol = (socket.AF_INET6, socket.IPPROTO_ICMPV6) if version6 else (socket.AF_INET, socket.IPPROTO_ICMP)
    request, reply = (128, 129) if version6 else (8, 0)
    # An echo: type, code, checksum, identifier, sequence number. The kernel sums up ICMPv6 by itself.
    rest = struct.pack("!HH", os.getpid() & 0xFFFF, sequence) + b"multus quickstart"
    packet = struct.pack("!BBH", request, 0, 0 if version6 else _checksum(bytes([request, 0, 0, 0]) + rest)) + rest
    with socket.socket(family, socket.SOCK_RAW, protocol) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        start = time.perf_counter()
        sock.sendto(packet, (address, 0))
        while (left := start + _ANSWER_SECONDS - time.perf_counter()) > 0:
            if not select.select([sock], [], [], left)[0]:
                break
            data = sock.recv(2048)
            # A raw IPv4 socket hands out the IP header too.
            message = data if version6 else data[(data[0] & 0x0F) * 4 :]
            if message[:1] == bytes([reply]) and message[4:] == rest:
                return (time.perf_counter() - start) * 1000
    return None


def _checksum(data: bytes) -> int:
    """RFC 1071."""
    padded = data + b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
