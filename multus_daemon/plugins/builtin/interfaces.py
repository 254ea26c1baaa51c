"""Addresses and routes of a pod's interface: set them in ADD, compare them in CHECK (plugins `pkg/ipam`, `pkg/ip`).

Functions that take a `PodNetns` run in its thread. They raise a CniError that names the failed step, the interface and
the kernel's message.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from multus_daemon import deadlines
from multus_daemon.kernel import inet, links
from multus_daemon.kernel import netns as namespaces
from multus_daemon.kernel.expected import Tables, fits, network_of, of_renamed, possible, renamed
from multus_daemon.kernel.inet import IpInterface
from multus_daemon.kernel.links import OPERSTATE_UP, Link, Rtnl
from multus_daemon.kernel.netns import NamespaceError
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.kernel.transport import Request
from multus_daemon.plugins.builtin import configuration
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.runtime import deadline
from multus_daemon.spec.cni.errors import CniError, InternalError, InvalidNetnsError, InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Interface, IpConfig, Result
from multus_daemon.spec.cni.result import Route as ResultRoute

log = logging.getLogger(__name__)

_SETTLE_POLL_SECONDS: Final = 0.05
_SCOPE_MAX: Final = 255


@contextlib.contextmanager
def located(call: Call) -> Iterator[None]:
    """Add the interface to CniErrors of the block; a NamespaceError becomes an InvalidNetnsError."""
    try:
        yield
    except NamespaceError as error:
        raise InvalidNetnsError(f'failed to open netns "{error.filename}": {error.strerror}') from error
    except CniError as error:
        raise error.with_context(f'interface "{call.invocation.ifname}"') from error


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Turn an OSError of the block into an InternalError: `failed to <what>: <the kernel's message>`."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise InternalError(f"failed to {what}: {error.strerror or error}{where}") from error


@contextlib.contextmanager
def ignoring_absent_link() -> Iterator[None]:
    """End the block without an error where a link does not exist."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise


@contextlib.contextmanager
def ignoring_absent_netns() -> Iterator[None]:
    """End the block without an error where the pod's namespace does not exist."""
    try:
        yield
    except InvalidNetnsError as error:
        if not (isinstance(error.__cause__, NamespaceError) and error.__cause__.is_absent):
            raise


def try_sysctl(*parts: str, value: str) -> None:
    """Write a sysctl, ignore an error: its file is absent without IPv6, and can't be written if /proc is read-only."""
    with contextlib.suppress(OSError):
        namespaces.write_sysctl(*parts, value=value)


@dataclass(frozen=True, slots=True)
class Change:
    """A request to the kernel, with its name for messages: `failed to <what>`."""

    what: str
    request: Request
    tolerated: int = 0
    """The errno that is not an error."""
    adds: inet.Route | IpInterface | None = None
    """The route or address that it adds; None for any other change."""


def apply(kernel: Rtnl, changes: Sequence[Change]) -> None:
    """Send `changes` to the kernel at once, in order. Raises InternalError for the first one that it refuses.

    NB: the kernel also makes the changes behind a refused one, so the caller must undo all of them.
    """
    with step("make changes"):
        errors = kernel.batch([change.request for change in changes])
    for position, error in sorted(errors.items()):
        if error.errno != changes[position].tolerated:
            with step(changes[position].what):
                raise error


def require_absent(call: Call, netns: PodNetns, *, kind: str) -> None:
    """Raise InternalError if the interface exists already, InvalidNetnsError if the namespace can't be entered.

    `kind`: the kind of link that the plugin makes, for the message.
    """
    ifname = call.invocation.ifname
    if ifname in netns.absent:
        # The engine has looked in this request. The kernel refuses a name that was taken since.
        return
    with located(call), netns.inside():
        with step("look for the interface"):
            present = netns.pod.find_link(ifname)
        if present is not None:
            raise InternalError(
                f'container {kind} name ("{ifname}") already exists',
                "an earlier ADD of this container was not followed by DEL, or two networks ask for the same name",
            )


# --- ADD -------------------------------------------------------------------------------------------------------------


def bring_up(netns: PodNetns, link: Link, result: Result, routes: Sequence[Change], *, dad: bool = True) -> None:
    """Give the link the addresses of `result`, bring it up, wait for duplicate address detection, add the routes.

    Addresses come first, so that the link is never up without them. Without `dad` there is no detection of IPv6
    duplicates. If nothing has to be waited for, all changes are one datagram.
    """
    changes = addresses(link, result.ips, dad=dad)
    if any(not ip.is_ipv4 for ip in result.ips):
        with netns.inside():
            enable_ipv6(link.name)
    changes.append(Change(f'set "{link.name}" up', links.set_up(link.index)))
    if dad and any(":" in ip.gateway for ip in result.ips):
        apply(netns.pod, changes)
        _settle(netns, link)
        apply(netns.pod, routes)
    else:
        apply(netns.pod, [*changes, *routes])


def made(call: Call, link: Link) -> Interface:
    """Return the entry of the pod's link in the result."""
    return Interface(link.name, link.mac, sandbox=call.invocation.netns, index=link.index)


def addresses(link: Link, ips: Sequence[IpConfig], *, dad: bool = True) -> list[Change]:
    """Return the changes that add the addresses to the link; `dad` as for `bring_up`."""
    changes = []
    for ip in ips:
        address = inet.interface_of(ip.address)
        request = inet.add_address(link.index, address, dad=dad)
        changes.append(Change(f'add IP address {ip.address} to "{link.name}"', request, adds=address))
    return changes


def enable_ipv6(ifname: str) -> None:
    """Enable IPv6 on `lo` and `ifname`, and keep addresses when the link goes down. Call it in the pod's namespace."""
    for name in ("lo", ifname):
        try:
            disabled = namespaces.read_sysctl("ipv6", "conf", name, "disable_ipv6")
        except OSError as error:
            log.warning("cannot read whether IPv6 is disabled, trying without: %s", error)
            continue
        if disabled != "0":
            with step(f'enable IPv6 on "{name}"'):
                namespaces.write_sysctl("ipv6", "conf", name, "disable_ipv6", value="0")
    with step(f'keep the IPv6 addresses of "{ifname}" while it is down'):
        namespaces.write_sysctl("ipv6", "conf", ifname, "keep_addr_on_down", value="1")


def _settle(netns: PodNetns, link: Link) -> None:
    """Wait until no IPv6 address is tentative: the kernel refuses a tentative address as the source of a route."""
    end = time.monotonic() + deadlines.ADDRESSES_SECONDS
    while True:
        with step(f'read the IPv6 addresses of "{link.name}"'):
            present = netns.pod.addresses(link.index, socket.AF_INET6)
        for item in present:
            if item.is_duplicate:
                raise InternalError(
                    f'IPv6 address {item.address} of "{link.name}" is in use elsewhere (duplicate address detected)'
                )
        if not any(item.is_tentative for item in present):
            return
        if time.monotonic() >= end:
            break
        deadline.pause(_SETTLE_POLL_SECONDS)
    with step(f'read the state of "{link.name}"'):
        operstate = netns.pod.link(link.name).operstate
    # Without a carrier the detection never runs; then the kernel accepts or refuses the routes.
    if operstate == OPERSTATE_UP:
        raise InternalError(
            f"link {link.name} still has tentative addresses after {deadlines.ADDRESSES_SECONDS:g} seconds"
        )


def routes(link: Link, result: Result) -> list[Change]:
    """Return the changes that add the routes of `result` in their order.

    A route without a gateway goes through the first gateway of its family. `mtu` and `advmss` are not applied, as with
    the reference plugins. Raises InvalidNetworkConfigError for a number that the kernel does not accept.
    """
    gateways: dict[bool, str] = {}
    for ip in result.ips:
        if ip.gateway:
            gateways.setdefault(":" not in ip.gateway, ip.gateway)
    changes = []
    for route in result.routes:
        gateway = route.gw or gateways.get(route.is_ipv4, "")
        configuration.in_range("routes: priority", route.priority, configuration.UNSIGNED_MAX)
        configuration.in_range("routes: table", route.table or 0, configuration.UNSIGNED_MAX)
        configuration.in_range("routes: scope", route.scope or 0, _SCOPE_MAX)
        wanted = inet.Route(
            dst=inet.interface_of(route.dst),
            oif=link.index,
            gateway=inet.address_of(gateway) if gateway else None,
            scope=route.scope or inet.SCOPE_GLOBAL,
            table=route.table or inet.TABLE_MAIN,
            priority=route.priority,
        )
        # Without EXCL: several default routes of one priority become one route with several next hops.
        request = inet.add_route(wanted, exclusive=False)
        changes.append(Change(f"add route '{_described(route, gateway, link.name)}'", request, adds=wanted))
    return changes


def _described(route: ResultRoute, gateway: str, ifname: str) -> str:
    """Return a route for messages, in the syntax of `ip route`."""
    via = f" via {gateway}" if gateway else ""
    metric = f" metric {route.priority}" if route.priority else ""
    table = f" table {route.table}" if route.table else ""
    return f"{route.dst}{via} dev {ifname}{metric}{table}"


def enable_forwarding(netns: PodNetns, ips: Sequence[IpConfig]) -> None:
    """Enable forwarding on the host for the families of `ips`, once for each request."""
    missing = {ip.is_ipv4 for ip in ips} - netns.forwarded
    with netns.on_host():
        if True in missing:
            with step("enable IPv4 forwarding on the host"):
                namespaces.ensure_sysctl("ipv4", "ip_forward", value="1")
        if False in missing:
            with step("enable IPv6 forwarding on the host"):
                namespaces.ensure_sysctl("ipv6", "conf", "all", "forwarding", value="1")
    netns.forwarded |= missing


# --- CHECK -----------------------------------------------------------------------------------------------------------


def previous_result(call: Call, plugin: str) -> tuple[Result, Interface]:
    """Return what is possible of `prevResult`, and its entry for the call's interface (`as_left`).

    Raises InvalidNetworkConfigError without a prevResult, InternalError without the entry.
    """
    invocation = call.invocation
    if call.prev_result is None:
        raise InvalidNetworkConfigError(f"{plugin}: Required prevResult missing", f"network {call.name!r}")
    previous = possible(call.prev_result)
    for item in previous.interfaces:
        if item.name == invocation.ifname and item.sandbox == invocation.netns:
            return previous, as_left(call, item)
    known = ", ".join(f"{item.name} in {item.sandbox or 'the host'}" for item in previous.interfaces) or "none"
    raise InternalError(
        f'Sandbox in prevResult doesn\'t match configured netns: "{invocation.netns}"',
        f'no entry for "{invocation.ifname}"; interfaces in prevResult: {known}',
    )


def as_left(call: Call, entry: Interface) -> Interface:
    """Return the entry of the pod's interface with what the whole ADD left: other plugins may have changed it.

    Its MTU is 0 if that is what the configuration sets.
    """
    observed = call.invocation.observed or Result()
    left = next((item for item in observed.interfaces if item.name == entry.name), structs.replace(entry, mtu=0))
    return structs.replace(entry, mac=left.mac, mtu=left.mtu, index=left.index)


def is_pair(one: Link, other: Link) -> bool:
    """Report whether links of two namespaces are the ends of a pair."""
    # Kernels omit the other end's index if it is the same number.
    ends = one.peer or one.index, other.peer or other.index
    return one.kind == other.kind == "veth" and ends == (other.index, one.index)


def find_renamed(netns: PodNetns, entry: Interface, named: Link | None, made: Iterable[Interface] = ()) -> Link | None:
    """Return the pod's link of an ADD if the pod has renamed it, as KubeVirt does. Raises OSError.

    It is known by its index, or by the other end of its pair on the host. `named`: the link that has its name now;
    `made`: the interfaces of the ADD.
    """
    if (moved := renamed(netns.pod, entry.index, named)) is not None:
        return moved
    if named is not None and named.index == entry.index:
        return None
    for item in made:
        end = netns.host.find_link(item.name) if item.name and not item.sandbox else None
        if end is not None and end.kind == "veth" and not (named and is_pair(end, named)):
            other = netns.pod.find_link_at(end.peer or end.index)
            if other and is_pair(end, other):
                return other
    return None


def check(netns: PodNetns, expected: Interface, previous: Result, kind: str, *, gateways: bool = False) -> Link:
    """Compare the pod's link with `expected`, its addresses and routes with `previous`. Raises InternalError.

    `gateways`: each gateway of an address must have a route of its own on the link. Returns the link. If the pod has
    renamed it and has another one under its name, with the addresses, it must be up.
    """
    with step(f'find "{expected.name}"'):
        link = netns.pod.link(expected.name)
        moved = find_renamed(netns, expected, link, previous.interfaces)
    if moved is not None:
        if problem := of_renamed(expected.name, moved, link):
            raise InternalError(problem.text)
        return moved
    if link.kind != kind:
        raise InternalError(f'"{expected.name}" is not a {kind} but {link.kind or "a link without a kind"}')
    if not link.master:
        # A port has the address of its bond.
        require_mac(link, expected, f'"{expected.name}"')
    with step(f'read addresses and routes of "{link.name}"'):
        present = {item.address for item in netns.pod.addresses(link.index)}
        expected_ips = [inet.interface_of(ip.address) for ip in previous.ips]
        of_gateways = [ipaddress.ip_network(ip.gateway) for ip in previous.ips if gateways and ip.gateway]
        compared = [*(item.network for item in expected_ips), *map(network_of, previous.routes), *of_gateways]
        tables = Tables(netns.pod, compared)
        for ip, address in zip(previous.ips, expected_ips, strict=True):
            if address not in present:
                raise InternalError(f'failed to match interface "{link.name}": expected IP {ip.address} is not on it')
            if address.network not in tables.routes(ip.is_ipv4, inet.TABLE_MAIN):
                raise InternalError(f'expected a route to {address.network} for "{link.name}", and there is none')
        for route in previous.routes:
            if not any(fits(route, item) for item in tables.routes_to(route, route.table or inet.TABLE_MAIN)):
                text = _described(route, route.gw, "any")
                raise InternalError(f"expected route '{text}' was not found in the routing table")
        for gateway in of_gateways:
            there = tables.routes(gateway.version == 4, inet.TABLE_MAIN).get(gateway, ())
            if not any(route.oif == link.index for route in there):
                text = str(gateway.network_address)
                raise InternalError(f'expected a route to the gateway {text} on "{link.name}", and there is none')
    return link


def require_mac(link: Link, expected: Interface, what: str) -> None:
    """Raise InternalError if prevResult has another MAC address for the link; `what` names it."""
    if expected.mac and expected.mac.lower() != link.mac.lower():
        raise InternalError(f"{what} has MAC {link.mac}, not {expected.mac} as in prevResult")
