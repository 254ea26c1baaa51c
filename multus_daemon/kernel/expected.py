"""Compare the result of an ADD with the kernel: interfaces, addresses and routes of a container."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from multus_daemon.kernel import inet
from multus_daemon.kernel.links import Link, Rtnl
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni import names
from multus_daemon.spec.cni.result import Interface, IpConfig, Result
from multus_daemon.spec.cni.result import Route as ResultRoute


def possible(result: Result) -> Result:
    """Return the result without values that no namespace can have, such as invalid names, which some plugins report.

    An interface with an invalid name stays in the list, as addresses have its index, but without the name. MAC
    addresses are spelt as the kernel does; invalid ones are empty.
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


def missing(kernel: Rtnl, ifname: str, result: Result) -> Iterator[Difference]:
    """Yield each part of `result` that the container lacks, interface by interface, then routes. Raises OSError.

    `kernel`: a socket in the container's namespace; `ifname`: the interface of the ADD, for results that name none.
    Addresses are compared without their length. Routes are those of `observe`, each on an interface of the result:
    those that a plugin reports are not comparable, since plugins such as sbr move routes silently.

    An interface that the pod has renamed, as KubeVirt does, must be up. Its addresses and routes are then not compared.
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
            yield Difference(f'interface "{name}" is not there')
            continue
        own[link.index] = link
        expected = [ip for ip, owner in owner_of.items() if owner == name]
        present = {item.address.ip for item in kernel.addresses(link.index)} if expected else set()
        for ip in expected:
            if ipaddress.ip_interface(ip.address).ip not in present:
                is_whole = False
                yield Difference(f'address {ip.address} is not on "{name}"')
    if not is_moved and result.routes:
        yield from _missing_routes(kernel, own, result, is_whole=is_whole)


def _missing_routes(kernel: Rtnl, own: Mapping[int, Link], result: Result, *, is_whole: bool) -> Iterator[Difference]:
    """Yield the routes that the container lacks; `own`: its links; `is_whole`: it has all addresses and links."""
    # A pod's author can cause a result with thousands of routes, and a pod may have 100,000 routes of its own.
    to = {(network.prefixlen, network.network_address.packed) for network in map(network_of, result.routes)}
    present = {
        (item.dst.network, _gateway(item), item.table)
        for item in kernel.routes(table=inet.ANY_TABLE, to=to)
        if item.oif in own
    }
    absent = [route for route in result.routes if (network_of(route), route.gw, route.table) not in present]
    # The kernel removes routes only with an address, and all of a link's when that goes down.
    by_pod = is_whole and all(link.is_up for link in own.values()) and all(route.is_default for route in absent)
    for route in absent:
        via = f" via {route.gw}" if route.gw else ""
        yield Difference(f"route to {route.dst}{via} is not there", by_pod=by_pod)


def renamed(kernel: Rtnl, index: int, named: Link | None) -> Link | None:
    """Find a link that was renamed: return the link with that index, None if it is `named`. Raises OSError.

    The kernel never gives an index to another link. `index`: 0 if it is not known. `named`: the link that has the old
    name now, if one has.
    """
    return kernel.find_link(index) if index and (named is None or named.index != index) else None


def of_renamed(name: str, moved: Link, named: Link | None) -> Difference | None:
    """Return what is wrong with the link `moved`, once `name`; None if it is up and the link `named` has that name."""
    if not moved.is_up:
        return Difference(f'"{moved.name}", which was "{name}", is down')
    return None if named else Difference(f'interface "{name}" is not there, its name is "{moved.name}"', by_pod=True)


def observe(kernel: Rtnl, ifname: str, result: Result) -> Result:
    """Return what the container has of a result; `ifname`: the interface of the ADD.

    Interfaces and addresses are those of the result that the kernel has (`Attachment.observed`). Routes are all that
    the kernel has on these interfaces, in the result or not: plugins move and remove routes on purpose, and the kernel
    makes those to the subnets. Left out are routes that come and go by themselves: link-local and multicast routes, and
    those that a router advertises. Raises OSError.
    """
    result = possible(result)
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
        for link in own.values()
        for item in kernel.routes(table=inet.ANY_TABLE, oif=link.index)
        if _stays(item, addresses)
    )
    return Result(tuple(interfaces), ips, routes)


def _stays(route: inet.Route, addresses: Sequence[inet.IpInterface]) -> bool:
    """Return True for a route that stays until a program removes it. `addresses`: those of its interface."""
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


def owners(result: Result, ifname: str) -> tuple[dict[IpConfig, str], list[str]]:
    """Return the container's interface of each address (empty for an address on the host), and all its interfaces."""
    inside = {index: item.name for index, item in enumerate(result.interfaces) if item.sandbox and item.name}
    # Before CNI 0.3.0 a result names no interface: its addresses are on the interface of the call.
    is_own = ifname in inside.values() or not result.interfaces
    default = ifname if is_own else next(reversed(inside.values()), "")
    owner_of = {
        ip: default if ip.interface is None or ip.interface < 0 else inside.get(ip.interface, "") for ip in result.ips
    }
    return owner_of, list(dict.fromkeys((*inside.values(), *filter(None, owner_of.values()))))
