"""The verbs of bridge."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from multus_daemon.kernel import inet
from multus_daemon.kernel.links import Link
from multus_daemon.kernel.ops import Session
from multus_daemon.plugins.builtin import interfaces, ipam, masquerade, spoofing, veth
from multus_daemon.plugins.builtin.bridge import config, kernel
from multus_daemon.plugins.builtin.bridge.check import comparison
from multus_daemon.plugins.builtin.bridge.config import BridgeConfig
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.undo import Undo
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError, InternalError
from multus_daemon.spec.cni.result import Interface, IpConfig, Result, Route

# Position of the container's end in the result's interfaces: behind the bridge and the host's end.
_CONTAINER_INTERFACE: Final = 2


def unsupported(call: Call) -> str:
    """See `contract.Plugin`."""
    return config.unsupported(call)


def validate(call: Call) -> None:
    """See `contract.Plugin`."""
    call.once(config.read)


def add(call: Call, session: Session) -> Result:
    """Make the port, and the bridge if need be. Raises CniError, Interrupted; the port and what is its are gone.

    The pair comes before the addresses: an IPAM plugin such as dhcp needs the container's end.
    """
    settings = call.once(config.read)
    ifname = call.invocation.ifname
    with Undo() as undo:
        interfaces.require_absent(call, session, kind="veth")
        pair = veth.Pair()
        undo.arm("remove the veth pair", functools.partial(veth.undo, pair, session))
        with interfaces.reached(call, session):
            links = kernel.connect(session, config=settings, ifname=ifname, pair=pair)
        if settings.spoof_check:
            undo.arm("remove the rules against other MAC addresses", functools.partial(spoofing.remove, call))
            spoofing.add(call, links.host.name, links.container.mac)
        wanted = Result(interfaces=(Interface(""), Interface(""), Interface(ifname)))
        if settings.is_layer3:
            undo.arm("release the addresses", functools.partial(ipam.delete, call))
            wanted = _with_gateways(wanted, ipam.add(call), settings)
        with interfaces.inside(call, session):
            links = kernel.configure(session, config=settings, links=links, wanted=wanted)
        if settings.is_layer3 and settings.masquerade:
            addresses = [inet.interface_of(ip.address) for ip in wanted.ips]
            undo.arm("stop masquerading", functools.partial(masquerade.remove, call, addresses))
            masquerade.add(call, addresses)
    return replace(
        wanted,
        interfaces=(
            _reported(links.bridge),
            _reported(links.host),
            replace(_reported(links.container), sandbox=call.invocation.netns),
            *([_reported(links.gateway)] if links.gateway else []),
        ),
        dns=wanted.dns if settings.dns is None else settings.dns,
    )


def delete(call: Call, session: Session) -> None:
    """Remove the pair, release the addresses, remove the rules. Absent is done; the bridge stays.

    The addresses are released only when the pair is gone; the rest goes on past what fails.
    """
    removed = veth.remove(call, session, others=masquerade.goes_by_name(call))
    failures: list[CniError] = []
    try:
        if ipam.is_named(call):
            ipam.delete(call)
    except CniError as error:
        failures.append(error)
    try:
        if call.tools is not None and gojson.get_bool(call.fields, "macspoofchk"):
            spoofing.remove(call)
    except gojson.JsonError:
        # No ADD has come past this either.
        pass
    except CniError as error:
        failures.append(error)
    try:
        if ipam.is_named(call):
            masquerade.forget(call, removed)
    except CniError as error:
        failures.append(error)
    if failures:
        raise _joined(failures)


def check(call: Call, session: Session) -> None:
    """Compare bridge, port, container and the IPAM plugin's books with prevResult."""
    settings = config.read(call)
    with interfaces.inside(call, session):
        pass
    if settings.is_layer3:
        ipam.check(call)
    compare = comparison(call, settings)
    with interfaces.inside(call, session):
        compare(session)


def status(call: Call) -> None:
    """Ready where the configuration is usable and the IPAM plugin, if there is one, is ready."""
    if config.read(call).is_layer3:
        ipam.status(call)


def _reported(link: Link) -> Interface:
    return Interface(link.name, link.mac)


def _joined(failures: Sequence[CniError]) -> CniError:
    first, *others = failures
    return first.with_context("; then: " + "; ".join(map(str, others))) if others else first


def _with_gateways(wanted: Result, answer: Result, settings: BridgeConfig) -> Result:
    """The IPAM plugin's answer, its addresses assigned to the container's end, with the gateways that are configured.

    A gateway that the IPAM plugin does not name is the first address of the network.
    """
    ips = tuple(_with_gateway(ip, settings) for ip in answer.ips)
    routes = list(answer.routes)
    if settings.is_default_gateway:
        for ipv4 in (True, False):
            first = next((ip for ip in ips if ip.is_ipv4 is ipv4), None)
            has_default = any(route.is_default and route.gw and route.is_ipv4 is ipv4 for route in routes)
            if first is not None and not has_default:
                routes.append(Route("0.0.0.0/0" if ipv4 else "::/0", gw=first.gateway))
    return replace(answer, interfaces=wanted.interfaces, ips=ips, routes=tuple(routes))


def _with_gateway(ip: IpConfig, settings: BridgeConfig) -> IpConfig:
    gateway = ip.gateway
    if not gateway and settings.is_gateway:
        network = inet.interface_of(ip.address).network
        try:
            gateway = str(network.network_address + 1)
        except ipaddress.AddressValueError as error:
            raise InternalError(f"no address is left for a gateway of {ip.address}") from error
    return replace(ip, interface=_CONTAINER_INTERFACE, gateway=gateway)
