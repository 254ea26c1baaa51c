"""Set addresses and routes of a pod's interface in ADD, and find the interface later (plugins `pkg/ipam`, `pkg/ip`).

Functions that take a `PodNetns` run in its thread. Their CniErrors name failed step, interface and the kernel's error.
"""

from __future__ import annotations

import contextlib
import errno
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
from multus_daemon.kernel.expected import renamed
from multus_daemon.kernel.inet import IpInterface
from multus_daemon.kernel.kinds import TAP_KIND
from multus_daemon.kernel.links import OPERSTATE_UP, Link, Rtnl
from multus_daemon.kernel.netns import NamespaceError
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.kernel.transport import Request
from multus_daemon.plugins.builtin import contract
from multus_daemon.plugins.builtin.contract import AddressTakenError, Call
from multus_daemon.runtime import deadline
from multus_daemon.spec.cni.errors import ASK_INTERFACE, CniError, InternalError, InvalidNetnsError, Origin
from multus_daemon.spec.cni.result import Interface, IpConfig, Result
from multus_daemon.spec.cni.result import Route as ResultRoute

log = logging.getLogger(__name__)

FORWARDING: Final = {True: ("ipv4", "ip_forward"), False: ("ipv6", "conf", "all", "forwarding")}
"""Sysctls that enable forwarding, by address family: True for IPv4."""
_SETTLE_POLL_SECONDS: Final = 0.05
_REFUSED: Final = (errno.EINVAL, errno.ERANGE, errno.EADDRNOTAVAIL, errno.ENETUNREACH, errno.EHOSTUNREACH)
_ABSENT: Final = (errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.ENOTDIR)
_SCOPE_MAX: Final = 255


@contextlib.contextmanager
def located(call: Call) -> Iterator[None]:
    """Add the interface's name to CniErrors of the block; turn a NamespaceError into an InvalidNetnsError."""
    try:
        yield
    except NamespaceError as error:
        raise InvalidNetnsError(f'failed to open netns "{error.filename}": {error.strerror}') from error
    except CniError as error:
        raise error.with_context(f'interface "{call.invocation.ifname}"') from error


@contextlib.contextmanager
def step(what: str, *, asked: bool = False) -> Iterator[None]:
    """Turn an OSError of the block into an InternalError: `failed to <what>: <the kernel's message>`.

    The error's origin is the network's configuration if the kernel refuses a value, or (`asked`) does not find a thing
    that the configuration names.
    """
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        is_theirs = error.errno in _REFUSED or (asked and error.errno in _ABSENT)
        origin = Origin.NETWORK if is_theirs else None
        raise InternalError(f"failed to {what}: {error.strerror or error}{where}", origin=origin) from error


@contextlib.contextmanager
def ignoring_absent_netns() -> Iterator[None]:
    """End the block without an error if the pod's namespace does not exist."""
    try:
        yield
    except InvalidNetnsError as error:
        if not (isinstance(error.__cause__, NamespaceError) and error.__cause__.is_absent):
            raise


def try_sysctl(*parts: str, value: str) -> None:
    """Write a sysctl, and ignore errors: without IPv6 it does not exist, and /proc may be read-only."""
    with contextlib.suppress(OSError):
        namespaces.write_sysctl(*parts, value=value)


@dataclass(frozen=True, slots=True)
class Change:
    """A request to the kernel, with its description for messages: `failed to <what>`."""

    what: str
    request: Request
    tolerated: int = 0
    """An errno of the request that is ignored; 0: none."""
    adds: inet.Route | IpInterface | None = None
    """The route or address that the request adds; None for another request."""


def apply(kernel: Rtnl, changes: Sequence[Change]) -> None:
    """Send `changes` to the kernel in one batch, in order. Raises InternalError for the first one that it refuses.

    NB: the kernel also makes the changes after a refused one, so the caller must undo all of them.
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
                remedy=ASK_INTERFACE,
                origin=Origin.ANNOTATION,
            )


# --- ADD -------------------------------------------------------------------------------------------------------------


def bring_up(netns: PodNetns, link: Link, result: Result, routes: Sequence[Change], *, dad: bool = True) -> None:
    """Give the link the addresses of `result`, bring it up, wait for duplicate address detection, add the routes.

    Addresses come first, so that the link is never up without them. `dad`: run duplicate address detection for IPv6. If
    that is not needed, all changes are one batch.
    """
    changes = addresses(link, result.ips, dad=dad)
    if any(not ip.is_ipv4 for ip in result.ips):
        with netns.inside():
            enable_ipv6(link.name)
    changes.append(Change(f'set "{link.name}" up', links.change(link.index, up=True)))
    # A tap has no carrier before a program opens it: the detection does not begin.
    if dad and link.kind != TAP_KIND and any(":" in ip.gateway for ip in result.ips):
        apply(netns.pod, changes)
        _settle(netns, link)
        apply(netns.pod, routes)
    else:
        apply(netns.pod, [*changes, *routes])


def made(call: Call, link: Link) -> Interface:
    """Return the result's entry of the pod's link."""
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
    """Enable IPv6 on `lo` and `ifname`, and `keep_addr_on_down`. Call it in the pod's namespace."""
    for name in ("lo", ifname):
        try:
            disabled = namespaces.read_sysctl("ipv6", "conf", name, "disable_ipv6")
        except OSError as error:
            log.warning("cannot read whether IPv6 is disabled, so it is not enabled: %s", error)
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
                raise AddressTakenError(
                    f'IPv6 address {item.address} of "{link.name}" is in use elsewhere (duplicate address detected)',
                    remedy="remove the address from the other machine, or exclude it from the network's range",
                    address=str(item.address.ip),
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
            f"link {link.name} still has tentative addresses after {deadlines.ADDRESSES_SECONDS:g} seconds",
            remedy="check that the link of the network is up and lets IPv6 neighbour discovery through",
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
        contract.in_range("routes: priority", route.priority, contract.UNSIGNED_MAX)
        contract.in_range("routes: table", route.table or 0, contract.UNSIGNED_MAX)
        contract.in_range("routes: scope", route.scope or 0, _SCOPE_MAX)
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
    """Enable forwarding on the host for the address families of `ips`, once for each request."""
    missing = {ip.is_ipv4 for ip in ips} - netns.forwarded
    with netns.on_host(), step("enable forwarding on the host"):
        for is_ipv4 in missing:
            namespaces.ensure_sysctl(*FORWARDING[is_ipv4], value="1")
    netns.forwarded |= missing


# --- the recorded interface ------------------------------------------------------------------------------------------


def as_left(call: Call, entry: Interface) -> Interface:
    """Return the entry of the pod's interface as it was after the whole ADD: other plugins may have changed it.

    Its MTU is 0 if the configuration sets the MTU.
    """
    observed = call.invocation.observed or Result()
    left = next((item for item in observed.interfaces if item.name == entry.name), structs.replace(entry, mtu=0))
    return structs.replace(entry, mac=left.mac, mtu=left.mtu, index=left.index)


def is_pair(one: Link, other: Link) -> bool:
    """Return True if two links, of different namespaces, are the ends of a veth pair."""
    # Kernels omit the other end's index if it is the same number.
    ends = one.peer or one.index, other.peer or other.index
    return one.kind == other.kind == "veth" and ends == (other.index, one.index)


def find_renamed(netns: PodNetns, entry: Interface, named: Link | None, made: Iterable[Interface] = ()) -> Link | None:
    """Return the pod's link if the pod has renamed it, as KubeVirt does; else None. Raises OSError.

    It is found by its index, or by the veth's other end on the host. `entry`: its entry in the result; `named`: the
    link that has its old name now; `made`: the interfaces in the result.
    """
    if (moved := renamed(netns.pod, entry.index, named)) is not None:
        return moved
    if named is not None and named.index == entry.index:
        return None
    for item in made:
        end = netns.host.find_link(item.name) if item.name and not item.sandbox else None
        if end is not None and end.kind == "veth" and not (named and is_pair(end, named)):
            other = netns.pod.find_link(end.peer or end.index)
            if other and is_pair(end, other):
                return other
    return None
