"""Filters of a socket by which the kernel drops packets (classic BPF, socket(7); linux/filter.h).

A client whose packets are dropped retries its connection later. The program spends nothing on dropped packets.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterable
from typing import Final

_ATTACH: Final = 26
"""SO_ATTACH_FILTER, which replaces an earlier filter of the socket."""
_INSTRUCTION: Final = struct.Struct("=HBBI")
_NETWORK_HEADER: Final = 0x1_0000_0000 - 0x10_0000
"""SKF_NET_OFF: offsets from the packet's network header."""
LOAD_BYTE, LOAD_HALF, _LOAD_WORD, _SHIFT_RIGHT, IF_EQUAL, _RETURN = 0x30, 0x28, 0x20, 0x74, 0x15, 0x06
PASS, DROP = (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)
_SOURCE: Final = {4: (12,), 6: (8, 12)}
"""Offsets of the source address by version of IP: all of IPv4, the first 64 bits of IPv6."""


def key(address: str) -> bytes:
    """Return what identifies a client: its IPv4 address, or the first 64 bits of its IPv6 address. Raises OSError.

    One client may have all IPv6 addresses with these bits. `address`: as `socket.getpeername` returns it.
    """
    if "." in address:
        return socket.inet_pton(socket.AF_INET, address.rpartition(":")[2])
    return socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8]


def drop(listener: socket.socket, sources: Iterable[bytes]) -> None:
    """Have the kernel drop the packets of these clients, and no others, from now on. Raises OSError."""
    program = [instruction for source in sources for instruction in _matching(source)]
    attach(listener, [*program, PASS])


def _matching(source: bytes) -> Iterable[tuple[int, int, int, int]]:
    """Yield instructions that drop packets of `source`; for other packets, the program continues after them."""
    words = struct.unpack(f"!{len(source) // 4}I", source)
    version = 4 if len(words) == 1 else 6
    yield LOAD_BYTE, 0, 0, _NETWORK_HEADER
    yield _SHIFT_RIGHT, 0, 0, 4
    left = 2 * len(words) + 1
    yield IF_EQUAL, 0, left, version
    for word, offset in zip(words, _SOURCE[version], strict=True):
        left -= 2
        yield _LOAD_WORD, 0, 0, _NETWORK_HEADER + offset
        yield IF_EQUAL, 0, left, word
    yield DROP


def attach(filtered: socket.socket, program: list[tuple[int, int, int, int]]) -> None:
    """Have the kernel run the program for each packet, in place of the socket's filter. Raises OSError.

    An instruction is its code, the number of instructions to skip if true and if false, and a value.
    """
    code = ctypes.create_string_buffer(b"".join(_INSTRUCTION.pack(*instruction) for instruction in program))
    filtered.setsockopt(socket.SOL_SOCKET, _ATTACH, struct.pack("HP", len(program), ctypes.addressof(code)))
