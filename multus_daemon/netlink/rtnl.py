"""Links, addresses and routes of one network namespace, as typed requests.

Every method blocks and raises OSError with the kernel's errno and words; who calls says which errno is no failure.
Sent as the reference plugins send them: routes have protocol `boot`, an IPv4 address brings its broadcast address.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyroute2.netlink.rtnl import (
    RTM_DELLINK,
    RTM_DELROUTE,
    RTM_GETADDR,
    RTM_GETLINK,
    RTM_GETROUTE,
    RTM_NEWADDR,
    RTM_NEWLINK,
    RTM_NEWROUTE,
)
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from multus_daemon.netlink.transport import NLM_F_CREATE, NLM_F_EXCL, Socket

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpInterface = ipaddress.IPv4Interface | ipaddress.IPv6Interface
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

# rtnetlink(7), linux/if.h, linux/if_addr.h, linux/rtnetlink.h
IFF_UP: Final = 0x1
IFA_F_DADFAILED: Final = 0x08
IFA_F_TENTATIVE: Final = 0x40
OPERSTATE_UP: Final = "UP"
TABLE_MAIN: Final = 254
SCOPE_GLOBAL: Final = 0
SCOPE_LINK: Final = 253
SCOPE_HOST: Final = 254
# In a request to delete: any scope.
SCOPE_NOWHERE: Final = 255

_TABLE_FIELD_MAX: Final = 255
_PROTOCOL_BOOT: Final = 3
_TYPE_UNICAST: Final = 1
# Counters make up half of a link's description, and nobody here reads them.
_EXT_MASK_SKIP_STATS: Final = 1 << 3
# From this prefix length on there is no broadcast address (RFC 3021).
_NO_BROADCAST: Final = 31


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


@dataclass(frozen=True, slots=True)
class Address:
    """An address of a link."""

    address: IpInterface
    flags: int

    @property
    def is_tentative(self) -> bool:
        """True while duplicate address detection runs."""
        return bool(self.flags & IFA_F_TENTATIVE)

    @property
    def is_duplicate(self) -> bool:
        """True where duplicate address detection has found another owner."""
        return bool(self.flags & IFA_F_DADFAILED)


@dataclass(frozen=True, slots=True)
class Route:
    """A route of one next hop. `dst` keeps its host bits: whether they are an error is for the kernel to say."""

    dst: IpInterface
    oif: int
    """Index of the link."""
    gateway: IpAddress | None = None
    source: IpAddress | None = None
    scope: int = SCOPE_GLOBAL
    table: int = TABLE_MAIN
    priority: int = 0


def _family(address: IpAddress | IpInterface) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


class Rtnl:
    """The requests, over one socket of the namespace that the thread was in when this was made."""

    def __init__(self) -> None:
        self._socket = Socket()

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    # --- links -------------------------------------------------------------------------------------------------------

    def link(self, name: str) -> Link:
        """The link of that name; ENODEV where there is none."""
        message = ifinfmsg()
        message["attrs"] = [("IFLA_IFNAME", name), ("IFLA_EXT_MASK", _EXT_MASK_SKIP_STATS)]
        return _link(self._socket.request(RTM_GETLINK, message, answer=ifinfmsg)[0])

    def find_link(self, name: str) -> Link | None:
        """The link of that name, None where there is none."""
        try:
            return self.link(name)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return None
            raise

    def add_veth(self, name: str, peer: str, peer_netns: int, *, mtu: int = 0) -> None:
        """A veth pair, `name` here and `peer` in the namespace of that descriptor; `mtu` of both in bytes, 0: default.

        EEXIST where one of the names is taken.
        """
        common = [("IFLA_MTU", mtu)] if mtu > 0 else []
        other_end = {"attrs": [("IFLA_IFNAME", peer), ("IFLA_NET_NS_FD", peer_netns), *common]}
        details = {"attrs": [("VETH_INFO_PEER", other_end)]}
        info = {"attrs": [("IFLA_INFO_KIND", "veth"), ("IFLA_INFO_DATA", details)]}
        message = ifinfmsg()
        message["attrs"] = [("IFLA_IFNAME", name), *common, ("IFLA_LINKINFO", info)]
        self._socket.request(RTM_NEWLINK, message, NLM_F_CREATE | NLM_F_EXCL)

    def set_up(self, index: int) -> None:
        """Bring the link up."""
        self._set_flags(index, IFF_UP)

    def set_down(self, index: int) -> None:
        """Take the link down."""
        self._set_flags(index, 0)

    def _set_flags(self, index: int, flags: int) -> None:
        message = ifinfmsg()
        message["index"], message["flags"], message["change"] = index, flags, IFF_UP
        self._socket.request(RTM_NEWLINK, message)

    def delete_link(self, index: int) -> None:
        """Remove the link, and the other end where it is a veth; ENODEV where there is none. Takes 20 ms and more."""
        message = ifinfmsg()
        message["index"] = index
        self._socket.request(RTM_DELLINK, message)

    # --- addresses ---------------------------------------------------------------------------------------------------

    def addresses(self, index: int, family: int = socket.AF_UNSPEC) -> list[Address]:
        """The link's addresses, of one family or of both, IPv4 first."""
        message = ifaddrmsg()
        message["family"], message["index"] = family, index
        found = self._socket.dump(RTM_GETADDR, message, answer=ifaddrmsg)
        # Kernels before 4.20 do not filter.
        return [_address(item) for item in found if item["index"] == index]

    def add_address(self, index: int, address: IpInterface, *, broadcast: bool = True) -> None:
        """Add an address of global scope; `broadcast`: with the broadcast address that an IPv4 network has."""
        text = str(address.ip)
        message = ifaddrmsg()
        message["family"], message["prefixlen"], message["index"] = _family(address), address.network.prefixlen, index
        message["attrs"] = [("IFA_LOCAL", text), ("IFA_ADDRESS", text)]
        if broadcast and address.version == 4 and address.network.prefixlen < _NO_BROADCAST:
            message["attrs"].append(("IFA_BROADCAST", str(address.network.broadcast_address)))
        self._socket.request(RTM_NEWADDR, message, NLM_F_CREATE | NLM_F_EXCL)

    # --- routes ------------------------------------------------------------------------------------------------------

    def add_route(self, route: Route, *, exclusive: bool = True) -> None:
        """Add a route; EEXIST where `exclusive` and there is one to `dst`, and for one that is the same in all."""
        message = _route_message(route)
        message["proto"], message["type"] = _PROTOCOL_BOOT, _TYPE_UNICAST
        self._socket.request(RTM_NEWROUTE, message, NLM_F_CREATE | (NLM_F_EXCL if exclusive else 0))

    def delete_route(self, route: Route) -> None:
        """Delete the first route that fits; ESRCH where there is none."""
        self._socket.request(RTM_DELROUTE, _route_message(route))

    def routes(self, family: int, table: int = TABLE_MAIN) -> list[Route]:
        """The routes of one table; one for each next hop."""
        message = rtmsg()
        message["family"], message["table"] = family, _table_field(table)
        message["attrs"] = [("RTA_TABLE", table)]
        try:
            found = self._socket.dump(RTM_GETROUTE, message, answer=rtmsg)
        except FileNotFoundError:
            # The kernel makes a table with its first route.
            return []
        return [route for item in found for route in _routes(item) if route.table == table]


def _link(message: Any) -> Link:
    return Link(
        index=message["index"],
        name=message.get_attr("IFLA_IFNAME"),
        mac=message.get_attr("IFLA_ADDRESS") or "",
        mtu=message.get_attr("IFLA_MTU") or 0,
        is_up=bool(message["flags"] & IFF_UP),
        operstate=message.get_attr("IFLA_OPERSTATE") or "",
        kind=message.get_nested("IFLA_LINKINFO", "IFLA_INFO_KIND") or "",
    )


def _address(message: Any) -> Address:
    # IFA_LOCAL is the link's own address where IFA_ADDRESS is that of a point-to-point peer; IPv6 has only the latter.
    text = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
    flags = message.get_attr("IFA_FLAGS")
    return Address(
        ipaddress.ip_interface(f"{text}/{message['prefixlen']}"), message["flags"] if flags is None else flags
    )


def _route_message(route: Route) -> Any:
    message = rtmsg()
    message["family"], message["dst_len"] = _family(route.dst), route.dst.network.prefixlen
    message["table"] = _table_field(route.table)
    message["scope"] = route.scope
    attributes: list[tuple[str, Any]] = [("RTA_OIF", route.oif)]
    if route.dst.network.prefixlen:
        attributes.append(("RTA_DST", str(route.dst.ip)))
    if route.gateway is not None:
        attributes.append(("RTA_GATEWAY", str(route.gateway)))
    if route.source is not None:
        attributes.append(("RTA_PREFSRC", str(route.source)))
    if route.priority > 0:
        attributes.append(("RTA_PRIORITY", route.priority))
    if route.table > _TABLE_FIELD_MAX:
        attributes.append(("RTA_TABLE", route.table))
    message["attrs"] = attributes
    return message


def _table_field(table: int) -> int:
    """What the header's field of 8 bits says; 0 leaves it to the attribute RTA_TABLE."""
    return table if table <= _TABLE_FIELD_MAX else 0


def _routes(message: Any) -> list[Route]:
    # A default route has no RTA_DST.
    anywhere = ipaddress.IPv4Address(0) if message["family"] == socket.AF_INET else ipaddress.IPv6Address(0)
    dst = ipaddress.ip_interface(f"{message.get_attr('RTA_DST') or anywhere}/{message['dst_len']}")
    hops: Sequence[tuple[int, str | None]] = [
        (hop["oif"], hop.get_attr("RTA_GATEWAY")) for hop in message.get_attr("RTA_MULTIPATH") or ()
    ] or [(message.get_attr("RTA_OIF") or 0, message.get_attr("RTA_GATEWAY"))]
    source = message.get_attr("RTA_PREFSRC")
    return [
        Route(
            dst=dst,
            oif=oif,
            gateway=ipaddress.ip_address(gateway) if gateway else None,
            source=ipaddress.ip_address(source) if source else None,
            scope=message["scope"],
            table=message.get_attr("RTA_TABLE") or message["table"],
            priority=message.get_attr("RTA_PRIORITY") or 0,
        )
        for oif, gateway in hops
    ]
