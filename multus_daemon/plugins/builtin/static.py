"""`static`: the IPAM plugin that returns the addresses of its configuration (plugins `plugins/ipam/static`).

Precedence, checks, messages and details are the reference plugin's; codes are those of the CNI SPEC. It has no state,
so DEL does nothing, and two containers may get the same address.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import contract
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.spec.cni import gojson, versions
from multus_daemon.spec.cni.errors import (
    ChangedError,
    IncompatibleVersionError,
    InvalidEnvironmentError,
    InvalidNetworkConfigError,
    Origin,
)
from multus_daemon.spec.cni.result import IpConfig, Result, cidr, read_dns

_IPAM_KEYS: Final = ("type", "name", "addresses", "routes", "dns")
# `version` is a key of CNI 0.3 that is still written and never read.
_ADDRESS_KEYS: Final = ("address", "gateway", "version")
# The first version whose results can hold any number of addresses.
_LISTS: Final = "0.3.0"


def unsupported(call: Call) -> str:
    """Return the first unknown key of `ipam`, empty if none; keys outside of `ipam` belong to the calling plugin."""
    ipam = gojson.get_object(call.fields, "ipam") or {}
    if unknown := contract.unknown_key(ipam, _IPAM_KEYS, within="ipam."):
        return unknown
    for item in gojson.get_list(ipam, "addresses") or ():
        if isinstance(item, dict) and (unknown := contract.unknown_key(item, _ADDRESS_KEYS, within="ipam.addresses: ")):
            return unknown
    return ""


def read(call: Call) -> Result:
    """Read the configuration. Raises IncompatibleVersionError without an address that its version's result needs."""
    configured = _read(call)
    if not configured.ips and not versions.at_least(call.cni_version, _LISTS):
        raise IncompatibleVersionError("cannot convert: no valid IP addresses")
    return configured


def add(call: Call, netns: PodNetns) -> Result:
    """Return the addresses, routes and DNS settings."""
    return read(call)


def delete(call: Call, netns: PodNetns) -> None:
    """Do nothing; the configuration is not read."""


def check(call: Call, netns: PodNetns) -> None:
    """Compare the configured gateways with those of prevResult.

    As in the reference, a configured address may be absent from prevResult.
    """
    configured = _read(call)
    if call.prev_result is None:
        raise InvalidNetworkConfigError("Required prevResult missing")
    present = {item.ip: item for item in reversed(call.prev_result.ips)}
    for ip in configured.ips:
        given = present.get(ip.ip)
        if given is not None and ip.gateway and ip.gateway != given.gateway:
            raise ChangedError(f"static: Failed to match addr {ip.ip} on interface {call.invocation.ifname}")


def _read(call: Call) -> Result:
    """Read the configuration: runtimeConfig, else args, else CNI_ARGS together with `addresses`.

    Raises DecodingFailureError (6), InvalidEnvironmentError (4) for CNI_ARGS, InvalidNetworkConfigError (7).
    """
    with contract.reading("", "static"):
        ipam = gojson.get_object(call.fields, "ipam")
        if ipam is None:
            raise InvalidNetworkConfigError("IPAM config missing 'ipam' key")
        runtime, given = contract.requests(call.fields)
        configured = [written(item) for item in gojson.get_list(ipam, "addresses") or ()]
        by_runtime = gojson.get_strings(runtime, "ips") or ()
        by_argument = gojson.get_strings(given, "ips") or ()
        routes = contract.ipam_routes(ipam)
        dns = read_dns(gojson.get_object(ipam, "dns") or {})
    by_environment = by_args(call.invocation.args)
    # All requests are checked, also those without effect, as in the reference.
    ips_of_args = [IpConfig(_cidr(text, "an entry in the 'ips' field is NOT in CIDR notation")) for text in by_argument]
    ips = [IpConfig(_cidr(text, "an entry in the 'ips' field is NOT in CIDR notation")) for text in by_runtime]
    ips = ips or ips_of_args
    if not ips:
        ips = [*checked(configured), *by_environment]
    contract.require_one_per_family([ip.is_ipv4 for ip in ips], call.cni_version)
    return Result(ips=tuple(ips), routes=routes, dns=dns)


def written(item: Any) -> IpConfig:
    """Read an item of `addresses`, without checking its address."""
    fields = contract.as_object(item, "addresses")
    gateway = gojson.get_str(fields, "gateway")
    try:
        given = str(contract.ip_address(gateway)) if gateway else ""
    except ValueError as error:
        raise gojson.JsonError(f"addresses.gateway: invalid IP address: {gateway}") from error
    return IpConfig(gojson.get_str(fields, "address") or "", given)


def checked(configured: Iterable[IpConfig]) -> Iterator[IpConfig]:
    """Yield each entry of `addresses` with its address as Go writes it. Raises InvalidNetworkConfigError."""
    for ip in configured:
        address = _cidr(ip.address, "the 'address' field is expected to be in CIDR notation")
        yield IpConfig(address, ip.gateway)


def _cidr(text: str, problem: str) -> str:
    try:
        return cidr(text, "address")
    except gojson.JsonError as error:
        raise InvalidNetworkConfigError(f"{problem}, got: '{text}'", remedy=contract.WITH_LENGTH) from error


def by_args(args: str) -> Sequence[IpConfig]:
    """Return the addresses of `IP=` in CNI_ARGS, each with the last address of `GATEWAY=` in its network.

    Both keys have several values, separated by commas.
    """
    given = contract.own_args(args, ("IP", "GATEWAY"))
    try:
        problem = "the 'ip' field is expected to be in CIDR notation"
        addresses = [_cidr(text, problem) for text in _items(given.get("IP", ""))]
    except InvalidNetworkConfigError as error:
        raise InvalidEnvironmentError(error.msg, remedy=error.remedy, origin=Origin.ANNOTATION) from error
    gateways = []
    for text in _items(given.get("GATEWAY", "")):
        try:
            gateways.append(contract.ip_address(text))
        except ValueError as error:
            raise InvalidEnvironmentError(f"invalid gateway address: {text}", origin=Origin.ANNOTATION) from error
    ips = []
    for address in addresses:
        network = ipaddress.ip_interface(address).network
        ips.append(IpConfig(address, next((str(item) for item in reversed(gateways) if item in network), "")))
    return ips


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")] if text else []
