"""Requests of a selection element: addresses, ports, bandwidth (NPWG multi-network SPEC 4.1.2.1.3 to .10).

Each function reads one key of a JSON object. Raises gojson.JsonError for a wrong type, InvalidNetworkConfigError for an
invalid value.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any, Final

from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import InvalidAnnotationError
from multus_daemon.spec.cni.names import mac_address

PROTOCOLS: Final = ("tcp", "udp", "sctp")
BANDWIDTH_KEYS: Final = ("ingressRate", "ingressBurst", "egressRate", "egressBurst")
PORT_MAPPING_KEYS: Final = ("hostPort", "containerPort", "protocol", "hostIP")
# The largest 64-bit integer of the plugins.
_BANDWIDTH_MAX: Final = 2**63 - 1
_GATEWAYS_MAX: Final = 16


def ips(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return `ips`: addresses with or without prefix length. As upstream, an empty list means absent."""
    values = gojson.get_strings(fields, "ips") or ()
    for index, text in enumerate(values):
        if not _is_ip(text, prefix_allowed=True):
            raise InvalidAnnotationError(f"ips[{index}]: {text[:80]!r} is neither an IP address nor one in CIDR form")
    return tuple(values)


def mac(fields: Mapping[str, Any]) -> str:
    """Return `mac`, an Ethernet address. Upstream also accepts 8 and 20 bytes, which no plugin could set."""
    return _hardware_address(fields, "mac", 6, "an Ethernet address of 6 bytes")


def infiniband_guid(fields: Mapping[str, Any]) -> str:
    """Return `infiniband-guid`, 8 bytes. Upstream also accepts 6."""
    return _hardware_address(fields, "infiniband-guid", 8, "a GUID of 8 bytes")


def port_mappings(fields: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return `portMappings` as runtimeConfig has them (CNI CONVENTIONS); the protocol in lower case, TCP by default."""
    return tuple(
        _port_mapping(item, f"portMappings[{index}]")
        for index, item in enumerate(gojson.get_list(fields, "portMappings") or ())
    )


def bandwidth(fields: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the limits of `bandwidth` that are not zero; None if the key is absent."""
    given = gojson.get_object(fields, "bandwidth")
    if given is None:
        return None
    try:
        limits = {key: gojson.get_int(given, key) or 0 for key in BANDWIDTH_KEYS}
    except gojson.JsonError as error:
        raise gojson.JsonError(f"bandwidth.{error}") from error
    for key, value in limits.items():
        if not 0 <= value <= _BANDWIDTH_MAX:
            raise InvalidAnnotationError(f"bandwidth.{key}: {value} is out of range", f"0 to {_BANDWIDTH_MAX}")
    for direction in ("ingress", "egress"):
        if limits[f"{direction}Burst"] and not limits[f"{direction}Rate"]:
            raise InvalidAnnotationError(f"bandwidth.{direction}Burst needs {direction}Rate")
    if not any(limits.values()):
        raise InvalidAnnotationError(f"bandwidth: at least one of {', '.join(BANDWIDTH_KEYS)} must be above 0")
    return {key: value for key, value in limits.items() if value}


def default_route(fields: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the gateways of `default-route`; None if the key is absent or null.

    Raises InvalidNetworkConfigError for more than 16 and for addresses that no router has.
    """
    gateways = gojson.get_strings(fields, "default-route")
    if gateways is None:
        return None
    if len(gateways) > _GATEWAYS_MAX:
        raise InvalidAnnotationError(
            f"default-route: {len(gateways)} gateways, and at most {_GATEWAYS_MAX} are allowed"
        )
    for index, text in enumerate(gateways):
        if not _is_ip(text, prefix_allowed=False):
            raise InvalidAnnotationError(f"default-route[{index}]: {text[:80]!r} is not an IP address")
        address = ipaddress.ip_address(text)
        if address.is_unspecified or address.is_multicast or address.is_loopback:
            raise InvalidAnnotationError(f"default-route[{index}]: {text!r} can't be a gateway")
    return tuple(gateways)


def _port_mapping(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise gojson.JsonError(f"{where}: an object is needed, not {gojson.kind_of(item)}")
    try:
        protocol = (gojson.get_str(item, "protocol") or "tcp").lower()
        host_ip = gojson.get_str(item, "hostIP") or ""
        mapping: dict[str, Any] = {key: gojson.get_int(item, key) for key in ("hostPort", "containerPort")}
    except gojson.JsonError as error:
        raise gojson.JsonError(f"{where}.{error}") from error
    for key, port in mapping.items():
        if port is None or not 1 <= port <= 65535:
            raise InvalidAnnotationError(f"{where}.{key}: a port from 1 to 65535 is needed, not {port}")
    if protocol not in PROTOCOLS:
        raise InvalidAnnotationError(f"{where}.protocol: {protocol[:80]!r} is none of {', '.join(PROTOCOLS)}")
    if host_ip and not _is_ip(host_ip, prefix_allowed=False):
        raise InvalidAnnotationError(f"{where}.hostIP: {host_ip[:80]!r} is not an IP address")
    return mapping | {"protocol": protocol} | ({"hostIP": host_ip} if host_ip else {})


def _hardware_address(fields: Mapping[str, Any], key: str, size: int, wanted: str) -> str:
    text = gojson.get_str(fields, key) or ""
    if text and not mac_address(text, size):
        raise InvalidAnnotationError(f"{key}: {text[:80]!r} is not {wanted}")
    return text


def _is_ip(text: str, *, prefix_allowed: bool) -> bool:
    """Return True for an address that Go's ParseIP accepts, or ParseCIDR if `prefix_allowed`: no zone, no netmask."""
    address, slash, length = text.partition("/")
    if slash and not (prefix_allowed and length.isascii() and length.isdigit()):
        return False
    try:
        ipaddress.ip_interface(text)
    except ValueError:
        return False
    return "%" not in address
