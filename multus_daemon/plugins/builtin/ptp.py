"""`ptp`: a veth pair between container and host, the host being the container's only neighbour.

The kernel state is that of the reference plugin (containernetworking/plugins `plugins/main/ptp`), so that either can
remove what the other made. Different on purpose: an ADD that fails leaves nothing behind; an interface that exists
is found before the IPAM plugin is asked; an address without gateway is refused before a link is made; a gateway
outside the address's network, and one that several addresses share, work. And IPv6 addresses are added without
duplicate address detection, which the key `dad` brings back: the only neighbour on the pair is the host, and the
reference waits one to two seconds for each pod. The same for the link-local address of the host's end.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from multus_daemon.kernel import inet
from multus_daemon.kernel.inet import IpAddress, IpInterface
from multus_daemon.kernel.links import Link
from multus_daemon.kernel.ops import Session
from multus_daemon.plugins.builtin import checks, configuration, interfaces, ipam, masquerade, veth
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.interfaces import Change, host_network
from multus_daemon.plugins.builtin.undo import Undo
from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.errors import DecodingFailureError, InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Dns, Interface, IpConfig, Result

_KEYS: Final = ("mtu", "dad", *masquerade.KEYS)
# Position of the container's end in the result's interfaces; the host's end comes first.
_CONTAINER_INTERFACE: Final = 1


@dataclass(frozen=True, slots=True)
class _Config:
    mtu: int
    """In bytes, of both ends; 0: the kernel's default."""
    dns: Dns | None
    """Replaces what the IPAM plugin said; None: it stays."""
    masquerade: bool
    dad: bool
    """Whether duplicate address detection is run for IPv6 addresses."""


def _read(call: Call) -> _Config:
    """Raises DecodingFailureError."""
    try:
        return conf.once(call.fields, _Config, lambda: _parse(call))
    except gojson.JsonError as error:
        raise DecodingFailureError(f"failed to load netconf: {error}", f"network {call.name!r}") from error


def _parse(call: Call) -> _Config:
    return _Config(
        mtu=configuration.mtu(call.fields),
        dns=configuration.own_dns(call.fields),
        masquerade=masquerade.is_wanted(call),
        dad=bool(gojson.get_bool(call.fields, "dad")),
    )


def unsupported(call: Call) -> str:
    """See `contract.Plugin`."""
    known = configuration.COMMON_KEYS.union(_KEYS)
    return configuration.unknown_key(call.fields, known) or masquerade.unsupported(call)


def validate(call: Call) -> None:
    """See `contract.Plugin`."""
    _read(call)
    ipam.plugin_type(call)


def add(call: Call, session: Session) -> Result:
    """Make the pair. Raises CniError, Interrupted; nothing is left then, addresses included."""
    config = _read(call)
    ipam.plugin_type(call)
    with Undo() as undo:
        interfaces.require_absent(call, session, kind="veth")
        undo.arm("release the addresses", functools.partial(ipam.delete, call))
        wanted = _with_container(ipam.add(call), call)
        pair = veth.Pair()
        undo.arm("remove the veth pair", functools.partial(veth.undo, pair, session))
        with interfaces.reached(call, session):
            host, container = _connect(config, session, ifname=call.invocation.ifname, wanted=wanted, pair=pair)
        if config.masquerade:
            addresses = [inet.interface_of(ip.address) for ip in wanted.ips]
            undo.arm("stop masquerading", functools.partial(masquerade.remove, call, addresses))
            masquerade.add(call, addresses)
    return replace(
        wanted,
        interfaces=(
            Interface(host.name, host.mac),
            Interface(container.name, container.mac, sandbox=call.invocation.netns),
        ),
        dns=wanted.dns if config.dns is None else config.dns,
    )


def delete(call: Call, session: Session) -> None:
    """Release the addresses, remove the container's end, and with it the host's, and the rules. Absent is done."""
    ipam.delete(call)
    masquerade.forget(call, veth.remove(call, session, others=masquerade.goes_by_name(call)))


def check(call: Call, session: Session) -> None:
    """Compare the container's side with prevResult; the host's side is not looked at, as in the reference."""
    with interfaces.inside(call, session):
        pass
    ipam.check(call)
    previous = checks.previous_result(call, "ptp")
    expected = checks.container_interface(call, previous)
    with interfaces.inside(call, session):
        link = checks.check_link(session, expected, "veth")
        checks.check_addresses(session, link, previous)
        checks.check_routes(session, previous)
        # The reference does not look, and without it nothing leaves the pod.
        checks.check_gateways(session, link, previous)


def status(call: Call) -> None:
    """Ready where the configuration is usable and the IPAM plugin is ready."""
    _read(call)
    ipam.status(call)


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


# --- in the kernel ---------------------------------------------------------------------------------------------------


def _connect(config: _Config, session: Session, *, ifname: str, wanted: Result, pair: veth.Pair) -> tuple[Link, Link]:
    """Everything that an ADD changes in the kernel; the host's and the container's end."""
    interfaces.enable_forwarding(session, wanted.ips)
    host, container = veth.make(session, ifname, pair, mtu=config.mtu)
    if not config.dad and any(not ip.is_ipv4 for ip in wanted.ips):
        with session.on_host():
            veth.skip_detection(host.name)
    interfaces.bring_up(session, container, wanted, _container_routes(container, wanted), dad=config.dad)
    interfaces.apply(session.host, list(_host_side(host, wanted.ips, dad=config.dad)))
    return host, container


def _container_routes(link: Link, wanted: Result) -> list[Change]:
    ends = _addresses(wanted.ips)
    routed: set[IpAddress] = set()
    return [
        # The host is off the container's subnet: nothing leads to it until this says so.
        *(
            change
            for address, gateway in ends
            if gateway not in address.network
            for change in _to_gateway(link, address, gateway, routed)
        ),
        # The rest comes before the connected routes go, because these are what makes `via <gateway>` valid.
        *interfaces.routes(link, wanted),
        *_in_place_of_connected_routes(link, ends, routed),
    ]


def _addresses(ips: tuple[IpConfig, ...]) -> list[tuple[IpInterface, IpAddress]]:
    return [(inet.interface_of(ip.address), inet.address_of(ip.gateway)) for ip in ips]


def _to_gateway(link: Link, address: IpInterface, gateway: IpAddress, routed: set[IpAddress]) -> list[Change]:
    """A route to the gateway alone, once for each gateway."""
    if gateway in routed:
        return []
    routed.add(gateway)
    route = inet.Route(host_network(gateway), link.index, source=address.ip, scope=inet.SCOPE_LINK)
    return [
        Change(f"add route '{route.dst} dev {link.name} scope link src {address.ip}'", inet.add_route(route)),
    ]


def _in_place_of_connected_routes(
    link: Link, ends: Sequence[tuple[IpInterface, IpAddress]], routed: set[IpAddress]
) -> Iterator[Change]:
    """Have the neighbours on the subnet be reached through the host instead of by ARP on the pair."""
    done: set[inet.IpNetwork] = set()
    for address, gateway in ends:
        network = address.network
        # An address of full length has no subnet; several addresses of one subnet have one route.
        replaces = network.prefixlen < network.max_prefixlen and network not in done
        done.add(network)
        subnet = inet.interface_of(network)
        if replaces:
            connected = inet.Route(subnet, link.index, scope=inet.SCOPE_NOWHERE)
            yield Change(f"delete route '{network} dev {link.name}'", inet.delete_route(connected))
        yield from _to_gateway(link, address, gateway, routed)
        if replaces:
            route = inet.Route(subnet, link.index, gateway=gateway, source=address.ip)
            what = f"add route '{network} via {gateway} dev {link.name} src {address.ip}'"
            yield Change(what, inet.add_route(route))


def _host_side(host: Link, ips: tuple[IpConfig, ...], *, dad: bool) -> Iterator[Change]:
    """Let the host answer at each gateway's address, and find each container address behind its end."""
    gateways: set[IpAddress] = set()
    for address, gateway in _addresses(ips):
        if gateway not in gateways:
            gateways.add(gateway)
            request = inet.add_address(host.index, host_network(gateway), broadcast=False, dad=dad)
            yield Change(f'add IP address {gateway} to "{host.name}" on the host', request)
        route = inet.Route(host_network(address.ip), host.index, scope=inet.SCOPE_HOST)
        what = f"add route '{route.dst} dev {host.name} scope host' on the host"
        # There already, e.g. by an administrator: tolerated, as in the reference.
        yield Change(what, inet.add_route(route), tolerated=errno.EEXIST)
