"""Compare the kernel with the recorded result of an ADD, and repair it; shared by the built-ins.

Additional addresses, routes and links are no difference, and no repair removes any. A repair reads the present state,
as earlier repairs may have changed it; it can be repeated.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

from msgspec import structs

from multus_daemon.kernel import expected, inet
from multus_daemon.kernel import netns as namespaces
from multus_daemon.kernel.inet import IpInterface
from multus_daemon.kernel.links import Link, Rtnl
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import interfaces, veth
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.interfaces import Change, step
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni.errors import ChangedError
from multus_daemon.spec.cni.result import Interface, IpConfig, Result

VETH_MTU = 1500
"""MTU in bytes of a veth pair without a configured MTU."""


def recorded(call: Call, ifname: str = "") -> tuple[Result, Interface]:
    """Return the recorded result with only the addresses of the call's interface, and the interface's entry.

    Before CNI 0.3.0 a result has no interfaces: then the entry has no MAC address. See also `interfaces.as_left`.
    """
    result, ifname = expected.possible(call.prev_result or Result()), ifname or call.invocation.ifname
    entry = next((item for item in result.interfaces if item.sandbox and item.name == ifname), None)
    owners, _ = expected.owners(result, ifname)
    left = {ip.ip: ip.address for ip in (call.invocation.observed or Result()).ips}
    own = tuple([structs.replace(ip, address=left.get(ip.ip, ip.address)) for ip in result.ips if owners[ip] == ifname])
    entry = entry or Interface(ifname, sandbox=call.invocation.netns)
    return structs.replace(result, ips=own), interfaces.as_left(call, entry)


def check(call: Call, netns: PodNetns, compare: Callable[[Call, PodNetns], Sequence[Difference]]) -> None:
    """Raise ChangedError for the first difference, except of the MTU, which a later plugin of the list may have set.

    Firewall rules are not compared, as CHECK runs no program for that.
    """
    for item in compare(dataclasses.replace(call, not_compared=frozenset({"mtu"})), netns):
        raise ChangedError(item.text)


# --- links -----------------------------------------------------------------------------------------------------------


def pair(
    netns: PodNetns, own: Interface, result: Result, remake: Callable[[], object], *, mtu: int
) -> tuple[Link | None, Link | None, list[Difference]]:
    """Find the ends of a recorded veth pair; `own`: that in the pod; `remake` makes a new pair.

    Returns the pod's and the host's end, None for one that is missing. An end that the pod has renamed is left out: it
    belongs to the pod. Then the differences: a missing end, and those of the host's end. Raises InternalError.
    """
    host = veth.host_end(result.interfaces)
    with step(f'look for "{own.name}"'):
        pod, end, problem = _ends(netns, own, host, remake)
    found = link(netns.host, end, mac=host.mac if host else "", mtu=mtu, on_host=True) if end else ()
    return pod, end, [*([problem] if problem else []), *found]


def _ends(
    netns: PodNetns, own: Interface, host: Interface | None, remake: Callable[[], object]
) -> tuple[Link | None, Link | None, Difference | None]:
    """Return the pod's and the host's end (None: missing), and a difference if one is missing. Raises OSError."""
    ifname, pod = own.name, netns.pod.find_link(own.name)
    named = netns.host.find_link(host.name) if host else None
    moved = interfaces.find_renamed(netns, own, pod, [host] if host else [])
    if moved is not None:
        end = named if named and interfaces.is_pair(named, moved) else other_end(netns, moved)
        return None, end, expected.of_renamed(ifname, moved, pod)
    if pod is None:
        text = f'interface "{ifname}" is not there'
        if host and named and (named.kind, named.mac) == ("veth", host.mac.lower()):
            elsewhere = f'{text}: the other end of "{host.name}" is in another namespace'
            return None, named, Difference(elsewhere)
        return None, None, Difference(text, remake)
    if wrong := wrong_kind(pod, "veth"):
        return None, None, wrong
    if named and interfaces.is_pair(named, pod):
        return pod, named, None
    # Its name was taken when the pair was made anew, or it was renamed.
    other = other_end(netns, pod)
    if other and (host is None or other.mac == host.mac.lower()):
        return pod, other, None
    return pod, None, Difference(f'the other end of "{ifname}" is not on the host', on_host=True)


def other_end(netns: PodNetns, pod: Link) -> Link | None:
    """Return the host's end of the veth pair whose pod's end is `pod`; None if it is gone. Raises OSError."""
    other = netns.host.find_link(pod.peer or pod.index)
    return other if other and interfaces.is_pair(other, pod) else None


def wrong_kind(link: Link, kind: str) -> Difference | None:
    """Return a difference if the link is not of `kind`: another program has made a link with this name."""
    if link.kind == kind:
        return None
    return Difference(f'"{link.name}" is a {link.kind or "physical"} interface, not a {kind}')


def with_mac(netns: PodNetns, entry: Interface, kind: str) -> Link | None:
    """Return the pod's link of `kind` with the recorded MAC address; None if there is none. Raises OSError."""
    links = netns.pod.links() if entry.mac else ()
    return next((link for link in links if (link.kind, link.mac) == (kind, entry.mac)), None)


def link(
    kernel: Rtnl, found: Link, *, mac: str = "", mtu: int = 0, up: bool = True, on_host: bool = False
) -> Iterator[Difference]:
    """Yield the differences of a link; an empty MAC address and an MTU of 0 are not compared."""
    name, index = found.name, found.index
    if mac and found.mac != mac.lower():
        text = f'MAC address of "{name}" is {found.mac}, not {mac.lower()}'
        yield Difference(text, functools.partial(kernel.change, index, mac=mac), on_host)
    if mtu and found.mtu != mtu:
        text = f'MTU of "{name}" is {found.mtu}, not {mtu}'
        yield Difference(text, functools.partial(kernel.change, index, mtu=mtu), on_host)
    if up and not found.is_up:
        yield Difference(f'"{name}" is down', functools.partial(kernel.change, index, up=True), on_host)


def new_pair(netns: PodNetns, host: Interface | None) -> veth.Pair:
    """Return the Pair for a repair: with the recorded MAC address of the host's end, and its name if that is free.

    A DEL finds the host's end by both. Raises InternalError.
    """
    if host is None:
        return veth.Pair()
    with step(f'look for "{host.name}"'):
        # If the creation failed, its undo would remove the link of somebody else.
        return veth.Pair("" if netns.host.find_link(host.name) else host.name, host.mac)


# --- addresses and routes --------------------------------------------------------------------------------------------


def pod(
    call: Call, netns: PodNetns, found: Link, own: Interface, added: Sequence[Change], *, mtu: int, up: bool = True
) -> Iterator[Difference]:
    """Yield the differences of the pod's link; `added`: the changes that add its addresses and routes."""
    left_out = call.not_compared
    # A port has MAC address and MTU of its bond.
    mtu = 0 if "mtu" in left_out or found.master else mtu and (own.mtu or mtu)
    yield from link(netns.pod, found, mac="" if found.master else own.mac, mtu=mtu, up=up)
    if "addresses" not in left_out:
        yield from missing(netns, found, _left(call, added))


def _left(call: Call, added: Sequence[Change]) -> Sequence[Change]:
    """Return the changes without those for routes that another network of the pod has replaced (`default-route`)."""
    observed = call.invocation.observed
    if observed is None:
        return added
    addresses = {inet.interface_of(ip.address).ip for ip in observed.ips}
    routes = {(expected.network_of(item), item.gw, item.table) for item in observed.routes}

    def is_left(item: inet.Route | IpInterface | None) -> bool:
        if not isinstance(item, inet.Route):
            return item is None or item.ip in addresses
        return (item.dst.network, str(item.gateway or ""), item.table) in routes

    return [change for change in added if is_left(change.adds)]


def changes(found: Link, result: Result) -> list[Change]:
    """Return the changes that add the recorded addresses and routes, and the routes that the kernel adds with these."""
    addresses = interfaces.addresses(found, result.ips)
    return [*addresses, *_subnets(found, result.ips), *interfaces.routes(found, result)]


def _subnets(found: Link, ips: Sequence[IpConfig]) -> list[Change]:
    made: dict[inet.IpNetwork, Change] = {}
    for ip in ips:
        address = inet.interface_of(ip.address)
        network = address.network
        if network.prefixlen < network.max_prefixlen and network not in made:
            route = inet.connected(address, found.index)
            # Another address of the subnet may have become its source.
            adds = dataclasses.replace(route, source=None)
            made[network] = Change(f"add route '{network} dev {found.name}'", inet.add_route(route), adds=adds)
    return list(made.values())


def missing(netns: PodNetns, found: Link, added: Sequence[Change], *, on_host: bool = False) -> Iterator[Difference]:
    """Yield a difference for each address or route of `added` that the link lacks.

    A change in `added` that adds neither is part of the repair of the next one.
    """
    kernel = netns.host if on_host else netns.pod
    with step(f'read addresses and routes of "{found.name}"'):
        present = _present(kernel, found, added)
    before: list[Change] = []
    absent: list[tuple[inet.Route | IpInterface, Callable[[], object]]] = []
    for change in added:
        if change.adds is None:
            before.append(change)
            continue
        if _key(change.adds) not in present:
            absent.append((change.adds, functools.partial(_add, netns, kernel, found.name, (*before, change))))
        before = []
    # The kernel removes routes only with an address, and all of a link's when that goes down.
    is_default = all(isinstance(item, inet.Route) and not item.dst.network.prefixlen for item, _ in absent)
    by_pod = is_default and found.is_up and not on_host
    for item, repair in absent:
        yield Difference(_missing(item, found.name), repair, on_host, by_pod=by_pod)


def _missing(item: inet.Route | IpInterface, ifname: str) -> str:
    if isinstance(item, inet.Route):
        via = f" via {item.gateway}" if item.gateway else ""
        table = f" table {item.table}" if item.table != inet.TABLE_MAIN else ""
        return f'route to {item.dst.network}{via}{table} is not on "{ifname}"'
    return f'address {item} is not on "{ifname}"'


def _key(item: inet.Route | IpInterface) -> object:
    """Return a key that is equal for an expected address or route and the same one of the kernel."""
    if isinstance(item, inet.Route):
        # A route to a subnet may be another plugin's instead of the kernel's, with another metric.
        metric = None if item.protocol == inet.PROTOCOL_KERNEL else inet.metric(item)
        return item.dst.network, item.gateway, item.table, metric, item.source
    return item


def _present(kernel: Rtnl, found: Link, added: Sequence[Change]) -> set[object]:
    routes = [change.adds for change in added if isinstance(change.adds, inet.Route)]
    present: set[object] = set()
    if any(change.adds is not None and not isinstance(change.adds, inet.Route) for change in added):
        present.update(item.address for item in kernel.addresses(found.index))
    to = {(route.dst.network.prefixlen, route.dst.network.network_address.packed) for route in routes}
    for table in {route.table for route in routes}:
        for route in kernel.routes(table=table, oif=found.index, to=to):
            # One that is expected without a source may have any.
            for source, protocol in itertools.product((route.source, None), (0, inet.PROTOCOL_KERNEL)):
                present.add(_key(dataclasses.replace(route, source=source, protocol=protocol)))
    return present


def _add(netns: PodNetns, kernel: Rtnl, ifname: str, changes: Sequence[Change]) -> None:
    """Make the changes, and ignore additions that an earlier repair has made already."""
    added = changes[-1].adds
    if kernel is not netns.host and not isinstance(added, inet.Route | None) and added.version == 6:
        with netns.inside():
            interfaces.enable_ipv6(ifname)
    before = list(changes[:-1])
    if isinstance(added, inet.Route) and added.source and added.dst.version == 6:
        # IPv6 routes lose their source with the address and stay, and are not replaced.
        request = inet.delete_route(dataclasses.replace(added, source=None))
        before.append(Change(f"delete route to {added.dst} without its source", request, tolerated=errno.ESRCH))
    interfaces.apply(kernel, [*before, dataclasses.replace(changes[-1], tolerated=errno.EEXIST)])


# --- sysctls ---------------------------------------------------------------------------------------------------------


def sysctl(
    parts: tuple[str, ...], wanted: str, repair: Callable[[], object], *, on_host: bool = False
) -> Iterator[Difference]:
    """Yield a difference if a sysctl of the thread's namespace is not `wanted`. Raises OSError, UnicodeDecodeError."""
    value = namespaces.read_sysctl(*parts)
    if _fields(value) != _fields(wanted):
        yield Difference(f"sysctl net.{'.'.join(parts)} is {value}, not {wanted}", repair, on_host)


def _fields(value: str) -> list[int | str]:
    """Return the fields of a sysctl's value, numbers as int: the kernel shows them in decimal."""
    fields: list[int | str] = []
    for text in value.split():
        try:
            fields.append(int(text, 0))
        except ValueError:
            fields.append(text)
    return fields


def forwarding(netns: PodNetns, ips: Sequence[IpConfig]) -> Iterator[Difference]:
    """Yield a difference if the host does not forward an address family of `ips`."""
    families = {ip.is_ipv4 for ip in ips}
    for is_ipv4, parts in interfaces.FORWARDING.items():
        if is_ipv4 in families:
            with netns.on_host(), step("read whether the host forwards"):
                enable = functools.partial(interfaces.enable_forwarding, netns, ips)
                yield from sysctl(parts, "1", enable, on_host=True)
