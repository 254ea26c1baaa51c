"""`static`: the IPAM plugin that returns the addresses of its configuration (plugins `plugins/ipam/static`).

Precedence, checks, messages and details are the reference plugin's; codes are those of the CNI SPEC. Pure: it keeps no
state, so DEL does nothing, and two containers may get one address.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any, Final

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import configuration
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.spec.cni import gojson, versions
from multus_daemon.spec.cni.errors import (
    IncompatibleVersionError,
    InternalError,
    InvalidEnvironmentError,
    InvalidNetworkConfigError,
)
from multus_daemon.spec.cni.result import IpConfig, Result, cidr, read_dns

_IPAM_KEYS: Final = ("type", "name", "addresses", "routes", "dns")
# `version` is a key of CNI 0.3 that is still written and never read.
_ADDRESS_KEYS: Final = ("address", "gateway", "version")
# The first version whose results can hold any number of addresses.
_LISTS: Final = "0.3.0"


def unsupported(call: Call) -> str:
    """Name the first key of `ipam` that this plugin does not know; other keys belong to the calling plugin."""
    ipam = gojson.get_object(call.fields, "ipam") or {}
    if unknown := configuration.unknown_key(ipam, _IPAM_KEYS, within="ipam."):
        return unknown
    for item in gojson.get_list(ipam, "addresses") or ():
        if isinstance(item, dict) and (
            unknown := configuration.unknown_key(item, _ADDRESS_KEYS, within="ipam.addresses: ")
        ):
            return unknown
    return ""


def validate(call: Call) -> None:
    """Read the configuration. Raises IncompatibleVersionError if the version's result can't be without address."""
    if not _read(call).ips and not versions.at_least(call.cni_version, _LISTS):
        raise IncompatibleVersionError("cannot convert: no valid IP addresses")


def add(call: Call, netns: PodNetns) -> Result:
    """Return the addresses, routes and DNS settings."""
    validate(call)
    return _read(call)


def delete(call: Call, netns: PodNetns) -> None:
    """Do nothing; the configuration is not read."""


def check(call: Call, netns: PodNetns) -> None:
    """Compare the configured gateways with those of prevResult.

    As in the reference, a configured address may be absent from prevResult.
    """
    configured = _read(call)
    if call.prev_result is None:
        raise InvalidNetworkConfigError("Required prevResult missing")
    present: dict[str, IpConfig] = {}
    for item in call.prev_result.ips:
        present.setdefault(item.ip, item)
    for ip in configured.ips:
        given = present.get(ip.ip)
        if given is not None and ip.gateway and ip.gateway != given.gateway:
            raise InternalError(f"static: Failed to match addr {ip.ip} on interface {call.invocation.ifname}")


def _read(call: Call) -> Result:
    """Read the configuration: runtimeConfig, else args, else CNI_ARGS together with `addresses`.

    Raises DecodingFailureError (6), InvalidEnvironmentError (4) for CNI_ARGS, InvalidNetworkConfigError (7).
    """
    with configuration.reading("", "static"):
        ipam = gojson.get_object(call.fields, "ipam")
        if ipam is None:
            raise InvalidNetworkConfigError("IPAM config missing 'ipam' key")
        runtime, given = configuration.requests(call.fields)
        configured = [_written(item) for item in gojson.get_list(ipam, "addresses") or ()]
        by_runtime = gojson.get_strings(runtime, "ips") or ()
        by_args = gojson.get_strings(given, "ips") or ()
        routes = configuration.ipam_routes(ipam)
        dns = read_dns(gojson.get_object(ipam, "dns") or {})
    by_environment = _by_environment(call.invocation.args)
    # All requests are checked, also those without effect, as in the reference.
    ips_of_args = [IpConfig(_cidr(text, "an entry in the 'ips' field is NOT in CIDR notation")) for text in by_args]
    ips = [IpConfig(_cidr(text, "an entry in the 'ips' field is NOT in CIDR notation")) for text in by_runtime]
    ips = ips or ips_of_args
    if not ips:
        for ip in configured:
            address = _cidr(ip.address, "the 'address' field is expected to be in CIDR notation")
            ips.append(IpConfig(address, ip.gateway))
        ips += by_environment
    configuration.require_one_per_family([ip.is_ipv4 for ip in ips], call.cni_version)
    return Result(ips=tuple(ips), routes=routes, dns=dns)


def _written(item: Any) -> IpConfig:
    """Return an entry of `addresses`; its address is not checked yet."""
    fields = configuration.as_object(item, "addresses")
    gateway = gojson.get_str(fields, "gateway")
    try:
        given = str(configuration.ip_address(gateway)) if gateway else ""
    except ValueError as error:
        raise gojson.JsonError(f"addresses.gateway: invalid IP address: {gateway}") from error
    return IpConfig(gojson.get_str(fields, "address") or "", given)


def _cidr(text: str, problem: str) -> str:
    try:
        return cidr(text, "address")
    except gojson.JsonError as error:
        raise InvalidNetworkConfigError(f"{problem}, got: '{text}'") from error


def _by_environment(args: str) -> Sequence[IpConfig]:
    """Return the addresses of `IP=` in CNI_ARGS, each with the last address of `GATEWAY=` in its network.

    Both keys hold items that are separated by commas.
    """
    given = configuration.own_args(args, ("IP", "GATEWAY"))
    try:
        problem = "the 'ip' field is expected to be in CIDR notation"
        addresses = [_cidr(text, problem) for text in _items(given.get("IP", ""))]
    except InvalidNetworkConfigError as error:
        raise InvalidEnvironmentError(error.msg) from error
    gateways = []
    for text in _items(given.get("GATEWAY", "")):
        try:
            gateways.append(configuration.ip_address(text))
        except ValueError as error:
            raise InvalidEnvironmentError(f"invalid gateway address: {text}") from error
    ips = []
    for address in addresses:
        network = ipaddress.ip_interface(address).network
        ips.append(IpConfig(address, next((str(item) for item in reversed(gateways) if item in network), "")))
    return ips


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")] if text else []
