"""Encode and decode rtnetlink messages about IPv4 and IPv6 addresses and routes. Pure.

Format: rtnetlink(7), struct ifaddrmsg and struct rtmsg, then attributes; linux/if_addr.h, linux/rtnetlink.h. As with
the reference plugins, routes have protocol `boot`, and an IPv4 address comes with its broadcast address.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from multus_daemon.kernel.transport import NLM_F_CREATE, NLM_F_EXCL, Request, attribute, attributes, to_number

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpInterface = ipaddress.IPv4Interface | ipaddress.IPv6Interface
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

RTM_NEWADDR: Final = 20
RTM_DELADDR: Final = 21
RTM_GETADDR: Final = 22
RTM_NEWROUTE: Final = 24
RTM_DELROUTE: Final = 25
RTM_GETROUTE: Final = 26

IFA_F_NODAD: Final = 0x02
IFA_F_DADFAILED: Final = 0x08
IFA_F_TENTATIVE: Final = 0x40
_IFA_F_PERMANENT: Final = 0x80
TABLE_MAIN: Final = 254
TABLE_LOCAL: Final = 255
ANY_TABLE: Final = 0
SCOPE_GLOBAL: Final = 0
SCOPE_LINK: Final = 253
SCOPE_HOST: Final = 254
# In a request to delete: any scope.
SCOPE_NOWHERE: Final = 255

# Family, prefix length, flags, scope, index of the link.
_ADDRESS: Final = struct.Struct("=BBBBI")
# Family, prefix lengths of destination and source, TOS, table, protocol, scope, type, flags.
ROUTE: Final = struct.Struct("=8BI")
# Length, flags, weight - 1, index of the link.
NEXT_HOP: Final = struct.Struct("=HBBi")

_IFA_ADDRESS: Final = 1
_IFA_LOCAL: Final = 2
_IFA_BROADCAST: Final = 4
_IFA_FLAGS: Final = 8
_RTA_DST: Final = 1
RTA_OIF: Final = 4
RTA_GATEWAY: Final = 5
RTA_PRIORITY: Final = 6
_RTA_PREFSRC: Final = 7
RTA_MULTIPATH: Final = 9
RTA_TABLE: Final = 15

TABLE_FIELD_MAX: Final = 255
PROTOCOL_KERNEL: Final = 2
_PROTOCOL_BOOT: Final = 3
PROTOCOL_RA: Final = 9
_CONNECTED_METRIC: Final = 256
_DEFAULT_METRIC: Final = 1024
_TYPE_UNICAST: Final = 1
# From this prefix length on there is no broadcast address (RFC 3021).
_NO_BROADCAST: Final = 31
FAMILIES: Final = {4: socket.AF_INET, 6: socket.AF_INET6}

# Cached: an ADD parses a pod's address several times, and every ADD parses the same subnet and gateway.
address_of = lru_cache(maxsize=64)(ipaddress.ip_address)
interface_of = lru_cache(maxsize=64)(ipaddress.ip_interface)


@dataclass(frozen=True, slots=True)
class Address:
    """An address of a link."""

    address: IpInterface
    is_tentative: bool
    """True while duplicate address detection runs."""
    is_duplicate: bool
    """True if duplicate address detection found another owner."""
    is_configured: bool = True
    """False for one with a lifetime, and one of a narrower scope than all networks, such as that of the link."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route of one next hop. `dst` keeps its host bits, which the kernel may refuse."""

    dst: IpInterface
    oif: int
    """Index of the link."""
    gateway: IpAddress | None = None
    source: IpAddress | None = None
    scope: int = SCOPE_GLOBAL
    table: int = TABLE_MAIN
    priority: int = 0
    protocol: int = field(default=_PROTOCOL_BOOT, compare=False)
    """Origin of the route: RTPROT_..., rtnetlink(7)."""
    is_unicast: bool = field(default=True, compare=False)
    """False for local, multicast, broadcast and the like."""


def connected(address: IpInterface, oif: int) -> Route:
    """Return the route to the subnet of an address that the kernel adds together with the address."""
    subnet = interface_of(address.network)
    if address.version == 4:
        return Route(subnet, oif, source=address.ip, scope=SCOPE_LINK, protocol=PROTOCOL_KERNEL)
    return Route(subnet, oif, priority=_CONNECTED_METRIC, protocol=PROTOCOL_KERNEL)


def metric(route: Route) -> int:
    """Return the priority that the kernel gives to a route."""
    return route.priority or (_DEFAULT_METRIC if route.dst.version == 6 else 0)


# --- addresses -------------------------------------------------------------------------------------------------------


def list_addresses(index: int, family: int) -> Request:
    """Dump the addresses of a link; kernels before 4.20 report those of all links."""
    return Request(RTM_GETADDR, _ADDRESS.pack(family, 0, 0, 0, index))


def add_address(index: int, address: IpInterface, *, broadcast: bool = True, dad: bool = True) -> Request:
    """Add an address to the link with this index.

    `broadcast`: with the broadcast address of an IPv4 subnet. `dad`: an IPv6 address is tentative until duplicate
    address detection (RFC 4862) ends, after one to two seconds; without, it can be used at once.
    """
    packed, network = address.packed, address.network
    flags = IFA_F_NODAD if address.version == 6 and not dad else 0
    scope = SCOPE_HOST if address.is_loopback else SCOPE_GLOBAL
    fields = _ADDRESS.pack(FAMILIES[address.version], network.prefixlen, flags, scope, index)
    body = fields + attribute(_IFA_LOCAL, packed) + attribute(_IFA_ADDRESS, packed)
    if broadcast and address.version == 4 and network.prefixlen < _NO_BROADCAST:
        body += attribute(_IFA_BROADCAST, network.broadcast_address.packed)
    return Request(RTM_NEWADDR, body, NLM_F_CREATE | NLM_F_EXCL)


def delete_address(index: int, address: IpInterface) -> Request:
    """Remove an address from the link with this index; EADDRNOTAVAIL if it does not have it."""
    return Request(RTM_DELADDR, add_address(index, address, broadcast=False).body)


def decode_address(body: bytes) -> tuple[int, Address]:
    """Decode the link's index and the address. Raises OSError (EBADMSG), KeyError if there is no address."""
    _, length, flags, scope, index = _ADDRESS.unpack_from(body)
    found = attributes(body, _ADDRESS.size)
    # IFA_LOCAL is the link's own address if IFA_ADDRESS is that of a point-to-point peer; IPv6 has only the latter.
    packed = found.get(_IFA_LOCAL) or found[_IFA_ADDRESS]
    flags = to_number(found.get(_IFA_FLAGS)) or flags
    is_configured = scope == SCOPE_GLOBAL and bool(flags & _IFA_F_PERMANENT)
    address = interface_of((packed, length))
    return index, Address(address, bool(flags & IFA_F_TENTATIVE), bool(flags & IFA_F_DADFAILED), is_configured)


# --- routes ----------------------------------------------------------------------------------------------------------


def add_route(route: Route, *, exclusive: bool = True) -> Request:
    """Add a route; EEXIST if there is an equal one, and with `exclusive` if there is any to its destination."""
    body = _route(route, protocol=route.protocol, kind=_TYPE_UNICAST)
    return Request(RTM_NEWROUTE, body, NLM_F_CREATE | (NLM_F_EXCL if exclusive else 0))


def delete_route(route: Route) -> Request:
    """Delete the first route that matches; ESRCH if there is none."""
    return Request(RTM_DELROUTE, _route(route))


def destination(body: bytes) -> tuple[int, bytes]:
    """Return the destination of a route, given in the kernel's form: its prefix length and address."""
    anywhere = bytes(4 if body[0] == socket.AF_INET else 16)
    return body[1], attributes(body, ROUTE.size).get(_RTA_DST, anywhere)


def list_routes(family: int, table: int, oif: int = 0) -> Request:
    """Dump the routes of a table, if `oif` is not 0 only those over that link; kernels before 4.20 report all."""
    fields = ROUTE.pack(family, 0, 0, 0, table if table <= TABLE_FIELD_MAX else 0, 0, 0, 0, 0)
    return Request(RTM_GETROUTE, fields + attribute(RTA_TABLE, table) + (attribute(RTA_OIF, oif) if oif else b""))


def route_to(address: IpAddress) -> Request:
    """Ask for the route of packets to the address; `decode_routes` reads the answer."""
    header = ROUTE.pack(FAMILIES[address.version], address.max_prefixlen, *[0] * 7)
    return Request(RTM_GETROUTE, header + attribute(_RTA_DST, address.packed))


def _route(route: Route, *, protocol: int = 0, kind: int = 0) -> bytes:
    length = route.dst.network.prefixlen
    # The header's field has 8 bits; 0 leaves the table to the attribute RTA_TABLE.
    table = route.table if route.table <= TABLE_FIELD_MAX else 0
    return b"".join(
        (
            ROUTE.pack(FAMILIES[route.dst.version], length, 0, 0, table, protocol, route.scope, kind, 0),
            attribute(RTA_OIF, route.oif),
            attribute(_RTA_DST, route.dst.packed) if length else b"",
            attribute(RTA_GATEWAY, route.gateway.packed) if route.gateway is not None else b"",
            attribute(_RTA_PREFSRC, route.source.packed) if route.source is not None else b"",
            attribute(RTA_PRIORITY, route.priority) if route.priority > 0 else b"",
            attribute(RTA_TABLE, route.table) if route.table > TABLE_FIELD_MAX else b"",
        )
    )


def decode_routes(body: bytes) -> list[Route]:
    """Decode a route, once for each of its next hops. Raises OSError (EBADMSG)."""
    family, length, _, _, table, protocol, scope, kind, _ = ROUTE.unpack_from(body)
    found = attributes(body, ROUTE.size)
    # A default route has no RTA_DST.
    anywhere = bytes(4 if family == socket.AF_INET else 16)
    source = found.get(_RTA_PREFSRC)
    several = next_hops(found.get(RTA_MULTIPATH, b""))
    hops = [(oif, attributes(hop).get(RTA_GATEWAY)) for _, _, oif, hop in several]
    hops = hops or [(to_number(found.get(RTA_OIF)), found.get(RTA_GATEWAY))]
    return [
        Route(
            dst=interface_of((found.get(_RTA_DST, anywhere), length)),
            oif=oif,
            gateway=address_of(gateway) if gateway else None,
            source=address_of(source) if source else None,
            scope=scope,
            table=to_number(found.get(RTA_TABLE)) or table,
            priority=to_number(found.get(RTA_PRIORITY)),
            protocol=protocol,
            is_unicast=kind == _TYPE_UNICAST,
        )
        for oif, gateway in hops
    ]


def next_hops(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield flags, weight, link index and attributes of each next hop in RTA_MULTIPATH (struct rtnexthop)."""
    offset = 0
    while offset + NEXT_HOP.size <= len(data):
        length, flags, weight, oif = NEXT_HOP.unpack_from(data, offset)
        yield flags, weight, oif, data[offset + NEXT_HOP.size : offset + length]
        offset += (max(length, NEXT_HOP.size) + 3) & ~3
