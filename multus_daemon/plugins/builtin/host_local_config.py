"""The configuration of host-local: ranges, requested addresses, routes, DNS; pure.

Keys, defaults, checks and messages are those of the reference plugin's documentation and behaviour
(containernetworking/plugins `plugins/ipam/host-local`, checked against the binary). The reference's errors all have
code 999; here they have the codes of the CNI SPEC.
"""

from __future__ import annotations

import ipaddress
import itertools
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from multus_daemon.plugins.builtin import contract
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni import result as cni_result
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    InvalidAnnotationError,
    InvalidEnvironmentError,
    InvalidNetworkConfigError,
    Origin,
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

DEFAULT_DATA_DIR: Final = "/var/lib/cni/networks"
RANGE_KEYS: Final = ("subnet", "rangeStart", "rangeEnd", "gateway")
IPAM_KEYS: Final = ("type", "name", "routes", "dataDir", "resolvConf", "ranges", *RANGE_KEYS)
# A range needs a network address, a gateway, an address for a pod (and in IPv4 a broadcast address).
_HOST_BITS_MIN: Final = 2
_NO_ADDRESS: Final = "IP <nil> not v4 nor v6"
_SHOWN: Final = 200
ASK_WHO: Final = f"`multusctl attachments` shows which pod has it: {contract.ASK}"


def ask_in_range(sets: Sequence[RangeSet]) -> str:
    """Return the remedy for requested addresses that are in no range set."""
    return f"{contract.ASK}, in the network's range {', '.join(map(str, sets))[:_SHOWN]}"


def check_directory(path: str) -> str:
    """Return the remedy for an unusable directory of reserved addresses."""
    return f"check mount, free space and permissions of {path} on the node, or set ipam.dataDir"


def text_of(value: int, version: int) -> str:
    """Return an address, given as a number, in the form that Go prints: it is the name of the address file."""
    if version == 4:
        return socket.inet_ntoa(value.to_bytes(4, "big"))
    return str(ipaddress.IPv6Address(value))


@dataclass(frozen=True, slots=True)
class Range:
    """Consecutive addresses of one subnet, from `first` to `last` inclusive, as numbers."""

    version: int
    prefix_length: int
    first: int
    last: int
    gateway: Address
    """Never given to a pod. For a DEL it may be outside the subnet, and of the other family."""

    def __contains__(self, address: Address) -> bool:
        """Return True if `address` is in the range, also if it is the gateway."""
        return address.version == self.version and self.first <= int(address) <= self.last

    def __str__(self) -> str:
        return f"{text_of(self.first, self.version)}-{text_of(self.last, self.version)}"

    def overlaps(self, other: Range) -> bool:
        """Return True if the ranges have an address in common."""
        return self.version == other.version and self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class RangeSet:
    """Ranges of one family that form one pool: an ADD reserves one address of each set."""

    ranges: tuple[Range, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.ranges))

    def range_of(self, address: Address) -> Range | None:
        """Return the range that contains `address`."""
        return next((candidate for candidate in self.ranges if address in candidate), None)


@dataclass(frozen=True, slots=True)
class HostLocalConfig:
    """The validated configuration of host-local, with paths of the host."""

    name: str
    """The network's name, and that of its directory in `data_dir`."""
    data_dir: str
    resolv_conf: str
    """Path of a resolv.conf for the result's DNS; empty: no DNS."""
    range_sets: tuple[RangeSet, ...]
    requested: tuple[Address, ...]
    routes: tuple[cni_result.Route, ...]


@dataclass(frozen=True, slots=True)
class _Draft:
    """A range as in the configuration; None for an absent key."""

    subnet: tuple[Address, int] | None
    """The subnet's address and prefix length."""
    first: Address | None
    last: Address | None
    gateway: Address | None


def read(fields: Mapping[str, Any], *, name: str, cni_version: str) -> HostLocalConfig:
    """Read a configuration.

    Raises DecodingFailureError (6) for a value of the wrong JSON type, InvalidNetworkConfigError (7) for all else.
    """
    try:
        ipam = gojson.get_object(fields, "ipam")
        if ipam is None:
            raise InvalidNetworkConfigError("IPAM config missing 'ipam' key")
        runtime, given = contract.requests(fields)
        legacy = _read_range(ipam)
        drafts = [
            *_read_sets(runtime, "ipRanges"),
            *([[legacy]] if legacy.subnet is not None else []),
            *_read_sets(ipam, "ranges"),
        ]
        data_dir = contract.path(ipam, "dataDir") or DEFAULT_DATA_DIR
        resolv_conf = contract.path(ipam, "resolvConf")
        wanted = [*(gojson.get_strings(given, "ips") or ()), *(gojson.get_strings(runtime, "ips") or ())]
        routes = contract.ipam_routes(ipam)
    except gojson.JsonError as error:
        raise DecodingFailureError(f"host-local: {error}", origin=Origin.NETWORK) from error
    requested = tuple([_requested(text) for text in wanted])
    return HostLocalConfig(name, data_dir, resolv_conf, _range_sets(drafts, cni_version), requested, routes)


def require_gateways(config: HostLocalConfig) -> None:
    """Raise InvalidNetworkConfigError for a gateway that is not in the subnet of its range."""
    for index, one in enumerate(config.range_sets):
        for item in one.ranges:
            bits = (32 if item.version == 4 else 128) - item.prefix_length
            if item.gateway.version != item.version or int(item.gateway) >> bits != item.first >> bits:
                network = f"{text_of(item.first >> bits << bits, item.version)}/{item.prefix_length}"
                raise InvalidNetworkConfigError(
                    f"invalid range set {index}: gateway {item.gateway} not in network {network}"
                )


def with_args(config: HostLocalConfig, args: str) -> HostLocalConfig:
    """Put `IP=` of CNI_ARGS in front of the requested addresses. Raises InvalidEnvironmentError (4)."""
    text = contract.own_args(args, ("IP",)).get("IP")
    if not text:
        return config
    try:
        return replace(config, requested=(_requested(text), *config.requested))
    except CniError as error:
        raise InvalidEnvironmentError(
            f'ARGS: error parsing value of pair "IP={text}": {error.msg}',
            "in CNI_ARGS, which have the cni-args of the annotation",
            origin=Origin.ANNOTATION,
        ) from error


def _requested(text: str) -> Address:
    """Read a requested address. A prefix length is ignored: the range has its own."""
    if not text:
        raise InvalidAnnotationError(f"cannot understand ip: {_NO_ADDRESS}", "a requested address is empty")
    try:
        address = str(contract.ip_prefix(text)[0]) if "/" in text else text
        return contract.ip_address(address)
    except ValueError as error:
        raise InvalidNetworkConfigError(f"invalid IP address {text}") from error


def _read_sets(fields: Mapping[str, Any], key: str) -> list[list[_Draft]]:
    sets = []
    for index, item in enumerate(gojson.get_list(fields, key) or ()):
        if not isinstance(item, list | None):
            raise gojson.JsonError(f"{key}[{index}]: an array of ranges is needed, not {gojson.kind_of(item)}")
        sets.append([_read_range(contract.as_object(entry, f"{key}[{index}]")) for entry in item or ()])
    return sets


def _read_range(fields: Mapping[str, Any]) -> _Draft:
    text = gojson.get_str(fields, "subnet")
    try:
        subnet = None if text is None else contract.ip_prefix(text)
    except ValueError as error:
        raise InvalidNetworkConfigError(
            f"invalid CIDR address: {text}", "subnet: a network with its prefix length is needed, e.g. 10.1.0.0/16"
        ) from error
    addresses: list[Address | None] = []
    for key in ("rangeStart", "rangeEnd", "gateway"):
        text = gojson.get_str(fields, key)
        try:
            addresses.append(contract.ip_address(text) if text else None)
        except ValueError as error:
            raise InvalidNetworkConfigError(
                f"invalid IP address: {text}", f"{key}: an address without prefix length is needed"
            ) from error
    return _Draft(subnet, *addresses)


def _range_sets(drafts: Sequence[Sequence[_Draft]], cni_version: str) -> tuple[RangeSet, ...]:
    if not drafts:
        advice = "set subnet or ranges of ipam in the network's configuration"
        raise InvalidNetworkConfigError("no IP ranges specified", remedy=advice)
    sets: list[RangeSet] = []
    ranges: list[Range] = []
    position_of_set: list[int] = []
    for index, draft in enumerate(drafts):
        with contract.prefixed(f"invalid range set {index}"):
            sets.append(_range_set(draft))
        ranges += sets[-1].ranges
        position_of_set += [index] * len(draft)
    contract.require_one_per_family([one.ranges[0].version == 4 for one in sets], cni_version)
    if len(sets) > 1 and (pair := _overlap(ranges)):
        first, second = sorted(position_of_set[position] for position in pair)
        raise InvalidNetworkConfigError(f"range set {first} overlaps with {second}")
    return tuple(sets)


def _range_set(drafts: Sequence[_Draft]) -> RangeSet:
    if not drafts:
        raise InvalidNetworkConfigError("empty range set")
    ranges: list[Range] = []
    for draft in drafts:
        ranges.append(_range(draft))
        if ranges[-1].version != ranges[0].version:
            raise InvalidNetworkConfigError("mixed address families")
    if len(ranges) > 1 and (pair := _overlap(ranges)):
        raise InvalidNetworkConfigError(f"subnets {ranges[pair[0]]} and {ranges[pair[1]]} overlap")
    return RangeSet(tuple(ranges))


def _overlap(ranges: Sequence[Range]) -> tuple[int, int] | None:
    """Return the positions of two ranges that overlap, in order; None if no two do.

    Neighbours in the sorted order are enough: a configuration can have thousands.
    """
    order = sorted(range(len(ranges)), key=lambda at: (ranges[at].version, ranges[at].first, at))
    pairs = ((min(pair), max(pair)) for pair in itertools.pairwise(order) if ranges[pair[0]].overlaps(ranges[pair[1]]))
    return min(pairs, default=None)


def _range(draft: _Draft) -> Range:
    if draft.subnet is None:
        raise InvalidNetworkConfigError(_NO_ADDRESS, "a range needs a 'subnet'")
    address, length = draft.subnet
    version, host_bits = address.version, address.max_prefixlen - length
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        raise InvalidNetworkConfigError(
            "IPNet IP and Mask version mismatch", f"write {address}/{length} as an IPv4 network"
        )
    if host_bits < _HOST_BITS_MIN:
        raise InvalidNetworkConfigError(f"Network {address}/{length} too small to allocate from")
    base = int(address) >> host_bits << host_bits
    if base != int(address):
        right = text_of(base, version)
        raise InvalidNetworkConfigError(
            f"Network has host bits set. For a subnet mask of length {length} the network address is {right}",
            f"subnet {address}/{length}: write {right}/{length}",
        )
    gateway = draft.gateway if draft.gateway is not None else type(address)(base + 1)
    whole = Range(version, length, base, base + (1 << host_bits) - 1, gateway)
    # The range includes the gateway, which is usually the first address, and excludes an IPv4 broadcast address.
    first, last = base + 1, whole.last - (1 if version == 4 else 0)
    if draft.first is not None:
        # An end before the start makes the range empty: then the start is what is not in it.
        empty = draft.last is not None and draft.last.version == version and int(draft.last) < int(draft.first)
        if draft.first not in whole or empty:
            advice = f"rangeStart is after rangeEnd {draft.last}: correct one in the network's configuration"
            problem = f"RangeStart {draft.first} not in network {address}/{length}"
            raise InvalidNetworkConfigError(problem, remedy=advice if empty else "")
        first = int(draft.first)
    if draft.last is not None:
        if draft.last not in whole or int(draft.last) < first:
            raise InvalidNetworkConfigError(f"RangeEnd {draft.last} not in network {address}/{length}")
        last = int(draft.last)
    return Range(version, length, first, last, gateway)
