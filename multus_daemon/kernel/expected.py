"""Compare the result of an ADD with the kernel: interfaces, addresses and routes of a container."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from multus_daemon.kernel import inet
from multus_daemon.kernel.links import Link, Rtnl
from multus_daemon.spec.cni import names
from multus_daemon.spec.cni.result import Interface, IpConfig, Result
from multus_daemon.spec.cni.result import Route as ResultRoute


class Missing(NamedTuple):
    """One part of a result that the container lacks."""

    text: str
    by_pod: bool = False
    """True if only a program in the container's namespace can have taken it away."""


def possible(result: Result) -> Result:
    """Return the result without what no namespace can have: some plugins report names and the like of their own.

    An interface keeps its place, for the indexes of the addresses, and loses its name. MAC addresses are written as the
    kernel writes them, and those that are none are empty.
    """
    interfaces = tuple([_possible(item) for item in result.interfaces])
    ips = tuple([ip for ip in result.ips if not _is_no_host(ip.ip)])
    routes = tuple(
        [
            replace(route, gw="") if route.gw and _is_no_host(route.gw) else route
            for route in result.routes
            if 0 <= (route.table or 0) < 1 << 32 and (not route.gw or (":" not in route.gw) is route.is_ipv4)
        ]
    )
    return replace(result, interfaces=interfaces, ips=ips, routes=routes)


def _possible(item: Interface) -> Interface:
    is_link = not names.ifname_problem(item.name) and (not item.sandbox or item.sandbox.startswith("/"))
    return replace(item, name=item.name if is_link else "", mac=names.mac_address(item.mac))


def _is_no_host(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return address.is_unspecified or address.is_multicast


def missing(kernel: Rtnl, ifname: str, result: Result, *, observed: bool) -> Iterator[Missing]:
    """Yield each part of `result` that the container lacks, interface by interface, then routes. Raises OSError.

    `kernel`: a socket in the container's namespace; `ifname`: the interface of the ADD, for results that name none.
    Addresses are compared without their length. `observed`: the result comes from `observe`, so each route must be as
    it was, on an interface of the result. Else a route may be in any table, since plugins such as sbr move routes
    silently, and a default route may have any gateway.

    An interface that the pod has renamed, as KubeVirt does, must be up. The pod has its addresses and routes then.
    """
    result = possible(result)
    indexes = {item.name: item.index for item in result.interfaces if item.sandbox}
    own: dict[int, Link] = {}
    owner_of, known = owners(result, ifname)
    is_whole, is_moved = True, False
    for name in known:
        link = kernel.find_link(name)
        if (moved := renamed(kernel, indexes.get(name, 0), link)) is not None:
            is_whole, is_moved = False, True
            if problem := of_renamed(name, moved, link):
                yield problem
            continue
        if link is None:
            is_whole = False
            yield Missing(f'interface "{name}" is not there')
            continue
        own[link.index] = link
        expected = [ip for ip, owner in owner_of.items() if owner == name]
        present = {item.address.ip for item in kernel.addresses(link.index)} if expected else set()
        for ip in expected:
            if ipaddress.ip_interface(ip.address).ip not in present:
                is_whole = False
                yield Missing(f'address {ip.address} is not on "{name}"')
    if not is_moved:
        yield from _missing_routes(kernel, own, result, observed=observed, is_whole=is_whole)


def _missing_routes(
    kernel: Rtnl, own: Mapping[int, Link], result: Result, *, observed: bool, is_whole: bool
) -> Iterator[Missing]:
    """Yield the routes that the container lacks; `own`: its links; `is_whole`: it has all addresses and links."""
    tables = Tables(kernel, map(network_of, result.routes))
    absent: list[ResultRoute] = []
    for route in result.routes:
        if observed:
            is_there = any(
                item.oif in own and _gateway(item) == route.gw
                for item in tables.routes_to(route, inet.ANY_TABLE)
                if item.table == route.table
            )
        else:
            found = tables.routes_to(route, route.table or inet.ANY_TABLE)
            is_there = any(fits(route, item) for item in found if item.table != inet.TABLE_LOCAL)
        if not is_there:
            absent.append(route)
    # The kernel removes routes only with an address, and all of a link's when that goes down.
    by_pod = is_whole and all(link.is_up for link in own.values()) and all(route.is_default for route in absent)
    for route in absent:
        via = f" via {route.gw}" if route.gw and (observed or not route.is_default) else ""
        yield Missing(f"route to {route.dst}{via} is not there", by_pod)


def renamed(kernel: Rtnl, index: int, named: Link | None) -> Link | None:
    """Return the link with that index if it is another one than that of its former name. Raises OSError.

    The kernel gives an index once. `index`: 0 if it is not known.
    """
    return kernel.find_link_at(index) if index and (named is None or named.index != index) else None


def of_renamed(name: str, moved: Link, named: Link | None) -> Missing | None:
    """Return what is wrong with the link `moved`, which was `name`; nothing if it is up and another has its name."""
    if not moved.is_up:
        return Missing(f'"{moved.name}", which was "{name}", is down')
    return None if named else Missing(f'interface "{name}" is not there, its name is "{moved.name}"', by_pod=True)


def observe(kernel: Rtnl, attached: Sequence[tuple[str, Result]]) -> list[Result]:
    """Return the part of each result that the container has; each comes with the interface name of its ADD.

    Interfaces and addresses are as the kernel has them (`Attachment.observed`). The routes are all routes on an
    interface of the result: plugins move and remove routes on purpose, and the kernel makes those to the subnets. Left
    out are routes that come and go by themselves: link-local and multicast routes, and those that a router advertises.
    Raises OSError.
    """
    return [_observe(kernel, ifname, possible(result)) for ifname, result in attached]


def _observe(kernel: Rtnl, ifname: str, result: Result) -> Result:
    owner_of, known = owners(result, ifname)
    own: dict[str, Link] = {}
    present: dict[str, dict[str, str]] = {}
    for name in known:
        if (link := kernel.find_link(name)) is not None:
            own[name] = link
            present[name] = {str(item.address.ip): str(item.address) for item in kernel.addresses(link.index)}
    interfaces = [
        replace(item, mac=link.mac, mtu=link.mtu, index=link.index)
        for item in result.interfaces
        if item.sandbox and (link := own.get(item.name)) is not None
    ]
    at = {item.name: index for index, item in enumerate(interfaces)}
    ips = tuple(
        # By name, so that the address keeps its interface without those of the host.
        IpConfig(present[owner][ip.ip], ip.gateway, at.get(owner))
        for ip, owner in owner_of.items()
        if owner in own and ip.ip in present[owner]
    )
    addresses = [ipaddress.ip_interface(ip.address) for ip in ips]
    routes = tuple(
        ResultRoute(str(item.dst.network), _gateway(item), table=item.table)
        for family in (socket.AF_INET, socket.AF_INET6)
        for link in own.values()
        for item in kernel.routes(family, inet.ANY_TABLE, oif=link.index)
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
    inside = {index: item.name for index, item in enumerate(result.interfaces) if item.sandbox and item.name}
    # Before CNI 0.3.0 a result names no interface: its addresses are on the interface of the call.
    is_own = ifname in inside.values() or not result.interfaces
    default = ifname if is_own else next(reversed(inside.values()), "")
    owner_of = {
        ip: default if ip.interface is None or ip.interface < 0 else inside.get(ip.interface, "") for ip in result.ips
    }
    return owner_of, list(dict.fromkeys((*inside.values(), *filter(None, owner_of.values()))))
