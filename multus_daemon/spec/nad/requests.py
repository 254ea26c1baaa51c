"""What a selection element asks of its network: addresses, ports, bandwidth (NPWG multi-network SPEC 4.1.2.1.3 to .10).

Each function reads one key of a JSON object and raises gojson.JsonError for a wrong type, InvalidNetworkConfigError
for a value that can't be.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError

PROTOCOLS: Final = ("tcp", "udp", "sctp")
BANDWIDTH_KEYS: Final = ("ingressRate", "ingressBurst", "egressRate", "egressBurst")
PORT_MAPPING_KEYS: Final = ("hostPort", "containerPort", "protocol", "hostIP")
# What fits the 64-bit integers of the plugins that read it.
_BANDWIDTH_MAX: Final = 2**63 - 1
_GATEWAYS_MAX: Final = 16
# Go's net.ParseMAC: pairs with one kind of separator, or groups of four with dots.
_HARDWARE_ADDRESS: Final = re.compile(
    r"[0-9a-f]{2}(:[0-9a-f]{2})+|[0-9a-f]{2}(-[0-9a-f]{2})+|[0-9a-f]{4}(\.[0-9a-f]{4})+", re.ASCII | re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class PortMapping:
    """A port of the host that leads to one of the pod."""

    host_port: int
    container_port: int
    protocol: str = "tcp"
    host_ip: str = ""

    def to_object(self) -> dict[str, Any]:
        """As in runtimeConfig (CNI CONVENTIONS)."""
        fields: dict[str, Any] = {
            "hostPort": self.host_port,
            "containerPort": self.container_port,
            "protocol": self.protocol,
        }
        return fields | ({"hostIP": self.host_ip} if self.host_ip else {})


def ips(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """`ips`: addresses with or without prefix length. An empty list counts as absent, as upstream takes it."""
    found = gojson.get_strings(fields, "ips") or ()
    for index, text in enumerate(found):
        if not _is_ip(text, prefix_allowed=True):
            raise InvalidNetworkConfigError(
                f"ips[{index}]: {text[:80]!r} is neither an IP address nor one in CIDR form"
            )
    return tuple(found)


def mac(fields: Mapping[str, Any]) -> str:
    """`mac`: an Ethernet address. Upstream takes 8 and 20 bytes too; no plugin could set such an address."""
    return _hardware_address(fields, "mac", 6, "an Ethernet address of 6 bytes")


def infiniband_guid(fields: Mapping[str, Any]) -> str:
    """`infiniband-guid`: 8 bytes. Upstream takes 6 too."""
    return _hardware_address(fields, "infiniband-guid", 8, "a GUID of 8 bytes")


def port_mappings(fields: Mapping[str, Any]) -> tuple[PortMapping, ...]:
    """`portMappings`; the protocol in lower case, TCP where it is not said."""
    return tuple(
        _port_mapping(item, f"portMappings[{index}]")
        for index, item in enumerate(gojson.get_list(fields, "portMappings") or ())
    )


def bandwidth(fields: Mapping[str, Any]) -> dict[str, int] | None:
    """`bandwidth`: those limits that are not zero; None where the key is absent."""
    given = gojson.get_object(fields, "bandwidth")
    if given is None:
        return None
    try:
        limits = {key: gojson.get_int(given, key) or 0 for key in BANDWIDTH_KEYS}
    except gojson.JsonError as error:
        raise gojson.JsonError(f"bandwidth.{error}") from error
    for key, value in limits.items():
        if not 0 <= value <= _BANDWIDTH_MAX:
            raise InvalidNetworkConfigError(f"bandwidth.{key}: {value} is out of range", f"0 to {_BANDWIDTH_MAX}")
    for direction in ("ingress", "egress"):
        if limits[f"{direction}Burst"] and not limits[f"{direction}Rate"]:
            raise InvalidNetworkConfigError(f"bandwidth.{direction}Burst needs {direction}Rate")
    if not any(limits.values()):
        raise InvalidNetworkConfigError(f"bandwidth: at least one of {', '.join(BANDWIDTH_KEYS)} must be above 0")
    return {key: value for key, value in limits.items() if value}


def default_route(fields: Mapping[str, Any]) -> tuple[str, ...] | None:
    """`default-route`: gateways; None where the key is absent or null, empty for an empty list.

    Raises InvalidNetworkConfigError for more than 16 and for addresses that no router has.
    """
    found = gojson.get_strings(fields, "default-route")
    if found is None:
        return None
    if len(found) > _GATEWAYS_MAX:
        raise InvalidNetworkConfigError(
            f"default-route: {len(found)} gateways, and at most {_GATEWAYS_MAX} are allowed"
        )
    for index, text in enumerate(found):
        if not _is_ip(text, prefix_allowed=False):
            raise InvalidNetworkConfigError(f"default-route[{index}]: {text[:80]!r} is no IP address")
        address = ipaddress.ip_address(text)
        if address.is_unspecified or address.is_multicast or address.is_loopback:
            raise InvalidNetworkConfigError(f"default-route[{index}]: {text!r} can't be a gateway")
    return tuple(found)


def _port_mapping(item: Any, where: str) -> PortMapping:
    if not isinstance(item, dict):
        raise gojson.JsonError(f"{where}: an object is needed, not {gojson.kind_of(item)}")
    try:
        protocol = (gojson.get_str(item, "protocol") or "tcp").lower()
        host_ip = gojson.get_str(item, "hostIP") or ""
        ports = {key: gojson.get_int(item, key) for key in ("hostPort", "containerPort")}
    except gojson.JsonError as error:
        raise gojson.JsonError(f"{where}.{error}") from error
    for key, port in ports.items():
        if port is None or not 1 <= port <= 65535:
            raise InvalidNetworkConfigError(f"{where}.{key}: a port from 1 to 65535 is needed, not {port}")
    if protocol not in PROTOCOLS:
        raise InvalidNetworkConfigError(f"{where}.protocol: {protocol[:80]!r} is none of {', '.join(PROTOCOLS)}")
    if host_ip and not _is_ip(host_ip, prefix_allowed=False):
        raise InvalidNetworkConfigError(f"{where}.hostIP: {host_ip[:80]!r} is no IP address")
    return PortMapping(ports["hostPort"] or 0, ports["containerPort"] or 0, protocol, host_ip)


def _hardware_address(fields: Mapping[str, Any], key: str, size: int, wanted: str) -> str:
    text = gojson.get_str(fields, key) or ""
    if text and not (_HARDWARE_ADDRESS.fullmatch(text) and len(re.sub("[:.-]", "", text)) == 2 * size):
        raise InvalidNetworkConfigError(f"{key}: {text[:80]!r} is not {wanted}")
    return text


def _is_ip(text: str, *, prefix_allowed: bool) -> bool:
    """As Go's ParseIP and ParseCIDR: no zone, no netmask in place of the length."""
    address, slash, length = text.partition("/")
    if slash and not (prefix_allowed and length.isascii() and length.isdigit()):
        return False
    try:
        ipaddress.ip_interface(text)
    except ValueError:
        return False
    return "%" not in address
