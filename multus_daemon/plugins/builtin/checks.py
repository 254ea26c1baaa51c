"""What CHECK compares with the kernel: a link, addresses, routes (plugins `pkg/ip`, ValidateExpected…)."""

from __future__ import annotations

import ipaddress

from multus_daemon.kernel import inet
from multus_daemon.kernel.expected import Tables, fits
from multus_daemon.kernel.links import Link
from multus_daemon.kernel.ops import Session
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.interfaces import describe_route, step
from multus_daemon.spec.cni.errors import InternalError, InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Interface, Result


def previous_result(call: Call, plugin: str) -> Result:
    """`prevResult`, which CHECK needs. Raises InvalidNetworkConfigError where there is none."""
    if call.prev_result is None:
        raise InvalidNetworkConfigError(f"{plugin}: Required prevResult missing", f"network {call.name!r}")
    return call.prev_result


def container_interface(call: Call, previous: Result) -> Interface:
    """The entry of the previous result that is this call's interface. Raises InternalError."""
    for item in previous.interfaces:
        if item.name == call.invocation.ifname and item.sandbox == call.invocation.netns:
            return item
    known = ", ".join(f"{item.name} in {item.sandbox or 'the host'}" for item in previous.interfaces) or "none"
    raise InternalError(
        f'Sandbox in prevResult doesn\'t match configured netns: "{call.invocation.netns}"',
        f'"{call.invocation.ifname}" is looked for; interfaces in prevResult: {known}',
    )


def check_link(session: Session, expected: Interface, kind: str) -> Link:
    """The container's link, which must be of `kind` and have the expected MAC. Raises InternalError."""
    with step(f'find "{expected.name}"'):
        link = session.pod.link(expected.name)
    if link.kind != kind:
        raise InternalError(f'"{expected.name}" is no {kind} but {link.kind or "a link without a kind"}')
    if expected.mac and expected.mac.lower() != link.mac.lower():
        raise InternalError(f'"{expected.name}" has MAC {link.mac}, not {expected.mac} as in prevResult')
    return link


def check_addresses(session: Session, link: Link, previous: Result) -> None:
    """Every address of the previous result is on the link, and its network has a route. Raises InternalError."""
    with step(f'read the addresses of "{link.name}"'):
        present = {item.address for item in session.pod.addresses(link.index)}
    tables = Tables(session.pod)
    for ip in previous.ips:
        address = inet.interface_of(ip.address)
        if address not in present:
            raise InternalError(f'failed to match interface "{link.name}": expected IP {ip.address} is not on it')
        with step("read the routing table"):
            routes = tables.routes(ip.is_ipv4, inet.TABLE_MAIN)
        if address.network not in routes:
            raise InternalError(f'expected a route to {address.network} for "{link.name}", and there is none')


def check_gateways(session: Session, link: Link, previous: Result) -> None:
    """Every gateway of the previous result's addresses has a route of its own on the link. Raises InternalError."""
    tables = Tables(session.pod)
    for ip in previous.ips:
        if not ip.gateway:
            continue
        gateway = ipaddress.ip_network(ip.gateway)
        with step("read the routing table"):
            found = tables.routes(ip.is_ipv4, inet.TABLE_MAIN).get(gateway, ())
        if not any(route.oif == link.index for route in found):
            raise InternalError(f'expected a route to the gateway {ip.gateway} on "{link.name}", and there is none')


def check_routes(session: Session, previous: Result) -> None:
    """Every route of the previous result is there: by destination, and by gateway where it names one.

    Of default routes only the destination counts. Raises InternalError.
    """
    tables = Tables(session.pod)
    for expected in previous.routes:
        with step("read the routing table"):
            there = tables.routes_to(expected, expected.table or inet.TABLE_MAIN)
        if not any(fits(expected, route) for route in there):
            text = describe_route(expected, expected.gw, "any")
            raise InternalError(f"expected route '{text}' was not found in the routing table")
