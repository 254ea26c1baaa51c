"""Rare rtnetlink requests, by pyroute2: VLANs of a bridge's ports, and whether the kernel has a kind of link.

Imported only by the thread that needs one, as pyroute2 takes 75 ms and 8.5 MiB: on nodes whose networks have VLANs on a
bridge, and where an ADD fails because a kernel module is missing. Kernels of test machines refuse these requests, so a
widely used library counts for more here than speed. Format: linux/if_bridge.h; `bridge vlan` of iproute2.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import Any, Final

from pyroute2.netlink.rtnl import RTM_DELLINK, RTM_GETLINK, RTM_NEWLINK, RTM_SETLINK
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from multus_daemon.kernel.transport import HEADER, NLM_F_CREATE, NLM_F_EXCL, Request, Socket

_AF_BRIDGE: Final = 7
_EXT_MASK_VLANS: Final = 1 << 1
# Without it, the request would be about VLANs of the port's own hardware.
_FLAGS_MASTER: Final = 1
_PVID: Final = 1 << 1
_UNTAGGED: Final = 1 << 2
_RANGE_BEGIN: Final = 1 << 3
_RANGE_END: Final = 1 << 4


def add_vlans(index: int, first: int, last: int, *, native: bool) -> Request:
    """Let a port carry the VLANs `first` to `last`; `native`: for frames without a tag, which also leave untagged."""
    flags = _PVID | _UNTAGGED if native else 0
    if first == last:
        return _change(RTM_SETLINK, index, [(first, flags)])
    return _change(RTM_SETLINK, index, [(first, flags | _RANGE_BEGIN), (last, flags | _RANGE_END)])


def delete_vlan(index: int, vlan: int) -> Request:
    """Let a port no longer carry a VLAN."""
    return _change(RTM_DELLINK, index, [(vlan, 0)])


def list_vlans() -> Request:
    """Dump the ports of all bridges with their VLANs."""
    return _request(RTM_GETLINK, 0, [("IFLA_EXT_MASK", _EXT_MASK_VLANS)])


def decode_vlans(body: bytes) -> tuple[int, list[int]]:
    """Decode the body of a port: its index and the VLANs that it carries."""
    # pyroute2 takes the length from the header.
    message = ifinfmsg(HEADER.pack(HEADER.size + len(body), RTM_NEWLINK, 0, 0, 0) + body)
    message.decode()
    spec = message.get_attr("IFLA_AF_SPEC")
    return message["index"], [vlan["vid"] for vlan in spec.get_attrs("IFLA_BRIDGE_VLAN_INFO")] if spec else []


def can_make(kernel: Socket, kind: str) -> bool:
    """Return True if the kernel supports the kind of link, such as `vlan`; it may load its module. Makes no link."""
    # The module refuses the address. Without a module the kernel refuses the kind.
    info = {"attrs": [("IFLA_INFO_KIND", kind)]}
    attributes = [("IFLA_IFNAME", "multus-probe"), ("IFLA_ADDRESS", "00:00:00:00:00:00"), ("IFLA_LINKINFO", info)]
    try:
        kernel.request(_request(RTM_NEWLINK, 0, attributes, family=0, flags=NLM_F_CREATE | NLM_F_EXCL))
    except OSError as error:
        return error.errno != errno.EOPNOTSUPP
    return True


def _change(kind: int, index: int, ends: Iterable[tuple[int, int]]) -> Request:
    items: list[tuple[str, Any]] = [("IFLA_BRIDGE_FLAGS", _FLAGS_MASTER)]
    items += [("IFLA_BRIDGE_VLAN_INFO", {"vid": vlan, "flags": flags}) for vlan, flags in ends]
    return _request(kind, index, [("IFLA_AF_SPEC", {"attrs": items})])


def _request(
    kind: int, index: int, attributes: list[tuple[str, Any]], *, family: int = _AF_BRIDGE, flags: int = 0
) -> Request:
    message = ifinfmsg()
    message["family"], message["index"], message["attrs"] = family, index, attributes
    message.encode()
    return Request(kind, bytes(message.data[HEADER.size :]), flags)
