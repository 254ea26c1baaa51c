"""The configuration of host-local: ranges, requested addresses, routes, DNS; pure.

Keys, defaults, checks and messages are those of the reference plugin's documentation and behaviour
(containernetworking/plugins `plugins/ipam/host-local`, checked against the binary). Every error of the reference has
code 999; here it has the code of the CNI SPEC.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from multus_daemon.plugins.builtin import configuration
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni import result as cni_result
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    InvalidEnvironmentError,
    InvalidNetworkConfigError,
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

DEFAULT_DATA_DIR: Final = "/var/lib/cni/networks"
RANGE_KEYS: Final = ("subnet", "rangeStart", "rangeEnd", "gateway")
IPAM_KEYS: Final = ("type", "name", "routes", "dataDir", "resolvConf", "ranges", *RANGE_KEYS)
# A range needs a network address, a gateway, an address for a pod (and in IPv4 a broadcast address).
_HOST_BITS_MIN: Final = 2
_NO_ADDRESS: Final = "IP <nil> not v4 nor v6"


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
    """Never given to a pod. It may be outside the subnet, and of the other family."""

    def __contains__(self, address: Address) -> bool:
        """Report whether `address` is in the range, which may include the gateway."""
        return address.version == self.version and self.first <= int(address) <= self.last

    def __str__(self) -> str:
        return f"{text_of(self.first, self.version)}-{text_of(self.last, self.version)}"

    def overlaps(self, other: Range) -> bool:
        """Report whether the ranges have an address in common."""
        return self.version == other.version and self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class RangeSet:
    """Ranges of one family that form one pool: an ADD takes one address from each set."""

    ranges: tuple[Range, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.ranges))

    def range_of(self, address: Address) -> Range | None:
        """Return the range that contains `address`."""
        return next((candidate for candidate in self.ranges if address in candidate), None)


@dataclass(frozen=True, slots=True)
class HostLocalConfig:
    """The validated configuration of host-local. Its paths are paths of the host."""

    name: str
    """The network's name: the directory below `data_dir`."""
    data_dir: str
    resolv_conf: str
    """Empty: no DNS in the result."""
    range_sets: tuple[RangeSet, ...]
    requested: tuple[Address, ...]
    routes: tuple[cni_result.Route, ...]


@dataclass(frozen=True, slots=True)
class _Draft:
    """A range as written; None for an absent key."""

    subnet: tuple[Address, int] | None
    """Its address and prefix length."""
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
        runtime, given = configuration.requests(fields)
        legacy = _read_range(ipam)
        drafts = [
            *_read_sets(runtime, "ipRanges"),
            *([[legacy]] if legacy.subnet is not None else []),
            *_read_sets(ipam, "ranges"),
        ]
        data_dir = configuration.path(ipam, "dataDir") or DEFAULT_DATA_DIR
        resolv_conf = configuration.path(ipam, "resolvConf")
        wanted = [*(gojson.get_strings(given, "ips") or ()), *(gojson.get_strings(runtime, "ips") or ())]
        routes = configuration.ipam_routes(ipam)
    except gojson.JsonError as error:
        raise DecodingFailureError(f"host-local: {error}") from error
    requested = tuple([_requested(text) for text in wanted])
    return HostLocalConfig(name, data_dir, resolv_conf, _range_sets(drafts, cni_version), requested, routes)


def with_args(config: HostLocalConfig, args: str) -> HostLocalConfig:
    """Put `IP=` of CNI_ARGS in front of the requested addresses. Raises InvalidEnvironmentError (4)."""
    text = configuration.own_args(args, ("IP",)).get("IP")
    if not text:
        return config
    try:
        return replace(config, requested=(_requested(text), *config.requested))
    except CniError as error:
        raise InvalidEnvironmentError(
            f'ARGS: error parsing value of pair "IP={text}": {error.msg}', "in CNI_ARGS"
        ) from error


def _requested(text: str) -> Address:
    """Read a requested address. A prefix length is ignored: the range has its own."""
    if not text:
        raise InvalidNetworkConfigError(f"cannot understand ip: {_NO_ADDRESS}", "a requested address is empty")
    try:
        address = str(configuration.ip_prefix(text)[0]) if "/" in text else text
        return configuration.ip_address(address)
    except ValueError as error:
        raise InvalidNetworkConfigError(f"invalid IP address {text}") from error


def _read_sets(fields: Mapping[str, Any], key: str) -> list[list[_Draft]]:
    sets = []
    for index, item in enumerate(gojson.get_list(fields, key) or ()):
        if not isinstance(item, list | None):
            raise gojson.JsonError(f"{key}[{index}]: an array of ranges is needed, not {gojson.kind_of(item)}")
        sets.append([_read_range(configuration.as_object(entry, f"{key}[{index}]")) for entry in item or ()])
    return sets


def _read_range(fields: Mapping[str, Any]) -> _Draft:
    text = gojson.get_str(fields, "subnet")
    try:
        subnet = None if text is None else configuration.ip_prefix(text)
    except ValueError as error:
        raise InvalidNetworkConfigError(
            f"invalid CIDR address: {text}", "subnet: a network with its prefix length is needed, e.g. 10.1.0.0/16"
        ) from error
    addresses: list[Address | None] = []
    for key in ("rangeStart", "rangeEnd", "gateway"):
        text = gojson.get_str(fields, key)
        try:
            addresses.append(configuration.ip_address(text) if text else None)
        except ValueError as error:
            raise InvalidNetworkConfigError(
                f"invalid IP address: {text}", f"{key}: an address without prefix length is needed"
            ) from error
    return _Draft(subnet, *addresses)


def _range_sets(drafts: Sequence[Sequence[_Draft]], cni_version: str) -> tuple[RangeSet, ...]:
    if not drafts:
        raise InvalidNetworkConfigError("no IP ranges specified")
    sets: list[RangeSet] = []
    ranges: list[Range] = []
    position_of_set: list[int] = []
    for index, draft in enumerate(drafts):
        try:
            sets.append(_range_set(draft))
        except InvalidNetworkConfigError as error:
            raise InvalidNetworkConfigError(f"invalid range set {index}: {error.msg}", error.details) from error
        ranges += sets[-1].ranges
        position_of_set += [index] * len(draft)
    configuration.require_one_per_family([one.ranges[0].version == 4 for one in sets], cni_version)
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

    One pass over the sorted ranges: a configuration can have thousands.
    """
    pairs: list[tuple[int, int]] = []
    order = sorted(range(len(ranges)), key=lambda at: (ranges[at].version, ranges[at].first, at))
    before = order[0] if order else 0
    for position in order[1:]:
        one, other = ranges[before], ranges[position]
        if one.overlaps(other):
            pairs.append((min(before, position), max(before, position)))
        if one.version != other.version or one.last < other.last:
            before = position
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
            raise InvalidNetworkConfigError(f"RangeStart {draft.first} not in network {address}/{length}")
        first = int(draft.first)
    if draft.last is not None:
        if draft.last not in whole or int(draft.last) < first:
            raise InvalidNetworkConfigError(f"RangeEnd {draft.last} not in network {address}/{length}")
        last = int(draft.last)
    return Range(version, length, first, last, gateway)
