"""Whether the kernel still has what an ADD has reported: interfaces, addresses and routes of a result."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence

from multus_daemon.cni.result import Result
from multus_daemon.cni.result import Route as ResultRoute
from multus_daemon.netlink import inet
from multus_daemon.netlink.rtnl import Rtnl


def first_missing(kernel: Rtnl, ifname: str, result: Result) -> str:
    """What of `result` a container lacks, to be put into a message; empty where it has everything.

    `kernel` as the container sees it, `ifname` that of the ADD, for results that name no interface. Addresses are
    compared without their length and routes in all tables: plugins report what they have asked for, and others move
    routes to tables of their own. Raises OSError.
    """
    inside = {index: item.name for index, item in enumerate(result.interfaces) if item.sandbox}
    # As a result of before CNI 0.3.0 has it: its addresses are those of the interface of the call.
    owners = {ip: _owner(ip.interface, inside, ifname) for ip in result.ips}
    for name in dict.fromkeys((*inside.values(), *(owner for owner in owners.values() if owner))):
        link = kernel.find_link(name)
        if link is None:
            return f'interface "{name}" is not there'
        expected = [ip for ip, owner in owners.items() if owner == name]
        present = {item.address.ip for item in kernel.addresses(link.index)} if expected else set()
        for ip in expected:
            if ipaddress.ip_interface(ip.address).ip not in present:
                return f'address {ip.address} is not on "{name}"'
    tables = Tables(kernel)
    for expected_route in result.routes:
        found = tables.routes_to(expected_route, expected_route.table or inet.ANY_TABLE)
        if not any(fits(expected_route, route) for route in found if route.table != inet.TABLE_LOCAL):
            via = f" via {expected_route.gw}" if expected_route.gw and not expected_route.is_default else ""
            return f"route to {expected_route.dst}{via} is not there"
    return ""


class Tables:
    """A container's routing tables, each read once: a pod's author can make a result with thousands of routes."""

    def __init__(self, kernel: Rtnl) -> None:
        self._kernel = kernel
        self._read: dict[tuple[bool, int], dict[inet.IpNetwork, list[inet.Route]]] = {}

    def routes(self, ipv4: bool, table: int) -> Mapping[inet.IpNetwork, Sequence[inet.Route]]:
        """The routes of a table by destination. Raises OSError."""
        if (ipv4, table) not in self._read:
            found = self._read[ipv4, table] = {}
            for route in self._kernel.routes(socket.AF_INET if ipv4 else socket.AF_INET6, table):
                found.setdefault(route.dst.network, []).append(route)
        return self._read[ipv4, table]

    def routes_to(self, expected: ResultRoute, table: int) -> Sequence[inet.Route]:
        """Those of a table to the destination of the expected one. Raises OSError."""
        return self.routes(expected.is_ipv4, table).get(ipaddress.ip_interface(expected.dst).network, ())


def fits(expected: ResultRoute, found: inet.Route) -> bool:
    """Whether a route to the same destination has the expected gateway, where one is named, but for default routes."""
    return expected.is_default or not expected.gw or found.gateway == ipaddress.ip_address(expected.gw)


def _owner(index: int | None, inside: dict[int, str], ifname: str) -> str:
    """The interface in the container that an address is on; empty for one of the host's side."""
    if index is not None and index >= 0:
        return inside.get(index, "")
    return list(inside.values())[-1] if inside else ifname
