"""VLANs of a bridge's ports as rtnetlink messages, by pyroute2's classes. Pure.

Imported only if a network asks for VLANs: pyroute2 takes 0.2 s and 13 MB. These requests are rare, and kernels of test
machines refuse them, so a library that others use with VLANs is worth more here than speed.
Format: linux/if_bridge.h; `bridge vlan` of iproute2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from pyroute2.netlink.rtnl import RTM_DELLINK, RTM_GETLINK, RTM_NEWLINK, RTM_SETLINK
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from multus_daemon.kernel.transport import HEADER, Request

_AF_BRIDGE: Final = 7
_EXT_MASK_VLANS: Final = 1 << 1
# Without it, the request would be about VLANs of the port's own hardware.
_FLAGS_MASTER: Final = 1
_PVID: Final = 1 << 1
_UNTAGGED: Final = 1 << 2
_RANGE_BEGIN: Final = 1 << 3
_RANGE_END: Final = 1 << 4


def add(index: int, first: int, last: int, *, native: bool) -> Request:
    """Let a port carry the VLANs `first` to `last`; `native`: for frames without a tag, which also leave untagged."""
    flags = _PVID | _UNTAGGED if native else 0
    if first == last:
        return _change(RTM_SETLINK, index, [(first, flags)])
    return _change(RTM_SETLINK, index, [(first, flags | _RANGE_BEGIN), (last, flags | _RANGE_END)])


def delete(index: int, vlan: int) -> Request:
    """Let a port no longer carry a VLAN."""
    return _change(RTM_DELLINK, index, [(vlan, 0)])


def list_all() -> Request:
    """Dump the ports of all bridges with their VLANs."""
    return _request(RTM_GETLINK, 0, [("IFLA_EXT_MASK", _EXT_MASK_VLANS)])


def decode(body: bytes) -> tuple[int, list[int]]:
    """Decode the body of a port: its index and the VLANs that it carries."""
    # pyroute2 takes the length from the header.
    message = ifinfmsg(HEADER.pack(HEADER.size + len(body), RTM_NEWLINK, 0, 0, 0) + body)
    message.decode()
    spec = message.get_attr("IFLA_AF_SPEC")
    return message["index"], [vlan["vid"] for vlan in spec.get_attrs("IFLA_BRIDGE_VLAN_INFO")] if spec else []


def _change(kind: int, index: int, ends: Iterable[tuple[int, int]]) -> Request:
    items: list[tuple[str, Any]] = [("IFLA_BRIDGE_FLAGS", _FLAGS_MASTER)]
    items += [("IFLA_BRIDGE_VLAN_INFO", {"vid": vlan, "flags": flags}) for vlan, flags in ends]
    return _request(kind, index, [("IFLA_AF_SPEC", {"attrs": items})])


def _request(kind: int, index: int, attributes: list[tuple[str, Any]]) -> Request:
    message = ifinfmsg()
    message["family"], message["index"], message["attrs"] = _AF_BRIDGE, index, attributes
    message.encode()
    return Request(kind, bytes(message.data[HEADER.size :]))
