"""Network interfaces as rtnetlink messages: requests, and the kernel's descriptions. Pure.

Format: rtnetlink(7), struct ifinfomsg, then attributes; linux/if_link.h, linux/if.h, linux/veth.h.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from multus_daemon.kernel import attributes
from multus_daemon.kernel.attributes import attribute, nested, number, text
from multus_daemon.kernel.transport import NLM_F_CREATE, NLM_F_ECHO, NLM_F_EXCL, Request

RTM_NEWLINK: Final = 16
RTM_DELLINK: Final = 17
RTM_GETLINK: Final = 18
RTM_SETLINK: Final = 19

IFF_UP: Final = 0x1
IFF_PROMISC: Final = 0x100
IFF_ALLMULTI: Final = 0x200
OPERSTATE_UP: Final = "UP"
MACVLAN_MODES: Final[Mapping[str, int]] = MappingProxyType({"private": 1, "vepa": 2, "bridge": 4, "passthru": 8})
"""By the names that ip-link(8) has; `source` is none of the reference plugin's."""

# Family, type of device, index, flags, mask of flags.
_LINK: Final = struct.Struct("=BxHiII")
_OPERSTATES: Final = ("UNKNOWN", "NOTPRESENT", "DOWN", "LOWERLAYERDOWN", "TESTING", "DORMANT", OPERSTATE_UP)
# Counters make up half of a link's description, and nobody here reads them.
_EXT_MASK_SKIP_STATS: Final = 1 << 3

_IFLA_ADDRESS: Final = 1
_IFLA_IFNAME: Final = 3
_IFLA_MTU: Final = 4
_IFLA_LINK: Final = 5
_IFLA_MASTER: Final = 10
_IFLA_PROTINFO: Final = 12
_IFLA_TXQLEN: Final = 13
_IFLA_OPERSTATE: Final = 16
_IFLA_LINKINFO: Final = 18
_IFLA_GROUP: Final = 27
_IFLA_NET_NS_FD: Final = 28
_IFLA_EXT_MASK: Final = 29
_IFLA_INFO_KIND: Final = 1
_IFLA_INFO_DATA: Final = 2
_VETH_INFO_PEER: Final = 1
_IFLA_BR_VLAN_FILTERING: Final = 7
_IFLA_MACVLAN_MODE: Final = 1
_IFLA_MACVLAN_BC_QUEUE_LEN: Final = 7
# What is asked of a bridge through one of its ports.
_AF_BRIDGE: Final = 7
_IFLA_BRPORT_MODE: Final = 4
_IFLA_BRPORT_ISOLATED: Final = 33
_NLA_F_NESTED: Final = 1 << 15


@dataclass(frozen=True, slots=True)
class Link:
    """A network interface."""

    index: int
    name: str
    mac: str
    mtu: int
    is_up: bool
    operstate: str
    """`UP`, `DOWN`, `LOWERLAYERDOWN`, `UNKNOWN`…, as `ip link` shows it."""
    kind: str
    """`veth`, `bridge`…; empty for what is no virtual link of a named kind."""
    master: int = 0
    """Index of the bridge that it is a port of; 0: of none."""
    peer: int = 0
    """Of a veth: index of the other end, in that end's namespace; 0 where the kernel does not tell."""
    is_promiscuous: bool = False
    """As somebody has set it: a packet capture does not count."""
    is_allmulti: bool = False
    """Takes in frames for any multicast address; as somebody has set it."""
    tx_queue_length: int = 0
    """In packets."""
    mode: str = ""
    """Of a macvlan: one of `MACVLAN_MODES`."""


# --- requests --------------------------------------------------------------------------------------------------------


def look_up(name: str) -> Request:
    """The link of that name."""
    wanted = (text(_IFLA_IFNAME, name), number(_IFLA_EXT_MASK, _EXT_MASK_SKIP_STATS))
    return _request(RTM_GETLINK, attrs=wanted)


def look_up_at(index: int) -> Request:
    """The link of that index."""
    return _request(RTM_GETLINK, index, attrs=(number(_IFLA_EXT_MASK, _EXT_MASK_SKIP_STATS),))


def add_veth(name: str, peer: str, peer_netns: int, *, mtu: int, peer_mac: str) -> Request:
    """See `Rtnl.add_veth`."""
    common = number(_IFLA_MTU, mtu) if mtu > 0 else b""
    other_end = (
        _LINK.pack(0, 0, 0, 0, 0),
        text(_IFLA_IFNAME, peer),
        number(_IFLA_NET_NS_FD, peer_netns),
        common,
        attributes.mac(_IFLA_ADDRESS, peer_mac) if peer_mac else b"",
    )
    # Of the two ends only this one can be made up: the kernel has no other end yet when it makes that.
    return _new(name, (common,), "veth", nested(_VETH_INFO_PEER, other_end), NLM_F_ECHO, flags=IFF_UP)


def add_bridge(name: str, *, mtu: int, vlan_filtering: bool) -> Request:
    """See `Rtnl.add_bridge`."""
    data = attribute(_IFLA_BR_VLAN_FILTERING, b"\1") if vlan_filtering else b""
    return _new(name, (number(_IFLA_MTU, mtu) if mtu > 0 else b"",), "bridge", data)


def add_macvlan(
    name: str, master: int, netns: int, *, mode: str, mtu: int = 0, mac: str = "", broadcast_queue: int = 0
) -> Request:
    """See `Rtnl.add_macvlan`."""
    data = number(_IFLA_MACVLAN_MODE, MACVLAN_MODES[mode])
    if broadcast_queue:
        data += number(_IFLA_MACVLAN_BC_QUEUE_LEN, broadcast_queue)
    own = (
        number(_IFLA_LINK, master),
        number(_IFLA_NET_NS_FD, netns),
        number(_IFLA_MTU, mtu) if mtu else b"",
        attributes.mac(_IFLA_ADDRESS, mac) if mac else b"",
    )
    return _new(name, own, "macvlan", data)


def set_flags(index: int, flags: int, change: int) -> Request:
    """Those of the flags that are in the mask `change`."""
    return _request(RTM_NEWLINK, index, flags=flags, change=change)


def set_up(index: int) -> Request:
    """Bring the link up."""
    return set_flags(index, IFF_UP, IFF_UP)


def rename(index: int, name: str) -> Request:
    """Give the link another name."""
    return _request(RTM_SETLINK, index, attrs=(text(_IFLA_IFNAME, name),))


def set_mac(index: int, mac: str) -> Request:
    """Set the link's address."""
    return _request(RTM_SETLINK, index, attrs=(attributes.mac(_IFLA_ADDRESS, mac),))


def set_mtu(index: int, mtu: int) -> Request:
    """In bytes."""
    return _request(RTM_SETLINK, index, attrs=(number(_IFLA_MTU, mtu),))


def set_tx_queue_length(index: int, packets: int) -> Request:
    """How many packets may wait to be sent."""
    return _request(RTM_SETLINK, index, attrs=(number(_IFLA_TXQLEN, packets),))


def set_master(index: int, master: int) -> Request:
    """Make the link a port of the bridge with index `master`."""
    return _request(RTM_SETLINK, index, attrs=(number(_IFLA_MASTER, master),))


def delete(index: int) -> Request:
    """Remove the link."""
    return _request(RTM_DELLINK, index)


def set_group(index: int, group: int) -> Request:
    """Make the link one of the group; every link is in one group, in 0 if nothing is said."""
    return _request(RTM_SETLINK, index, attrs=(number(_IFLA_GROUP, group),))


def delete_group(group: int) -> Request:
    """Remove every link of the group, which is not 0."""
    return _request(RTM_DELLINK, attrs=(number(_IFLA_GROUP, group),))


def set_port(index: int, *, hairpin: bool, isolated: bool) -> Request:
    """See `Rtnl.set_port`."""
    settings = (
        attribute(_IFLA_BRPORT_MODE, bytes((hairpin,))),
        attribute(_IFLA_BRPORT_ISOLATED, bytes((isolated,))),
    )
    return _request(RTM_SETLINK, index, family=_AF_BRIDGE, attrs=(nested(_IFLA_PROTINFO | _NLA_F_NESTED, settings),))


def _new(name: str, own: Iterable[bytes], kind: str, data: bytes, more_flags: int = 0, *, flags: int = 0) -> Request:
    """A link that must not be there yet; `flags`: IFF_…."""
    info = text(_IFLA_INFO_KIND, kind) + (attribute(_IFLA_INFO_DATA, data) if data else b"")
    attrs = (text(_IFLA_IFNAME, name), *own, attribute(_IFLA_LINKINFO, info))
    request_flags = NLM_F_CREATE | NLM_F_EXCL | more_flags
    return _request(RTM_NEWLINK, flags=flags, change=flags, attrs=attrs, request_flags=request_flags)


def _request(
    kind: int,
    index: int = 0,
    *,
    family: int = 0,
    flags: int = 0,
    change: int = 0,
    attrs: Iterable[bytes] = (),
    request_flags: int = 0,
) -> Request:
    return Request(kind, _LINK.pack(family, 0, index, flags, change) + b"".join(attrs), request_flags)


# --- descriptions ----------------------------------------------------------------------------------------------------


def gone(body: bytes) -> int:
    """Index of the link that is no more, from what comes behind the header of an RTM_DELLINK; 0 if it is still there.

    Of a bridge's port the bridge tells by the same message, with its own family, that it is none any more.
    """
    family, _, index, _, _ = _LINK.unpack_from(body)
    return int(index) if family == socket.AF_UNSPEC else 0


def decode(body: bytes) -> Link:
    """A link, from what comes behind the header of an RTM_NEWLINK. Raises OSError (EBADMSG)."""
    _, _, index, flags, _ = _LINK.unpack_from(body)
    found = attributes.by_kind(body, _LINK.size)
    info = attributes.by_kind(found.get(_IFLA_LINKINFO, b""))
    kind = attributes.to_text(info.get(_IFLA_INFO_KIND))
    state = found.get(_IFLA_OPERSTATE, b"\0")[0]
    return Link(
        index=index,
        name=attributes.to_text(found.get(_IFLA_IFNAME)),
        mac=found.get(_IFLA_ADDRESS, b"").hex(":"),
        mtu=attributes.to_number(found.get(_IFLA_MTU)),
        is_up=bool(flags & IFF_UP),
        operstate=_OPERSTATES[state] if state < len(_OPERSTATES) else "",
        kind=kind,
        master=attributes.to_number(found.get(_IFLA_MASTER)),
        peer=attributes.to_number(found.get(_IFLA_LINK)),
        is_promiscuous=bool(flags & IFF_PROMISC),
        is_allmulti=bool(flags & IFF_ALLMULTI),
        tx_queue_length=attributes.to_number(found.get(_IFLA_TXQLEN)),
        mode=_macvlan_mode(info.get(_IFLA_INFO_DATA, b"")) if kind == "macvlan" else "",
    )


def _macvlan_mode(data: bytes) -> str:
    mode = attributes.to_number(attributes.by_kind(data).get(_IFLA_MACVLAN_MODE))
    return next((name for name, value in MACVLAN_MODES.items() if value == mode), "")
