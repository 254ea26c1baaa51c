"""The request for a new macvlan, encoded here: pyroute2's classes do not know `bcqueuelen`. Pure.

Format: rtnetlink(7); linux/if_link.h, IFLA_MACVLAN_*.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

MODES: Final[Mapping[str, int]] = MappingProxyType({"private": 1, "vepa": 2, "bridge": 4, "passthru": 8})
"""By the names that ip-link(8) has; `source` is none of the reference plugin's."""

# Family, type of device, index, flags, mask of flags.
_LINK: Final = struct.Struct("=BxHiII")
_ATTRIBUTE: Final = struct.Struct("=HH")
_UNSIGNED: Final = struct.Struct("=I")

_IFLA_ADDRESS: Final = 1
_IFLA_IFNAME: Final = 3
_IFLA_MTU: Final = 4
_IFLA_LINK: Final = 5
_IFLA_LINKINFO: Final = 18
_IFLA_NET_NS_FD: Final = 28
_IFLA_INFO_KIND: Final = 1
_IFLA_INFO_DATA: Final = 2
_IFLA_MACVLAN_MODE: Final = 1
_IFLA_MACVLAN_BC_QUEUE_LEN: Final = 7


def description(
    name: str, master: int, netns: int, *, mode: str, mtu: int = 0, mac: str = "", broadcast_queue: int = 0
) -> bytes:
    """What comes behind the header of an RTM_NEWLINK; see `Rtnl.add_macvlan`."""
    data = _number(_IFLA_MACVLAN_MODE, MODES[mode])
    if broadcast_queue:
        data += _number(_IFLA_MACVLAN_BC_QUEUE_LEN, broadcast_queue)
    info = _attribute(_IFLA_INFO_KIND, b"macvlan\0") + _attribute(_IFLA_INFO_DATA, data)
    return b"".join(
        (
            _LINK.pack(0, 0, 0, 0, 0),
            _attribute(_IFLA_IFNAME, name.encode() + b"\0"),
            _number(_IFLA_LINK, master),
            _number(_IFLA_NET_NS_FD, netns),
            _number(_IFLA_MTU, mtu) if mtu else b"",
            _attribute(_IFLA_ADDRESS, bytes.fromhex(mac.replace(":", ""))) if mac else b"",
            _attribute(_IFLA_LINKINFO, info),
        )
    )


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, _UNSIGNED.pack(value))


def _attribute(kind: int, value: bytes) -> bytes:
    length = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + bytes(-length % 4)
