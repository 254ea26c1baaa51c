"""What plugins that make an interface have in common: entering the pod, addresses, routes (plugins `pkg/ipam`).

The functions that take a `Session` run in its thread. They raise CniError; each names the step that failed, the
interface and what the kernel said.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from multus_daemon import deadlines
from multus_daemon.kernel import inet, links, sysctl
from multus_daemon.kernel.inet import IpAddress
from multus_daemon.kernel.links import OPERSTATE_UP, Link, Rtnl
from multus_daemon.kernel.netns import NamespaceError
from multus_daemon.kernel.ops import Session
from multus_daemon.kernel.transport import Request
from multus_daemon.plugins.builtin import configuration
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.runtime import deadline
from multus_daemon.spec.cni.errors import CniError, InternalError, InvalidNetnsError
from multus_daemon.spec.cni.result import IpConfig, Result
from multus_daemon.spec.cni.result import Route as ResultRoute

log = logging.getLogger(__name__)

_SETTLE_POLL_SECONDS: Final = 0.05
_SCOPE_MAX: Final = 255


@contextlib.contextmanager
def inside(call: Call, session: Session) -> Iterator[None]:
    """The thread is in the pod's namespace for the block. Raises InvalidNetnsError (8); place added to CniErrors."""
    with _place_added(call), session.inside():
        yield


@contextlib.contextmanager
def reached(call: Call, session: Session) -> Iterator[None]:
    """As `inside`, for what needs only the sockets of `session`: the thread stays where it is."""
    with _place_added(call):
        session.require()
        yield


class _place_added:  # noqa: N801  as `step`
    """Turn a NamespaceError of the block into an InvalidNetnsError, and add the place to a CniError."""

    __slots__ = ("_place",)

    def __init__(self, call: Call) -> None:
        self._place = call.invocation

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, NamespaceError):
            raise InvalidNetnsError(f'failed to open netns "{error.filename}": {error.strerror}') from error
        if isinstance(error, CniError):
            place = self._place
            raise error.with_context(f'interface "{place.ifname}" in netns "{place.netns}"') from error


class step:  # noqa: N801  a class, as a generator takes four times as long, and there are ten of them to an ADD
    """Turn what the kernel refuses in the block into an InternalError: `failed to <what>: <the kernel's words>`."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError):
            where = f" ({error.filename})" if error.filename else ""
            raise InternalError(f"failed to {self._what}: {error.strerror or error}{where}") from error


@dataclass(frozen=True, slots=True)
class Change:
    """A request to the kernel, with the words for it: `failed to <what>`."""

    what: str
    request: Request
    tolerated: int = 0
    """The errno that is no failure."""


def apply(kernel: Rtnl, changes: Sequence[Change]) -> None:
    """Have the kernel make `changes` at once, in order. Raises InternalError for the first that it refuses.

    NB: it makes those behind that one nevertheless, so this is for what an ADD that fails takes back as a whole.
    """
    with step("make changes"):
        errors = kernel.batch([change.request for change in changes])
    for position, error in sorted(errors.items()):
        if error.errno != changes[position].tolerated:
            with step(changes[position].what):
                raise error


def require_absent(call: Call, session: Session, *, kind: str) -> None:
    """Raise InternalError where the interface exists already, before anything is touched; and as `inside` does.

    `kind` is what the plugin makes, in the message only.
    """
    ifname = call.invocation.ifname
    if ifname in session.absent:
        # The engine has looked, in this request. What has come since is refused by the kernel.
        return
    with inside(call, session):
        with step("look for the interface"):
            found = session.pod.find_link(ifname)
        if found is not None:
            raise InternalError(
                f'container {kind} name ("{ifname}") already exists',
                "an earlier ADD of this container was not followed by DEL, or two networks ask for the same name",
            )


# --- addresses and routes --------------------------------------------------------------------------------------------


def bring_up(
    session: Session, link: Link, result: Result, wanted_routes: Sequence[Change], *, dad: bool = True
) -> None:
    """Give the link the addresses of `result` that belong to it, bring it up, let IPv6 settle, then add the routes.

    Addresses come first so that the link is never up without them. Addresses that name no interface are passed over.
    Without `dad` nobody is asked whether an IPv6 address is a duplicate, and there is nothing to wait for. Where
    nothing is waited for, all of it is one datagram.
    """
    ips = _ips_of(link.name, result)
    if any(not ip.is_ipv4 for ip in ips):
        with session.inside():
            enable_ipv6(link.name)
    addresses = [
        Change(
            f'add IP address {ip.address} to "{link.name}"',
            inet.add_address(link.index, inet.interface_of(ip.address), dad=dad),
        )
        for ip in ips
    ]
    changes = [*addresses, Change(f'set "{link.name}" up', links.set_up(link.index))]
    if dad and any(ip.gateway and ":" in ip.gateway for ip in ips):
        apply(session.pod, changes)
        _settle(session, link)
        apply(session.pod, wanted_routes)
    else:
        apply(session.pod, [*changes, *wanted_routes])


def _ips_of(ifname: str, result: Result) -> list[IpConfig]:
    ips = []
    for ip in result.ips:
        if ip.interface is None:
            continue
        if not 0 <= ip.interface < len(result.interfaces):
            raise InternalError(f"failed to add IP address {ip.address}: no interface has index {ip.interface}")
        if result.interfaces[ip.interface].name != ifname:
            raise InternalError(
                f'failed to add IP address {ip.address} to "{ifname}": it belongs to '
                f'"{result.interfaces[ip.interface].name}"'
            )
        ips.append(ip)
    return ips


def enable_ipv6(ifname: str) -> None:
    """Switch IPv6 on for `lo` and `ifname`, and keep addresses when the link goes down. In the pod's namespace."""
    for name in ("lo", ifname):
        try:
            disabled = sysctl.read("ipv6", "conf", name, "disable_ipv6")
        except OSError as error:
            log.warning("can't read whether IPv6 is disabled, trying without: %s", error)
            continue
        if disabled != "0":
            with step(f'enable IPv6 on "{name}"'):
                sysctl.write("ipv6", "conf", name, "disable_ipv6", value="0")
    with step(f'keep the IPv6 addresses of "{ifname}" while it is down'):
        sysctl.write("ipv6", "conf", ifname, "keep_addr_on_down", value="1")


def _settle(session: Session, link: Link) -> None:
    """Wait until no IPv6 address is tentative: until then the kernel takes none of them as a route's source."""
    end = time.monotonic() + deadlines.ADDRESSES_SECONDS
    while True:
        with step(f'read the IPv6 addresses of "{link.name}"'):
            addresses = session.pod.addresses(link.index, socket.AF_INET6)
        for item in addresses:
            if item.is_duplicate:
                raise InternalError(
                    f'IPv6 address {item.address} of "{link.name}" is in use elsewhere (duplicate address detected)'
                )
        if not any(item.is_tentative for item in addresses):
            return
        if time.monotonic() >= end:
            break
        deadline.pause(_SETTLE_POLL_SECONDS)
    with step(f'read the state of "{link.name}"'):
        operstate = session.pod.link(link.name).operstate
    # Without a carrier the detection never runs: that is for the routes to fail on, or not.
    if operstate == OPERSTATE_UP:
        raise InternalError(
            f"link {link.name} still has tentative addresses after {deadlines.ADDRESSES_SECONDS:g} seconds"
        )


def routes(link: Link, result: Result) -> list[Change]:
    """Add the routes of `result` in their order, through the first gateway of their family where they name none.

    `mtu` and `advmss` are not applied, as with the reference plugins.
    """
    ips = _ips_of(link.name, result)
    gateways: dict[bool, str] = {}
    for ip in ips:
        if ip.gateway:
            gateways.setdefault(":" not in ip.gateway, ip.gateway)
    changes = []
    for route in result.routes:
        gateway = route.gw or gateways.get(route.is_ipv4, "")
        for key, value in (("priority", route.priority), ("table", route.table or 0)):
            configuration.in_range(f"routes: {key}", value, configuration.UNSIGNED_MAX)
        configuration.in_range("routes: scope", route.scope or 0, _SCOPE_MAX)
        wanted = inet.Route(
            dst=inet.interface_of(route.dst),
            oif=link.index,
            gateway=inet.address_of(gateway) if gateway else None,
            scope=route.scope or inet.SCOPE_GLOBAL,
            table=route.table or inet.TABLE_MAIN,
            priority=route.priority,
        )
        # Without EXCL: several default routes of one priority are one route with several next hops, or in turn.
        request = inet.add_route(wanted, exclusive=False)
        changes.append(Change(f"add route '{describe_route(route, gateway, link.name)}'", request))
    return changes


def describe_route(route: ResultRoute, gateway: str, ifname: str) -> str:
    """A route as `ip route` would have it, for messages."""
    parts = [route.dst]
    if gateway:
        parts.append(f"via {gateway}")
    parts.append(f"dev {ifname}")
    if route.priority:
        parts.append(f"metric {route.priority}")
    if route.table:
        parts.append(f"table {route.table}")
    return " ".join(parts)


def host_network(address: IpAddress) -> inet.IpInterface:
    """The address with its full length: /32 or /128."""
    return inet.interface_of(address)


def enable_forwarding(session: Session, ips: tuple[IpConfig, ...]) -> None:
    """Have the host forward the families of `ips`, where it does not yet."""
    missing = {ip.is_ipv4 for ip in ips} - session.forwarded
    with session.on_host():
        if True in missing:
            with step("enable IPv4 forwarding on the host"):
                sysctl.ensure("ipv4", "ip_forward", value="1")
        if False in missing:
            with step("enable IPv6 forwarding on the host"):
                sysctl.ensure("ipv6", "conf", "all", "forwarding", value="1")
    session.forwarded |= missing


@contextlib.contextmanager
def absent_is_done() -> Iterator[None]:
    """A link that is not there counts as removed."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise
