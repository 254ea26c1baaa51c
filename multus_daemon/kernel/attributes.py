"""Attributes of rtnetlink messages as bytes. Pure.

Written here, not by pyroute2's message classes: those take 0.1 ms for each message, which was half of an ADD.
Format: netlink(7), rtnetlink(7), linux/netlink.h: length and kind of 16 bits each, the value, zeros up to 4 bytes.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable, Iterator
from typing import Final

_HEADER: Final = struct.Struct("=HH")
_UNSIGNED: Final = struct.Struct("=I")
_SHORT: Final = struct.Struct("=H")
# Without NLA_F_NESTED and NLA_F_NET_BYTEORDER.
_KIND_MASK: Final = 0x3FFF
_PADDING: Final = (b"", b"\0\0\0", b"\0\0", b"\0")


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute."""
    return _HEADER.pack(_HEADER.size + len(value), kind) + value + _PADDING[len(value) & 3]


def number(kind: int, value: int) -> bytes:
    """One of 32 bits. Raises struct.error where it does not fit."""
    return attribute(kind, _UNSIGNED.pack(value))


def text(kind: int, value: str) -> bytes:
    """A string that ends with a NUL."""
    return attribute(kind, value.encode() + b"\0")


def mac(kind: int, value: str) -> bytes:
    """A link's address, `aa:bb:cc:dd:ee:ff`."""
    return attribute(kind, bytes.fromhex(value.replace(":", "")))


def nested(kind: int, inner: Iterable[bytes]) -> bytes:
    """An attribute that consists of attributes."""
    return attribute(kind, b"".join(inner))


def each(data: bytes, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Kind, flags included, and value of each attribute from `offset` on, in order. Raises OSError (EBADMSG)."""
    # A link has forty, and there are several links to each ADD: nothing is called for each attribute but this.
    header, unpack = _HEADER.size, _HEADER.unpack_from
    end = len(data)
    while offset + header <= end:
        length, kind = unpack(data, offset)
        if not header <= length <= end - offset:
            raise OSError(errno.EBADMSG, "netlink: an attribute of the kernel is cut off")
        yield kind, data[offset + header : offset + length]
        offset += (length + 3) & ~3


def by_kind(data: bytes, offset: int = 0) -> dict[int, bytes]:
    """The attributes from `offset` on, by their kinds without flags; of several the last. Raises OSError (EBADMSG)."""
    return {kind & _KIND_MASK: value for kind, value in each(data, offset)}


def plain(kind: int) -> int:
    """The kind without its flags."""
    return kind & _KIND_MASK


def to_number(value: bytes | None) -> int:
    """The value of an attribute of 32 bits; 0 where there is none."""
    found: int = _UNSIGNED.unpack_from(value)[0] if value else 0
    return found


def to_text(value: bytes | None) -> str:
    """The value of a string, without its NUL; empty where there is none."""
    return value.rstrip(b"\0").decode("utf-8", "replace") if value else ""


def aligned(length: int) -> int:
    """`length` in bytes, rounded up to where the next attribute begins."""
    return (length + 3) & ~3
