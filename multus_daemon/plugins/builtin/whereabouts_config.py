"""The configuration of whereabouts: ranges, fixed addresses, routes, DNS, and the file that completes it; pure.

Keys and their meaning are those of k8snetworkplumbingwg/whereabouts v0.9.4 (`pkg/config`), which is compared in
`tests/contract/test_whereabouts_reference.py`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon.plugins.builtin import contract, static
from multus_daemon.spec.addresses import Address, AddressRange, Network, pool_name
from multus_daemon.spec.cni import gojson, names
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError, UnsupportedFieldError
from multus_daemon.spec.cni.result import Dns, IpConfig, Route, read_dns

FILES: Final = (
    "/etc/kubernetes/cni/net.d/whereabouts.d/whereabouts.conf",
    "/etc/cni/net.d/whereabouts.d/whereabouts.conf",
)
"""Where whereabouts' installer writes the file whose keys count if `ipam` lacks them."""
_ENDS: Final = ("range_start", "range_end")
RANGE_KEYS: Final = ("range", *_ENDS, "exclude")
ADDRESS_KEYS: Final = ("address", "gateway", "version")
_SLICES: Final = "node_slice_size"
OVERLAPPING: Final = "enable_overlapping_ranges"
_WITHOUT_EFFECT: Final = (
    # Of the lock, the log and the reconciler of the binary. The daemon has its own access to the API server.
    *("kubernetes", "leader_lease_duration", "leader_renew_deadline", "leader_retry_period", "sleep_for_race"),
    *("log_file", "log_level", "reconciler_cron_expression"),
    # Of releases with a store in etcd; the binary ignores them, too.
    *("datastore", "etcd_host", "etcd_username", "etcd_password", "etcd_key_file", "etcd_cert_file"),
    *("etcd_ca_cert_file", "name", "podname", "podnamespace"),
)
IPAM_KEYS: Final = (
    *("type", "routes", "addresses", "ipRanges", "dns", "gateway", OVERLAPPING, "network_name"),
    *("configuration_path", *RANGE_KEYS, *_WITHOUT_EFFECT),
)
_ZEROS: Final = re.compile(r"(?<![\w:])0+(?=\d)")
_ADVICE: Final = "write a network with its prefix length, such as 10.1.0.0/16"


@dataclass(frozen=True, slots=True)
class Config:
    """The section `ipam`, completed by the file of the node."""

    ranges: tuple[AddressRange, ...]
    fixed: tuple[IpConfig, ...]
    """`addresses`, which every pod gets."""
    gateway: str
    routes: tuple[Route, ...]
    dns: Dns


def unsupported(ipam: Mapping[str, Any]) -> str:
    """Return the first key of `ipam` that is not known, empty if there is none. Raises JsonError."""
    if gojson.get_str(ipam, _SLICES):
        # The address comes from a slice that a controller has given to the node.
        return f"{_SLICES}: {contract.shown(gojson.get_str(ipam, _SLICES))}"
    if unknown := contract.unknown_key(ipam, (*IPAM_KEYS, _SLICES), within="ipam."):
        return unknown
    for key, known in (("ipRanges", RANGE_KEYS), ("addresses", ADDRESS_KEYS)):
        for item in gojson.get_list(ipam, key) or ():
            if unknown := contract.unknown_key(contract.as_object(item, key), known, within=f"ipam.{key}: "):
                return unknown
    return ""


def completed(ipam: Mapping[str, Any], file: bytes) -> Mapping[str, Any]:
    """Return `ipam` with the keys of the node's file that it lacks. Raises JsonError, UnsupportedFieldError."""
    own = {key.lower(): value for key, value in ipam.items() if value}
    other = {key.lower(): value for key, value in gojson.loads_object(file).items() if value}
    if isinstance(dns := other.get("dns"), dict) and isinstance(own.get("dns"), dict):
        own["dns"] = {**dns, **{key: value for key, value in own["dns"].items() if value}}
    if other.get(_SLICES):
        raise UnsupportedFieldError(
            f"{_SLICES} in the node's file whereabouts.conf is not supported by the built-in whereabouts",
            remedy=f"remove {_SLICES} from the file, or install the whereabouts binary in the CNI bin directory",
        )
    # As in the binary, only the network says whether ranges may overlap.
    return {**other, **own, OVERLAPPING: gojson.get(ipam, OVERLAPPING)}


def read(ipam: Mapping[str, Any]) -> Config:
    """Read the section `ipam`, completed. Raises JsonError, InvalidNetworkConfigError."""
    name = gojson.get_str(ipam, "network_name") or ""
    if name and (problem := names.subdomain_problem(name)):
        raise InvalidNetworkConfigError(f"network_name: {contract.shown(name)} {problem}")
    gateway = gojson.get_str(ipam, "gateway") or ""
    given = _address(gateway) if gateway else None
    if gateway and given is None:
        raise InvalidNetworkConfigError(f"couldn't parse gateway IP: {contract.shown(gateway)}")
    return Config(
        tuple(_ranges(ipam, name)),
        tuple(static.checked(map(static.written, gojson.get_list(ipam, "addresses") or ()))),
        "" if given is None else str(given),
        contract.ipam_routes(ipam),
        read_dns(gojson.get_object(ipam, "dns") or {}),
    )


def _ranges(ipam: Mapping[str, Any], name: str) -> Iterator[AddressRange]:
    # Unless the network says so, an address is held in all ranges that have it.
    is_apart = gojson.get_bool(ipam, OVERLAPPING) is False
    for network, spans in _given(ipam):
        pool = pool_name(str(network), name)
        yield AddressRange(network, spans, pool if is_apart else name, pool)


def _given(ipam: Mapping[str, Any]) -> Iterator[tuple[Network, tuple[range, ...]]]:
    if gojson.get_str(ipam, "range"):
        # The binary ignores a start or an end of it that it cannot read.
        yield _range(ipam, *(_address(gojson.get_str(ipam, key) or "") for key in _ENDS))
    for item in gojson.get_list(ipam, "ipRanges") or ():
        fields = contract.as_object(item, "ipRanges")
        texts = [gojson.get_str(fields, key) for key in _ENDS]
        try:
            ends = [contract.ip_address(text) if text else None for text in texts]
        except ValueError as error:
            raise InvalidNetworkConfigError(f"ipRanges: invalid IP address {error}", " and ".join(_ENDS)) from error
        yield _range(fields, *ends)


def _range(fields: Mapping[str, Any], start: Address | None, end: Address | None) -> tuple[Network, tuple[range, ...]]:
    text = gojson.get_str(fields, "range") or ""
    before, hyphen, behind = text.partition("-")
    if hyphen:
        start = _address(before)
        if start is None:
            raise InvalidNetworkConfigError(f"invalid range start IP: {contract.shown(before)}")
    address, length = _cidr(behind if hyphen else text, "range")
    network = ipaddress.ip_network(f"{address}/{length}", strict=False)
    if hyphen:
        end = address
        if start not in network:
            raise InvalidNetworkConfigError(f"invalid range start for CIDR {network}: {start}")
    if network.max_prefixlen - network.prefixlen < 2:
        raise InvalidNetworkConfigError(
            f"net mask is too short, subnet {network} has no usable IP addresses, it is too small"
        )
    # As in the binary, also an IPv6 network's first and last address are given to nobody.
    low, high = int(network.network_address) + 1, int(network.broadcast_address) - 1
    first = int(start) if start is not None and low <= int(start) <= high else low
    last = int(end) if end is not None and first <= int(end) <= high else high
    without = [
        (int(each[0]), int(each[-1]))
        for each in map(_excluded, gojson.get_strings(fields, "exclude") or ())
        if each.version == network.version
    ]
    return network, tuple(_spans(first, last, without))


def _spans(first: int, last: int, excluded: Iterable[tuple[int, int]]) -> Iterator[range]:
    """Yield what is left between `first` and `last` without these intervals; all of them are inclusive."""
    for low, high in sorted(excluded):
        if first < low <= last:
            yield range(first, low)
        first = max(first, high + 1) if low <= last else first
    if first <= last:
        yield range(first, last + 1)


def _excluded(text: str) -> Network:
    try:
        address, length = _prefix(text) if "/" in text else (contract.ip_address(text), 128)
        return ipaddress.ip_network(f"{address}/{min(length, address.max_prefixlen)}", strict=False)
    except ValueError as error:
        raise InvalidNetworkConfigError(f"could not parse exclude range {contract.shown(text)}", _ADVICE) from error


def _cidr(text: str, key: str) -> tuple[Address, int]:
    try:
        return _prefix(_ZEROS.sub("", text))
    except ValueError as error:
        raise InvalidNetworkConfigError(f"invalid CIDR {contract.shown(text)}", key, remedy=_ADVICE) from error


def _prefix(text: str) -> tuple[Address, int]:
    """Read a network: `::ffff:10.9.0.0/112` is IPv4, as in Go. Raises ValueError."""
    address, length = contract.ip_prefix(text)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) and length >= 96 else None
    return (mapped, length - 96) if mapped else (address, length)


def _address(text: str) -> Address | None:
    """Return the address; zeros in front of a number of IPv4 are ignored, as in the binary. None if it is none."""
    try:
        return contract.ip_address(_ZEROS.sub("", text))
    except ValueError:
        return None
