"""`ptp`: a veth pair between container and host, the host being the container's only neighbour.

The kernel state is that of the reference plugin (containernetworking/plugins `plugins/main/ptp`), so that either can
remove what the other made. Different on purpose: an ADD that fails leaves nothing behind; an interface that exists
is found before the IPAM plugin is asked; an address without gateway is refused before a link is made; a gateway
outside the address's network, and one that several addresses share, work. Masquerading is not done here.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from multus_daemon.builtin import checks, interfaces, ipam
from multus_daemon.builtin.contract import Call
from multus_daemon.builtin.interfaces import host_network, step
from multus_daemon.builtin.undo import Undo
from multus_daemon.cni import gojson
from multus_daemon.cni.errors import (
    DecodingFailureError,
    InternalError,
    InvalidNetnsError,
    InvalidNetworkConfigError,
    UnsupportedFieldError,
)
from multus_daemon.cni.result import Dns, Interface, IpConfig, Result, read_dns
from multus_daemon.netlink import ops, rtnl, sysctl
from multus_daemon.netlink.netns import NamespaceError
from multus_daemon.netlink.ops import Session
from multus_daemon.netlink.rtnl import IpAddress, IpInterface, Link, Rtnl

_NAME_ATTEMPTS: Final = 10
# Position of the container's end in the result's interfaces; the host's end comes first.
_CONTAINER_INTERFACE: Final = 1


@dataclass(frozen=True, slots=True)
class _Config:
    mtu: int
    """In bytes, of both ends; 0: the kernel's default."""
    dns: Dns | None
    """Replaces what the IPAM plugin said; None: it stays."""


@dataclass(slots=True)
class _Pair:
    """What has been made so far, written by the thread that makes it and read by who undoes it after its end."""

    host_name: str = ""


def _read(call: Call) -> _Config:
    """Raises DecodingFailureError, and UnsupportedFieldError for what this plugin can't do."""
    try:
        if gojson.get_bool(call.fields, "ipMasq"):
            raise UnsupportedFieldError(
                "ipMasq: true is not supported by the built-in ptp",
                "install the reference ptp plugin binary in the CNI bin directory, or set ipMasq to false and "
                "masquerade on the host",
            )
        dns = gojson.get_object(call.fields, "dns") or {}
        overrides = gojson.get_str(dns, "domain") or any(
            gojson.get_list(dns, key) is not None for key in ("nameservers", "search", "options")
        )
        return _Config(max(gojson.get_int(call.fields, "mtu") or 0, 0), read_dns(dns) if overrides else None)
    except gojson.JsonError as error:
        raise DecodingFailureError(f"failed to load netconf: {error}", f"network {call.name!r}") from error


class Ptp:
    """The plugin."""

    async def add(self, call: Call) -> Result:
        """Make the pair. Raises CniError, CancelledError; nothing is left then, addresses included."""
        config = _read(call)
        ipam.plugin_type(call)
        await interfaces.require_absent(call, kind="veth")
        async with Undo() as undo:
            undo.arm("release the addresses", functools.partial(ipam.delete, call))
            wanted = _with_container(await ipam.add(call), call)
            pair = _Pair()
            undo.arm("remove the veth pair", functools.partial(_remove, pair))
            work = functools.partial(_connect, ifname=call.invocation.ifname, wanted=wanted, mtu=config.mtu, pair=pair)
            host, container = await interfaces.in_pod(call, work)
        return replace(
            wanted,
            interfaces=(
                Interface(host.name, host.mac),
                Interface(container.name, container.mac, sandbox=call.invocation.netns),
            ),
            dns=wanted.dns if config.dns is None else config.dns,
        )

    async def delete(self, call: Call) -> None:
        """Release the addresses, then remove the container's end, and with it the host's. Absent is done."""
        await ipam.delete(call)
        if not call.invocation.netns:
            return
        try:
            await interfaces.in_pod(call, functools.partial(_disconnect, ifname=call.invocation.ifname))
        except InvalidNetnsError as error:
            if not (isinstance(error.__cause__, NamespaceError) and error.__cause__.is_absent):
                raise

    async def check(self, call: Call) -> None:
        """Compare the container's side with prevResult; the host's side is not looked at, as in the reference."""
        await interfaces.in_pod(call, lambda _session: None)
        await ipam.check(call)
        previous = checks.previous_result(call, "ptp")
        expected = checks.container_interface(call, previous)

        def compare(session: Session) -> None:
            link = checks.check_link(session, expected, "veth")
            checks.check_addresses(session, link, previous)
            checks.check_routes(session, previous)

        await interfaces.in_pod(call, compare)

    async def status(self, call: Call) -> None:
        """Ready where the configuration is usable and the IPAM plugin is ready."""
        _read(call)
        await ipam.status(call)


def _with_container(answer: Result, call: Call) -> Result:
    """The IPAM plugin's result with its addresses assigned to the container's end. Raises InvalidNetworkConfigError."""
    for ip in answer.ips:
        if not ip.gateway or (":" not in ip.gateway) is not ip.is_ipv4:
            problem = "gives no gateway" if not ip.gateway else f"gives the gateway {ip.gateway} of the other family"
            raise InvalidNetworkConfigError(
                f"IPAM plugin {problem} for {ip.address}",
                f"network {call.name!r}: ptp routes all traffic through the host, which answers at the gateway's "
                "address; set it in the ipam section",
            )
    return replace(
        answer,
        interfaces=(Interface(""), Interface(call.invocation.ifname)),
        ips=tuple(replace(ip, interface=_CONTAINER_INTERFACE) for ip in answer.ips),
    )


async def _remove(pair: _Pair) -> None:
    """Undo: by the host's end, which is there whatever became of the container's namespace."""

    def work(host: Rtnl) -> None:
        with _absent_is_done():
            host.delete_link(host.link(pair.host_name).index)

    if pair.host_name:
        await ops.on_host(work)


@contextlib.contextmanager
def _absent_is_done() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise


# --- in the pod's thread ---------------------------------------------------------------------------------------------


def _connect(session: Session, *, ifname: str, wanted: Result, mtu: int, pair: _Pair) -> tuple[Link, Link]:
    """Everything that an ADD changes in the kernel; the host's and the container's end."""
    with session.on_host():
        interfaces.enable_forwarding(wanted.ips)
    host = _make_pair(session, ifname, mtu, pair)
    container = interfaces.bring_up(session, ifname, wanted)
    routed: set[IpAddress] = set()
    # The host is off the container's subnet: nothing leads to it until this says so.
    for address, gateway in _addresses(wanted.ips):
        if gateway not in address.network:
            _route_gateway(session, container, address, gateway, routed)
    # The rest comes before the connected routes go, because these are what makes `via <gateway>` valid.
    interfaces.add_routes(session, container, wanted)
    _replace_connected_routes(session, container, wanted.ips, routed)
    _set_up_host(session, host, wanted.ips)
    return host, container


def _addresses(ips: tuple[IpConfig, ...]) -> list[tuple[IpInterface, IpAddress]]:
    return [(ipaddress.ip_interface(ip.address), ipaddress.ip_address(ip.gateway)) for ip in ips]


def _make_pair(session: Session, ifname: str, mtu: int, pair: _Pair) -> Link:
    """The pair, its host end up; the host end."""
    peer = pair.host_name = _add_veth(session, ifname, mtu)
    with step(f'find the host\'s end "{peer}"'):
        host = session.host.link(peer)
    with step(f'set "{peer}" up on the host'):
        session.host.set_up(host.index)
    # Router advertisements of a container must not configure the host; without IPv6 there is nothing to switch off.
    with session.on_host(), contextlib.suppress(OSError):
        sysctl.write("ipv6", "conf", peer, "accept_ra", value="0")
    return host


def _add_veth(session: Session, ifname: str, mtu: int) -> str:
    """The pair, its host end under a random name; that name."""
    peer = ""
    for _ in range(_NAME_ATTEMPTS):
        peer = f"veth{secrets.token_hex(4)}"
        try:
            session.pod.add_veth(ifname, peer, session.host_netns, mtu=mtu)
            return peer
        except FileExistsError as error:
            with step(f'find "{ifname}"'):
                taken = session.pod.find_link(ifname) is not None
            if taken:
                raise InternalError(
                    f'container veth name ("{ifname}") peer provided ("{peer}") already exists'
                ) from error
        except OSError as error:
            raise InternalError(f'failed to make veth pair "{ifname}" - "{peer}": {error.strerror}') from error
    raise InternalError(f'failed to find a free name for the host\'s end of "{ifname}"', f"the last one was {peer!r}")


def _route_gateway(
    session: Session, link: Link, address: IpInterface, gateway: IpAddress, routed: set[IpAddress]
) -> None:
    """A route to the gateway alone, once for each gateway."""
    if gateway in routed:
        return
    routed.add(gateway)
    route = rtnl.Route(host_network(gateway), link.index, source=address.ip, scope=rtnl.SCOPE_LINK)
    with step(f"add route '{route.dst} dev {link.name} scope link src {address.ip}'"):
        session.pod.add_route(route)


def _replace_connected_routes(session: Session, link: Link, ips: tuple[IpConfig, ...], routed: set[IpAddress]) -> None:
    """Have the neighbours on the subnet be reached through the host instead of by ARP on the pair."""
    done: set[rtnl.IpNetwork] = set()
    for address, gateway in _addresses(ips):
        network = address.network
        # An address of full length has no subnet; several addresses of one subnet have one route.
        replaces = network.prefixlen < network.max_prefixlen and network not in done
        done.add(network)
        subnet = ipaddress.ip_interface(network)
        if replaces:
            with step(f"delete route '{network} dev {link.name}'"):
                session.pod.delete_route(rtnl.Route(subnet, link.index, scope=rtnl.SCOPE_NOWHERE))
        _route_gateway(session, link, address, gateway, routed)
        if replaces:
            with step(f"add route '{network} via {gateway} dev {link.name} src {address.ip}'"):
                session.pod.add_route(rtnl.Route(subnet, link.index, gateway=gateway, source=address.ip))


def _set_up_host(session: Session, host: Link, ips: tuple[IpConfig, ...]) -> None:
    """Let the host answer at each gateway's address, and find each container address behind its end."""
    gateways: set[IpAddress] = set()
    for address, gateway in _addresses(ips):
        if gateway not in gateways:
            gateways.add(gateway)
            with step(f'add IP address {gateway} to "{host.name}" on the host'):
                session.host.add_address(host.index, host_network(gateway), broadcast=False)
        route = rtnl.Route(host_network(address.ip), host.index, scope=rtnl.SCOPE_HOST)
        # There already, e.g. by an administrator: tolerated, as in the reference.
        with (
            step(f"add route '{route.dst} dev {host.name} scope host' on the host"),
            contextlib.suppress(FileExistsError),
        ):
            session.host.add_route(route)


def _disconnect(session: Session, *, ifname: str) -> None:
    with step(f'remove "{ifname}"'), _absent_is_done():
        session.pod.delete_link(session.pod.link(ifname).index)
