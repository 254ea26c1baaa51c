"""Compare the kernel with the recorded result of an ADD, and bring it back: what the built-ins share.

More addresses, routes and links than recorded are no difference, and no repair removes any. A repair looks up what it
changes, so that it can follow others of its list; it can be repeated.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from msgspec import structs

from multus_daemon.kernel import expected, inet
from multus_daemon.kernel import netns as namespaces
from multus_daemon.kernel.inet import IpInterface
from multus_daemon.kernel.links import Link, Rtnl
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import interfaces, veth
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.interfaces import Change, step
from multus_daemon.plugins.plugin import BY_POD, Difference
from multus_daemon.spec.cni.result import Interface, IpConfig, Result

VETH_MTU = 1500
"""Bytes, of a pair without a configured MTU."""


def recorded(call: Call, ifname: str = "") -> tuple[Result, Interface]:
    """Return the recorded result with the addresses of the call's interface only, and the entry of the interface.

    Before CNI 0.3.0 a result has no interfaces: the entry is without a MAC address then. See also `interfaces.as_left`.
    """
    result, ifname = expected.possible(call.prev_result or Result()), ifname or call.invocation.ifname
    entry = next((item for item in result.interfaces if item.sandbox and item.name == ifname), None)
    owners, _ = expected.owners(result, ifname)
    left = {ip.ip: ip.address for ip in (call.invocation.observed or Result()).ips}
    own = tuple([structs.replace(ip, address=left.get(ip.ip, ip.address)) for ip in result.ips if owners[ip] == ifname])
    entry = entry or Interface(ifname, sandbox=call.invocation.netns)
    return structs.replace(result, ips=own), interfaces.as_left(call, entry)


# --- links -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pair:
    """The ends of a veth pair that are there. Without one, `difference` says why.

    An end that the pod has renamed is its own, and is left out; if that is well, there is no difference.
    """

    pod: Link | None = None
    host: Link | None = None
    difference: Difference | None = None


def pair(netns: PodNetns, own: Interface, host: Interface | None, remake: Callable[[], object]) -> Pair:
    """Look for both ends of a pair; `own`, `host`: the recorded ends; `remake` makes a new pair."""
    ifname = own.name
    with step(f'look for "{ifname}"'):
        pod = netns.pod.find_link(ifname)
        named = netns.host.find_link(host.name) if host else None
        moved = interfaces.find_renamed(netns, own, pod, [host] if host else [])
        if moved is not None:
            end = named if named and interfaces.is_pair(named, moved) else _other_end(netns, moved)
            return Pair(host=end, difference=of_renamed(ifname, moved, pod))
        if pod is None:
            text = f'interface "{ifname}" is not there'
            if host and named and (named.kind, named.mac) == ("veth", host.mac.lower()):
                text += f': the other end of "{host.name}" is in another namespace'
                return Pair(host=named, difference=Difference(text))
            return Pair(difference=Difference(text, remake))
        if wrong := wrong_kind(pod, "veth"):
            return Pair(difference=wrong)
        if named and interfaces.is_pair(named, pod):
            return Pair(pod, named)
        # Its name was taken when the pair was made anew, or it was renamed.
        other = _other_end(netns, pod)
        if other and (host is None or other.mac == host.mac.lower()):
            return Pair(pod, other)
    return Pair(pod, None, Difference(f'the other end of "{ifname}" is not on the host', on_host=True))


def _other_end(netns: PodNetns, pod: Link) -> Link | None:
    other = netns.host.find_link_at(pod.peer or pod.index)
    return other if other and interfaces.is_pair(other, pod) else None


def of_renamed(ifname: str, moved: Link, named: Link | None) -> Difference | None:
    """Return what is wrong with a link that the pod has renamed (`expected.of_renamed`)."""
    problem = expected.of_renamed(ifname, moved, named)
    return Difference(problem.text + (BY_POD if problem.by_pod else ""), by_pod=problem.by_pod) if problem else None


def wrong_kind(link: Link, kind: str) -> Difference | None:
    """Return the difference of a link that belongs to somebody else: it has our name, and is of another kind."""
    if link.kind == kind:
        return None
    return Difference(f'"{link.name}" is a {link.kind or "physical"} interface, not a {kind}')


def with_mac(netns: PodNetns, entry: Interface, kind: str) -> Link | None:
    """Return the pod's link with the recorded MAC address: results before CNI 1.0.0 have no index. Raises OSError."""
    for _, name in socket.if_nameindex() if entry.mac else ():
        found = netns.pod.find_link(name)
        if found and (found.kind, found.mac) == (kind, entry.mac):
            return found
    return None


def link(
    kernel: Rtnl, found: Link, *, mac: str = "", mtu: int = 0, up: bool = True, on_host: bool = False
) -> Iterator[Difference]:
    """Yield the differences of a link; an empty MAC address and an MTU of 0 are not compared."""
    name, index = found.name, found.index

    def difference(text: str, what: str, change: Callable[[], None]) -> Difference:
        return Difference(text, functools.partial(_do, f'{what} of "{name}"', change), on_host)

    if mac and found.mac != mac.lower():
        text = f'MAC address of "{name}" is {found.mac}, not {mac.lower()}'
        yield difference(text, "restore the MAC address", functools.partial(kernel.set_mac, index, mac))
    if mtu and found.mtu != mtu:
        text = f'MTU of "{name}" is {found.mtu}, not {mtu}'
        yield difference(text, "restore the MTU", functools.partial(kernel.set_mtu, index, mtu))
    if up and not found.is_up:
        yield difference(f'"{name}" is down', "restore the state", functools.partial(kernel.set_up, index))


def new_pair(netns: PodNetns, host: Interface | None) -> veth.Pair:
    """Return a pair to be made, with the recorded name of the host's end if that is free. Raises InternalError."""
    if host is None:
        return veth.Pair()
    with step(f'look for "{host.name}"'):
        # If the creation failed, its undo would remove the link of somebody else.
        return veth.Pair("" if netns.host.find_link(host.name) else host.name)


def set_mac(netns: PodNetns, host: Link, recorded: Interface | None) -> None:
    """Give the host's end of a new pair the recorded MAC address, by which a DEL knows it. Raises InternalError."""
    if recorded and recorded.mac:
        with step(f'set the MAC address of "{host.name}"'):
            netns.host.set_mac(host.index, recorded.mac)


def _do(what: str, change: Callable[[], None]) -> None:
    with step(what):
        change()


# --- addresses and routes --------------------------------------------------------------------------------------------


def pod(
    call: Call, netns: PodNetns, found: Link, own: Interface, added: Sequence[Change], *, mtu: int, up: bool = True
) -> Iterator[Difference]:
    """Yield the differences of the pod's link; `added`: the changes that gave it its addresses and routes."""
    left_out = call.not_compared
    # A port has MAC address and MTU of its bond.
    mtu = 0 if "mtu" in left_out or found.master else mtu and (own.mtu or mtu)
    yield from link(netns.pod, found, mac="" if found.master else own.mac, mtu=mtu, up=up)
    if "addresses" not in left_out:
        yield from missing(netns, found, _left(call, added))


def _left(call: Call, added: Sequence[Change]) -> Sequence[Change]:
    """Return the changes without those that add what another network of the pod has taken away on purpose."""
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
    """Return the changes that add the recorded addresses and routes, and the routes which come with an address."""
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
    """Yield the addresses and routes that the changes `added` and the link lacks.

    A change that adds nothing belongs to the addition behind it.
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
        text = _missing(item, found.name) + (BY_POD if by_pod else "")
        yield Difference(text, repair, on_host, by_pod=by_pod)


def _missing(item: inet.Route | IpInterface, ifname: str) -> str:
    if isinstance(item, inet.Route):
        via = f" via {item.gateway}" if item.gateway else ""
        table = f" table {item.table}" if item.table != inet.TABLE_MAIN else ""
        return f'route to {item.dst.network}{via}{table} is not on "{ifname}"'
    return f'address {item} is not on "{ifname}"'


def _key(item: inet.Route | IpInterface) -> object:
    """Return a key that is equal for an expected address or route and the kernel's."""
    if isinstance(item, inet.Route):
        return item.dst.network, item.gateway, item.table, inet.metric(item), item.source
    return item


def _present(kernel: Rtnl, found: Link, added: Sequence[Change]) -> set[object]:
    """Read the addresses of the link once, and each routing table that has one of the routes. Raises OSError."""
    routes = [change.adds for change in added if isinstance(change.adds, inet.Route)]
    present: set[object] = set()
    if any(change.adds is not None and not isinstance(change.adds, inet.Route) for change in added):
        present.update(item.address for item in kernel.addresses(found.index))
    for version, table in {(route.dst.version, route.table) for route in routes}:
        to = {(route.dst.network.prefixlen, route.dst.network.network_address.packed) for route in routes}
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        for route in kernel.routes(family, table, oif=found.index, to=to):
            # One that is expected without a source may have any.
            present.update((_key(route), _key(dataclasses.replace(route, source=None))))
    return present


def _add(netns: PodNetns, kernel: Rtnl, ifname: str, changes: Sequence[Change]) -> None:
    """Make the changes. A repair before this one may have brought back what they add."""
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
    """Yield the difference of a sysctl of the thread's namespace. Raises OSError, UnicodeDecodeError."""
    value = namespaces.read_sysctl(*parts)
    if _fields(value) != _fields(wanted):
        yield Difference(f"sysctl net.{'.'.join(parts)} is {value}, not {wanted}", repair, on_host)


def _fields(value: str) -> list[int | str]:
    """Return the fields of a sysctl; the kernel shows a number that was written in another base in decimal."""
    fields: list[int | str] = []
    for text in value.split():
        try:
            fields.append(int(text, 0))
        except ValueError:
            fields.append(text)
    return fields


def forwarding(netns: PodNetns, ips: Sequence[IpConfig]) -> Iterator[Difference]:
    """Yield what keeps the host from forwarding the families of `ips`."""
    for is_ipv4, parts in ((True, ("ipv4", "ip_forward")), (False, ("ipv6", "conf", "all", "forwarding"))):
        of_family = [ip for ip in ips if ip.is_ipv4 is is_ipv4]
        if of_family:
            with netns.on_host(), step("read whether the host forwards"):
                yield from sysctl(parts, "1", functools.partial(_forward, netns, of_family), on_host=True)


def _forward(netns: PodNetns, ips: Sequence[IpConfig]) -> None:
    # A repair of this request may have enabled it before.
    netns.forwarded -= {ip.is_ipv4 for ip in ips}
    interfaces.enable_forwarding(netns, ips)
