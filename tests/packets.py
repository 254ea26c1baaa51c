"""Echo requests (ICMP and ICMPv6) from a network namespace, and the replies: `ping` is not on every machine.

As a program, `python -m tests.packets ADDRESS SECONDS BYTES`, it sends until it is ended.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys
import threading
import time
from typing import Any, Final

from tests.namespaces import entered
from tests.waiting import PATIENCE

_REQUEST: Final = {socket.AF_INET: 8, socket.AF_INET6: 128}
_REPLY: Final = {socket.AF_INET: 0, socket.AF_INET6: 129}
_PROTOCOL: Final = {socket.AF_INET: socket.IPPROTO_ICMP, socket.AF_INET6: socket.IPPROTO_ICMPV6}
_TENTATIVE_SECONDS: Final = 5.0


def replies(
    address: str,
    *,
    netns: str = "",
    count: int = 1,
    wait: float = PATIENCE / 15,
    interval: float = 0.01,
    size: int = 56,
    source: str = "",
    device: str = "",
) -> int:
    """Send `count` echo requests from a namespace, `interval` seconds apart, and return how many were answered.

    The last answer is waited for `wait` seconds. An empty `netns` is the thread's own. Raises OSError.
    """
    # NB: a device, not an address, decides the way out; as `ping -I` does, if it is given a name.
    with entered(netns), _socket(address, source, device) as sender:
        target = socket.getaddrinfo(address, None, sender.family)[0][4]
        identifier = threading.get_native_id() & 0xFFFF
        answered: set[int] = set()
        for number in range(count):
            _send(sender, _request(sender.family, identifier, number, size), target)
            last = number == count - 1
            end = time.monotonic() + (wait if last else interval)
            while len(answered) < count and (left := end - time.monotonic()) > 0:
                if select.select([sender], [], [], left)[0]:
                    answered |= _reply(sender, identifier)
        return len(answered)


def _send(sender: socket.socket, data: bytes, target: Any) -> None:
    """Send, once the kernel has looked for duplicates of our IPv6 address."""
    end = time.monotonic() + _TENTATIVE_SECONDS
    while True:
        try:
            sender.sendto(data, target)
            return
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or time.monotonic() > end:
                raise
            time.sleep(0.05)


def _socket(address: str, source: str, device: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_RAW, _PROTOCOL[family])
    if device:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
    if source:
        made.bind((source, 0))
    return made


def _request(family: int, identifier: int, number: int, size: int) -> bytes:
    head = struct.pack("!BBHHH", _REQUEST[socket.AddressFamily(family)], 0, 0, identifier, number & 0xFFFF)
    message = head + os.urandom(size)
    if family == socket.AF_INET6:
        return message  # The kernel writes its checksum.
    total = sum(struct.unpack(f"!{len(message) // 2}H", message[: len(message) // 2 * 2]))
    total += message[-1] << 8 if len(message) % 2 else 0
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    return message[:2] + struct.pack("!H", total ^ 0xFFFF) + message[4:]


def _reply(receiver: socket.socket, identifier: int) -> set[int]:
    """Read one packet; the number of the request that it answers, if it is a reply to one of ours."""
    packet = receiver.recv(65536)
    if receiver.family == socket.AF_INET:
        packet = packet[(packet[0] & 0xF) * 4 :]
    kind, _, _, found, number = struct.unpack_from("!BBHHH", packet)
    return {number} if (kind, found) == (_REPLY[receiver.family], identifier) else set()


def main(address: str, interval: str, size: str) -> None:
    """Send requests for ever."""
    while True:
        replies(address, wait=float(interval), size=int(size))
        time.sleep(float(interval))


if __name__ == "__main__":
    main(*sys.argv[1:])
