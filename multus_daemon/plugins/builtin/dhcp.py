"""`dhcp`: the IPAM plugin whose address is a lease of a DHCP server on the interface's segment.

Options, client id and result are those of the reference plugin (containernetworking/plugins `plugins/ipam/dhcp`), whose
leases an agent keeps on each node. Here the daemon keeps them: `plugins/leases`.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from multus_daemon import deadlines
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import contract
from multus_daemon.plugins.builtin.contract import Call, Undo
from multus_daemon.plugins.builtin.interfaces import located, step
from multus_daemon.plugins.leases import Leases, NoLeaseError, Order, Owner
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni import gojson, names
from multus_daemon.spec.cni.errors import (
    InternalError,
    InvalidNetworkConfigError,
    Origin,
    TryAgainLaterError,
)
from multus_daemon.spec.cni.result import IpConfig, Result, Route

if TYPE_CHECKING:
    from multus_daemon.kernel.dhcp import Lease

_IPAM_KEYS: Final = ("type", "daemonSocketPath", "request", "provide", "priority")
_AGENT: Final = "/run/cni/dhcp.sock"
_ITEM_KEYS: Final[Mapping[str, Sequence[str]]] = {
    "request": ("option", "skipDefault"),
    "provide": ("option", "value", "fromArg"),
}
_OPTIONS: Final[Mapping[str, int]] = {
    "subnet-mask": 1,
    "routers": 3,
    "host-name": 12,
    "vendor-class-identifier": 60,
    "dhcp-client-identifier": 61,
    "user-class": 77,
}
_DEFAULTS: Final = (3, 1)
_BYTE_MAX: Final = 255
# Padding, end, and what the protocol sets.
_NOT_OURS: Final = (0, 50, 53, 54, 55, 57, 255)
_IS_THERE: Final = "is a DHCP server on the segment of this interface? its log says if a request came"


@dataclass(frozen=True)
class Config:
    """The section `ipam`."""

    requested: tuple[int, ...]
    provided: dict[int, bytes]
    priority: int


def unsupported(call: Call) -> str:
    """Name the first key of `ipam` that this plugin does not know, an option that it does not send, or an agent."""
    ipam = gojson.get_object(call.fields, "ipam") or {}
    if unknown := contract.unknown_key(ipam, _IPAM_KEYS, within="ipam."):
        return unknown
    for section, keys in _ITEM_KEYS.items():
        for item, code in _items(ipam, section):
            if unknown := contract.unknown_key(item, keys, within=f"ipam.{section}: "):
                return unknown
            if section == "provide" and code in _NOT_OURS:
                return f"option: {code}"
    # One who runs an agent of his own wants it to be asked: by the binary.
    if (agent := gojson.get_str(ipam, "daemonSocketPath") or _AGENT) != _AGENT:
        return f"daemonSocketPath: {contract.shown(agent)}"
    return "" if call.leases is not None else "a lease without a daemon"


def read(call: Call) -> Config:
    """Read the configuration. Raises CniError."""
    with contract.reading(call.name, "dhcp"):
        ipam = gojson.get_object(call.fields, "ipam") or {}
        gojson.get_str(ipam, "daemonSocketPath")
        requested = list(_items(ipam, "request"))
        skips = any(gojson.get_bool(item, "skipDefault") for item, _ in requested)
        args, provided = dict(names.parse_args(call.invocation.args)), {}
        for item, code in _items(ipam, "provide"):
            if code is None:
                raise InvalidNetworkConfigError('Can not parse option "": it is empty', "ipam.provide")
            given = gojson.get_str(item, "value") or ""
            value = args.get(gojson.get_str(item, "fromArg") or "", given).encode()
            if len(value) > _BYTE_MAX:
                raise InvalidNetworkConfigError(f"the value of option {code} has more than {_BYTE_MAX} bytes")
            provided[code] = value
        codes = [code for _, code in requested if code is not None]
        unique = tuple(dict.fromkeys([*codes, *(() if skips else _DEFAULTS)]))
        return Config(unique, provided, gojson.get_int(ipam, "priority") or 0)


def _items(ipam: Mapping[str, Any], section: str) -> Iterator[tuple[Mapping[str, Any], int | None]]:
    """Yield each item with the number of its option. Raises JsonError, InvalidNetworkConfigError."""
    for value in gojson.get_list(ipam, section) or ():
        item = contract.as_object(value, f"ipam.{section}")
        text = gojson.get_str(item, "option") or ""
        known = _OPTIONS.get(text, int(text) if text.isascii() and text.isdigit() and len(text) < 4 else -1)
        if text and not 0 <= known <= _BYTE_MAX:
            raise InvalidNetworkConfigError(
                f'Can not parse option "{contract.shown(text)[1:-1]}"', f"a number, or one of {', '.join(_OPTIONS)}"
            )
        yield item, known if text else None


def add(call: Call, netns: PodNetns) -> Result:
    """Wait for a lease. If it raises, there is none."""
    config, leases = read(call), _leases(call)
    owner, ifname = _owner(call), call.invocation.ifname
    with Undo() as undo, located(call):
        netns.require()
        with step(f'set "{ifname}" up', asked=True):
            netns.pod.change(netns.pod.link(ifname).index, up=True)
        undo.arm("release the lease", lambda: leases.release(owner))
        order = Order(owner, netns.path, netns.identity(), config.requested, config.provided)
        seconds = min(deadlines.DHCP_OFFER_SECONDS, deadline.current().left)
        try:
            lease = leases.acquire(order, seconds)
        except NoLeaseError as error:
            raise TryAgainLaterError(
                f"no DHCP lease within {seconds:.0f} s: {error}", remedy=_IS_THERE, origin=Origin.NETWORK
            ) from error
        return _result(lease, config.priority)


def delete(call: Call, netns: PodNetns) -> None:
    """Release the lease, without the namespace only here."""
    if call.leases is not None:
        with deadline.within(deadlines.DHCP_RELEASE_SECONDS):
            call.leases.release(_owner(call))


def keeps(call: Call) -> bool:
    """Report whether there is a lease."""
    return call.leases is None or call.leases.has(_owner(call))


def differences(call: Call, netns: PodNetns) -> list[Difference]:
    """Return that the lease is lost."""
    problem = _leases(call).problem(_owner(call))
    return [Difference(problem)] if problem else []


def _leases(call: Call) -> Leases:
    assert call.leases is not None, "`unsupported` says so"
    return call.leases


def _owner(call: Call) -> Owner:
    return Owner(call.invocation.container_id, call.name, call.invocation.ifname)


def _result(lease: Lease, priority: int) -> Result:
    """Return address, gateway and routes as the server gave them: RFC 3442, else options 33 and 3."""
    routers = lease.option("router")
    gateway = str(routers[0]) if routers else ""
    try:
        routes = list(_classless(lease.option("classless_static_route"))) or [
            *_classful(lease.option("static_route")),
            *([("0.0.0.0/0", gateway)] if gateway else []),
        ]
    except ValueError as error:
        raise InternalError(f"the routes of the DHCP server cannot be read: {error}", origin=Origin.NETWORK) from error
    made = tuple([Route(destination, gw, priority=priority) for destination, gw in routes])
    return Result(ips=(IpConfig(lease.address, gateway),), routes=made)


def _classless(value: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield destination and gateway of each route of option 121. Raises ValueError."""
    rest = bytes(value)
    while rest:
        size = (rest[0] + 7) // 8
        destination, gateway = rest[1 : size + 1], rest[size + 1 : size + 5]
        if len(gateway) < 4:
            raise ValueError("option 121 is cut")
        network = ipaddress.IPv4Network((destination.ljust(4, b"\0"), rest[0]), strict=False)
        yield str(network), str(ipaddress.IPv4Address(gateway))
        rest = rest[size + 5 :]


def _classful(value: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield the routes of option 33: the class of the address decides the length."""
    for at in range(0, len(value) // 8 * 8, 8):
        first = value[at]
        with contextlib.suppress(ValueError):
            network = ipaddress.IPv4Network(
                (bytes(value[at : at + 4]), 8 if first < 128 else 16 if first < 192 else 24), strict=False
            )
            yield str(network), str(ipaddress.IPv4Address(bytes(value[at + 4 : at + 8])))
