"""Attributes that only one kind of link has, of kinds that one request makes; and tap links, which netlink cannot make.

Format: linux/if_link.h, IFLA_INFO_DATA; linux/if_tun.h.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from multus_daemon.kernel.transport import attribute, attributes

MODES: Final[Mapping[str, Mapping[str, int]]] = MappingProxyType(
    {
        "macvlan": MappingProxyType({"private": 1, "vepa": 2, "bridge": 4, "passthru": 8}),
        "ipvlan": MappingProxyType({"l2": 0, "l3": 1, "l3s": 2}),
    }
)
"""Names as in ip-link(8), without `source` of macvlan, which the reference plugin does not have."""
TAP_KIND: Final = "tun"
"""The kernel's name of the kind."""

# The first attribute of each of these kinds: mode, VLAN, table.
_FIRST: Final = 1
_SIZES: Final = {
    kind: struct.Struct(size) for kind, size in (("macvlan", "=I"), ("ipvlan", "=H"), ("vlan", "=H"), ("vrf", "=I"))
}
_IFLA_MACVLAN_BC_QUEUE_LEN: Final = 7

_TUNSETIFF: Final = 0x400454CA
_TUNSETPERSIST: Final = 0x400454CB
_TUNSETOWNER: Final = 0x400454CC
_TUNSETGROUP: Final = 0x400454CE
_IFF_TAP: Final = 0x2
_IFF_MULTI_QUEUE: Final = 0x100
_IFF_NO_PI: Final = 0x1000
_IFF_VNET_HDR: Final = 0x4000
# Not an existing link of that name.
_IFF_TUN_EXCL: Final = 0x8000
# Name and flags at the begin of struct ifreq.
_REQUEST: Final = struct.Struct("=16sH22x")


def encode(kind: str, mode: str = "", number: int = 0, broadcast_queue: int = 0) -> bytes:
    """Return the attributes of a kind: a mode of MODES, or the number of a VLAN or of a VRF's table.

    `broadcast_queue`: of a macvlan, in packets; 0: the default.
    """
    value = MODES[kind][mode] if kind in MODES else number
    queue = attribute(_IFLA_MACVLAN_BC_QUEUE_LEN, broadcast_queue) if broadcast_queue else b""
    return attribute(_FIRST, _SIZES[kind].pack(value)) + queue


def decode(kind: str, data: bytes) -> tuple[str, int]:
    """Return mode and number of a link; empty and 0 if its kind has none."""
    value = attributes(data).get(_FIRST) if kind in _SIZES else None
    number = int(_SIZES[kind].unpack(value)[0]) if value else 0
    if kind not in MODES:
        return "", number
    return next((name for name, known in MODES[kind].items() if known == number), ""), 0


def add_tap(device: Path, name: str, *, multi_queue: bool, owner: int | None, group: int | None) -> None:
    """Add a tap link in the thread's namespace, down, that stays without a process; `device`: `/dev/net/tun`.

    `owner`, `group`: ids of those who may open it besides root; None: anybody who may use the device. Raises OSError,
    EBUSY if the name is taken.
    """
    flags = _IFF_TAP | _IFF_TUN_EXCL | (_IFF_MULTI_QUEUE if multi_queue else 0)
    # As the reference: one with both ids has other defaults. Whoever opens it sets these again.
    has_both = owner is not None and group is not None
    flags |= (_IFF_VNET_HDR if has_both else 0) | (0 if has_both and not multi_queue else _IFF_NO_PI)
    descriptor = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, _REQUEST.pack(name.encode(), flags))
        for request, value in ((_TUNSETOWNER, owner), (_TUNSETGROUP, group), (_TUNSETPERSIST, 1)):
            if value is not None:
                # Python takes a signed number.
                fcntl.ioctl(descriptor, request, value - (value >> 31 << 32))
    finally:
        os.close(descriptor)
