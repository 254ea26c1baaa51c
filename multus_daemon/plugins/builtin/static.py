"""`static`: the IPAM plugin that hands out what its configuration says (plugins `plugins/ipam/static`).

Which source of addresses counts, checks and the words of the errors are the reference plugin's; codes are those that
the CNI SPEC has. Pure: nothing is kept, so a DEL has nothing to do, and two containers may be given one address.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon.kernel.ops import Session
from multus_daemon.plugins.builtin import configuration
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.spec.cni import gojson, versions
from multus_daemon.spec.cni.errors import (
    DecodingFailureError,
    IncompatibleVersionError,
    InternalError,
    InvalidEnvironmentError,
    InvalidNetworkConfigError,
)
from multus_daemon.spec.cni.result import Dns, IpConfig, Result, Route, cidr, read_dns, read_route

_IPAM_KEYS: Final = ("type", "name", "addresses", "routes", "dns")
# `version` is of CNI 0.3: written still, and read by nobody.
_ADDRESS_KEYS: Final = ("address", "gateway", "version")
# The first whose results hold any number of addresses, none included.
_LISTS: Final = "0.3.0"


@dataclass(frozen=True, slots=True)
class StaticConfig:
    """One configuration, checked."""

    ips: tuple[IpConfig, ...]
    routes: tuple[Route, ...]
    dns: Dns


def unsupported(call: Call) -> str:
    """See `contract.Plugin`; of the section `ipam`, the others are not for this plugin."""
    ipam = gojson.get_object(call.fields, "ipam") or {}
    if found := configuration.unknown_key(ipam, _IPAM_KEYS, within="ipam."):
        return found
    items = [item for item in gojson.get_list(ipam, "addresses") or () if isinstance(item, dict)]
    unknown = (configuration.unknown_key(item, _ADDRESS_KEYS, within="ipam.addresses: ") for item in items)
    return next(filter(None, unknown), "")


def validate(call: Call) -> None:
    """See `contract.Plugin`."""
    config = call.once(read)
    if not config.ips and not versions.at_least(call.cni_version, _LISTS):
        raise IncompatibleVersionError(
            "cannot convert: no valid IP addresses", f"a result of version {call.cni_version} must have one"
        )


def add(call: Call, session: Session) -> Result:
    """The addresses, routes and DNS settings. Raises CniError."""
    validate(call)
    config = call.once(read)
    return Result(ips=config.ips, routes=config.routes, dns=config.dns)


def delete(call: Call, session: Session) -> None:
    """Nothing has been taken; the configuration is not looked at."""


def check(call: Call, session: Session) -> None:
    """An address of prevResult that is configured with a gateway has that one. Raises CniError.

    As the reference: an address that prevResult lacks is no failure, it may have been asked for since.
    """
    config = read(call)
    if call.prev_result is None:
        raise InvalidNetworkConfigError("Required prevResult missing", f"network {call.name!r}")
    present: dict[str, IpConfig] = {}
    for item in call.prev_result.ips:
        present.setdefault(item.ip, item)
    for ip in config.ips:
        given = present.get(ip.ip)
        if given is not None and ip.gateway and ip.gateway != given.gateway:
            raise InternalError(
                f"static: Failed to match addr {ip.ip} on interface {call.invocation.ifname}",
                f"its gateway is {given.gateway or 'none'} in prevResult, and {ip.gateway} in the configuration",
            )


def status(call: Call) -> None:
    """Always ready."""


def read(call: Call) -> StaticConfig:
    """The configuration together with CNI_ARGS.

    runtimeConfig before args before CNI_ARGS and `addresses`, of which the last two add up. Raises
    DecodingFailureError (6), InvalidEnvironmentError (4) for CNI_ARGS, InvalidNetworkConfigError (7).
    """
    try:
        ipam = gojson.get_object(call.fields, "ipam")
        if ipam is None:
            raise InvalidNetworkConfigError("IPAM config missing 'ipam' key", f"network {call.name!r}")
        runtime = gojson.get_object(call.fields, "runtimeConfig") or {}
        given = gojson.get_object(gojson.get_object(call.fields, "args") or {}, "cni") or {}
        configured = [_written(item) for item in gojson.get_list(ipam, "addresses") or ()]
        by_runtime, by_args = (gojson.get_strings(section, "ips") or () for section in (runtime, given))
        routes = tuple(read_route(_object(item, "routes")) for item in gojson.get_list(ipam, "routes") or ())
        dns = read_dns(gojson.get_object(ipam, "dns") or {})
    except gojson.JsonError as error:
        raise DecodingFailureError(f"static: {error}", f"network {call.name!r}") from error
    by_environment = _by_environment(call.invocation.args)
    # All that is asked for is checked, also what then does not count, as in the reference.
    asked_for = [_asked_for(texts) for texts in (by_args, by_runtime)]
    ips = asked_for[1] or asked_for[0] or [*map(_checked, configured), *by_environment]
    _require_one_of_each_family(ips, call.cni_version)
    return StaticConfig(tuple(ips), routes, dns)


def _object(item: Any, where: str) -> Mapping[str, Any]:
    if item is None:
        return {}
    if not isinstance(item, dict):
        raise gojson.JsonError(f"{where}: an object is needed, not {gojson.kind_of(item)}")
    return item


def _written(item: Any) -> IpConfig:
    """An entry of `addresses`, its address as it is written."""
    fields = _object(item, "addresses")
    gateway = gojson.get_str(fields, "gateway") or ""
    try:
        return IpConfig(gojson.get_str(fields, "address") or "", configuration.ip_address(gateway) if gateway else "")
    except ValueError as error:
        raise gojson.JsonError(f"addresses.gateway: invalid IP address: {gateway}") from error


def _checked(ip: IpConfig) -> IpConfig:
    try:
        return IpConfig(cidr(ip.address, "address"), ip.gateway)
    except gojson.JsonError as error:
        raise InvalidNetworkConfigError(
            f"the 'address' field is expected to be in CIDR notation, got: '{ip.address}'"
        ) from error


def _asked_for(texts: Iterable[str]) -> list[IpConfig]:
    """The addresses of an `ips`; they have no gateway."""
    ips = []
    for text in texts:
        try:
            ips.append(IpConfig(cidr(text, "ips")))
        except gojson.JsonError as error:
            raise InvalidNetworkConfigError(
                f"an entry in the 'ips' field is NOT in CIDR notation, got: '{text}'"
            ) from error
    return ips


def _by_environment(args: str) -> list[IpConfig]:
    """`IP=<CIDR>[,<CIDR>]` of CNI_ARGS, with those of `GATEWAY=<address>[,<address>]` that lie in their networks."""
    found = configuration.own_args(args, ("IP", "GATEWAY"))
    addresses = []
    for text in _items(found.get("IP", "")):
        try:
            addresses.append(cidr(text, "IP"))
        except gojson.JsonError as error:
            raise InvalidEnvironmentError(
                f"the 'ip' field is expected to be in CIDR notation, got: '{text}'", "IP in CNI_ARGS"
            ) from error
    gateways = []
    for text in _items(found.get("GATEWAY", "")):
        try:
            gateways.append(ipaddress.ip_address(configuration.ip_address(text)))
        except ValueError as error:
            raise InvalidEnvironmentError(f"invalid gateway address: {text}", "GATEWAY in CNI_ARGS") from error
    return [
        IpConfig(
            address,
            # Of several the last one.
            next((str(item) for item in reversed(gateways) if item in ipaddress.ip_interface(address).network), ""),
        )
        for address in addresses
    ]


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")] if text else []


def _require_one_of_each_family(ips: Iterable[IpConfig], cni_version: str) -> None:
    families = [ip.is_ipv4 for ip in ips]
    if max(families.count(True), families.count(False)) > 1 and not versions.at_least(cni_version, _LISTS):
        raise InvalidNetworkConfigError(f"CNI version {cni_version} does not support more than 1 address per family")
