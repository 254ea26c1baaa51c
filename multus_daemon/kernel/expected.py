"""Compare the result of an ADD with the kernel: interfaces, addresses and routes of a container."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from multus_daemon.kernel import inet
from multus_daemon.kernel.links import Rtnl
from multus_daemon.spec.cni.result import IpConfig, Result
from multus_daemon.spec.cni.result import Route as ResultRoute


def missing(kernel: Rtnl, ifname: str, result: Result, *, observed: bool) -> Iterator[str]:
    """Name each part of `result` that the container lacks, interface by interface, then routes. Raises OSError.

    `kernel`: a socket in the container's namespace; `ifname`: the interface of the ADD, for results that name none.
    Addresses are compared without their length. `observed`: the result comes from `observe`, so each route must be as
    it was, on an interface of the result. Else a route may be in any table, since plugins such as sbr move routes
    silently, and a default route may have any gateway.
    """
    own: dict[str, int] = {}
    owner_of, names = owners(result, ifname)
    for name in names:
        link = kernel.find_link(name)
        if link is None:
            yield f'interface "{name}" is not there'
            continue
        own[name] = link.index
        expected = [ip for ip, owner in owner_of.items() if owner == name]
        present = {item.address.ip for item in kernel.addresses(link.index)} if expected else set()
        for ip in expected:
            if ipaddress.ip_interface(ip.address).ip not in present:
                yield f'address {ip.address} is not on "{name}"'
    tables = Tables(kernel, map(network_of, result.routes))
    for route in result.routes:
        if observed:
            is_there = any(
                item.oif in own.values() and _gateway(item) == route.gw
                for item in tables.routes_to(route, inet.ANY_TABLE)
                if item.table == route.table
            )
        else:
            found = tables.routes_to(route, route.table or inet.ANY_TABLE)
            is_there = any(fits(route, item) for item in found if item.table != inet.TABLE_LOCAL)
        if not is_there:
            via = f" via {route.gw}" if route.gw and (observed or not route.is_default) else ""
            yield f"route to {route.dst}{via} is not there"


def observe(kernel: Rtnl, attached: Sequence[tuple[str, Result]]) -> list[Result]:
    """Return the part of each result that the container has; each comes with the interface name of its ADD.

    The routes are all routes on an interface of the result: plugins move and remove routes on purpose, and the kernel
    makes those to the subnets. Left out are routes that come and go by themselves: link-local and multicast routes, and
    those that a router advertises. Raises OSError.
    """
    return [_observe(kernel, ifname, result) for ifname, result in attached]


def _observe(kernel: Rtnl, ifname: str, result: Result) -> Result:
    owner_of, names = owners(result, ifname)
    own: dict[str, int] = {}
    present: dict[str, set[inet.IpAddress]] = {}
    for name in names:
        if (link := kernel.find_link(name)) is not None:
            own[name] = link.index
            present[name] = {item.address.ip for item in kernel.addresses(link.index)}
    interfaces = [item for item in result.interfaces if item.sandbox and item.name in own]
    at = {item.name: index for index, item in enumerate(interfaces)}
    ips = tuple(
        # By name, so that the address keeps its interface without those of the host.
        replace(ip, interface=at.get(owner)) if owner in at else IpConfig(ip.address, ip.gateway)
        for ip, owner in owner_of.items()
        if owner in own and ipaddress.ip_interface(ip.address).ip in present[owner]
    )
    addresses = [ipaddress.ip_interface(ip.address) for ip in ips]
    routes = tuple(
        ResultRoute(str(item.dst.network), _gateway(item), table=item.table)
        for family in (socket.AF_INET, socket.AF_INET6)
        for index in own.values()
        for item in kernel.routes(family, inet.ANY_TABLE, oif=index)
        if _stays(item, addresses)
    )
    return Result(tuple(interfaces), ips, routes)


def _stays(route: inet.Route, addresses: Sequence[inet.IpInterface]) -> bool:
    """Report whether a route stays until it is removed. `addresses`: those of its interface."""
    network = route.dst.network
    if not route.is_unicast or route.table == inet.TABLE_LOCAL or route.protocol == inet.PROTOCOL_RA:
        return False
    if network.is_multicast or network.is_link_local:
        return False
    # The kernel makes the routes to the subnets of addresses, those of advertised addresses too.
    return route.protocol != inet.PROTOCOL_KERNEL or any(
        address.version == network.version and address.ip in network for address in addresses
    )


def _gateway(route: inet.Route) -> str:
    return "" if route.gateway is None else str(route.gateway)


def network_of(route: ResultRoute) -> inet.IpNetwork:
    """Return the destination of a route."""
    return ipaddress.ip_interface(route.dst).network


class Tables:
    """The routes to some networks in a container's routing tables, each of which is read once.

    A pod's author can cause a result with thousands of routes, and a pod may have 100,000 routes of its own.
    """

    def __init__(self, kernel: Rtnl, networks: Iterable[inet.IpNetwork]) -> None:
        """`networks`: no others are asked for."""
        self._kernel = kernel
        self._wanted = frozenset((network.prefixlen, network.network_address.packed) for network in networks)
        self._read: dict[tuple[bool, int], dict[inet.IpNetwork, list[inet.Route]]] = {}

    def routes(self, ipv4: bool, table: int) -> Mapping[inet.IpNetwork, Sequence[inet.Route]]:
        """Return the routes of a table to the networks, by destination. Raises OSError."""
        if (ipv4, table) not in self._read:
            found = self._read[ipv4, table] = {}
            for route in self._kernel.routes(socket.AF_INET if ipv4 else socket.AF_INET6, table, to=self._wanted):
                found.setdefault(route.dst.network, []).append(route)
        return self._read[ipv4, table]

    def routes_to(self, expected: ResultRoute, table: int) -> Sequence[inet.Route]:
        """Return the routes of a table to the destination of the expected one. Raises OSError."""
        return self.routes(expected.is_ipv4, table).get(network_of(expected), ())


def fits(expected: ResultRoute, found: inet.Route) -> bool:
    """Report whether a route to the same destination has the expected gateway; any gateway is fine for a default."""
    return expected.is_default or not expected.gw or found.gateway == ipaddress.ip_address(expected.gw)


def owners(result: Result, ifname: str) -> tuple[dict[IpConfig, str], list[str]]:
    """Return the container interface of each address (empty for one on the host), and all container interfaces."""
    inside = {index: item.name for index, item in enumerate(result.interfaces) if item.sandbox}
    # Before CNI 0.3.0 a result names no interface: its addresses are on the interface of the call.
    default = list(inside.values())[-1] if inside else ifname
    owner_of = {
        ip: default if ip.interface is None or ip.interface < 0 else inside.get(ip.interface, "") for ip in result.ips
    }
    return owner_of, list(dict.fromkeys((*inside.values(), *filter(None, owner_of.values()))))
