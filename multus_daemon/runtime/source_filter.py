"""A filter that has the kernel drop the packets of some clients of a socket (classic BPF, socket(7)).

For a listening socket, these clients try to connect again later. It costs the program nothing.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterable
from typing import Final

_ATTACH: Final = 26
"""SO_ATTACH_FILTER, which replaces the filter."""
_INSTRUCTION: Final = struct.Struct("=HBBI")
_NETWORK_HEADER: Final = 0x1_0000_0000 - 0x10_0000
"""SKF_NET_OFF: offsets from the packet's network header."""
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
_PASS, _DROP = (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)
_SOURCE: Final = {4: (12,), 6: (8, 12)}
"""Offsets of the source address by version of IP: all of IPv4, the first 64 bits of IPv6."""


def key(address: str) -> bytes:
    """Return what identifies a client: its IPv4 address, or 64 bits of IPv6, which one client can have. Raises OSError.

    `address`: as `socket.getpeername` returns it.
    """
    if "." in address:
        return socket.inet_pton(socket.AF_INET, address.rpartition(":")[2])
    return socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8]


def drop(listener: socket.socket, sources: Iterable[bytes]) -> None:
    """Have the kernel drop the packets of these clients, and no others, from now on. Raises OSError."""
    program = [instruction for source in sources for instruction in _matching(source)]
    _attach(listener, [*program, _PASS])


def drop_all(listener: socket.socket) -> None:
    """Have the kernel drop all packets. Raises OSError."""
    _attach(listener, [_DROP])


def _matching(source: bytes) -> Iterable[tuple[int, int, int, int]]:
    """Yield the instructions that drop packets of a source, and go on behind them for others."""
    words = struct.unpack(f"!{len(source) // 4}I", source)
    version = 4 if len(words) == 1 else 6
    yield _LOAD_BYTE, 0, 0, _NETWORK_HEADER
    yield _SHIFT_RIGHT, 0, 0, 4
    left = 2 * len(words) + 1
    yield _IF_EQUAL, 0, left, version
    for word, offset in zip(words, _SOURCE[version], strict=True):
        left -= 2
        yield _LOAD_WORD, 0, 0, _NETWORK_HEADER + offset
        yield _IF_EQUAL, 0, left, word
    yield _DROP


def _attach(listener: socket.socket, program: list[tuple[int, int, int, int]]) -> None:
    code = ctypes.create_string_buffer(b"".join(_INSTRUCTION.pack(*instruction) for instruction in program))
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH, struct.pack("HP", len(program), ctypes.addressof(code)))
