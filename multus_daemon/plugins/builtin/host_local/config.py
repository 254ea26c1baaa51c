"""The configuration of host-local: ranges, requested addresses, routes, DNS; pure.

Keys, defaults, checks and the words of the errors are those of the reference plugin's documentation and behaviour
(containernetworking/plugins `plugins/ipam/host-local`, checked against the binary). Its codes are not: there every
error is 999, here it is the code that the CNI SPEC has for it.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from multus_daemon.plugins.builtin import configuration
from multus_daemon.spec.cni import gojson, versions
from multus_daemon.spec.cni import result as cni_result
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    InvalidEnvironmentError,
    InvalidNetworkConfigError,
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Subnet = ipaddress.IPv4Interface | ipaddress.IPv6Interface

DEFAULT_DATA_DIR: Final = "/var/lib/cni/networks"
_RANGE_KEYS: Final = ("subnet", "rangeStart", "rangeEnd", "gateway")
_IPAM_KEYS: Final = ("type", "name", "routes", "dataDir", "resolvConf", "ranges", *_RANGE_KEYS)
# At least a network address, a gateway, one to give away (and in IPv4 a broadcast address).
_HOST_BITS_MIN: Final = 2
_NO_ADDRESS: Final = "IP <nil> not v4 nor v6"


def text_of(value: int, version: int) -> str:
    """An address, given as a number, in the form that Go prints: it names the file."""
    if version == 4:
        return socket.inet_ntoa(value.to_bytes(4, "big"))
    return str(ipaddress.IPv6Address(value))


@dataclass(frozen=True, slots=True)
class Range:
    """Consecutive addresses of one subnet, `first` and `last` included, as numbers."""

    version: int
    prefix_length: int
    first: int
    last: int
    gateway: Address
    """Never given away. Not necessarily in the subnet, nor of its family."""

    def __contains__(self, address: Address) -> bool:
        """True where `address` may be given away, or is the gateway."""
        return address.version == self.version and self.first <= int(address) <= self.last

    def __str__(self) -> str:
        """`first-last`."""
        return f"{text_of(self.first, self.version)}-{text_of(self.last, self.version)}"

    def overlaps(self, other: Range) -> bool:
        """True where an address is in both."""
        return self.version == other.version and self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class RangeSet:
    """Ranges of one family that form one pool: an ADD takes one address from each set."""

    ranges: tuple[Range, ...]

    @property
    def version(self) -> int:
        """4 or 6."""
        return self.ranges[0].version

    def __str__(self) -> str:
        """`first-last,first-last`."""
        return ",".join(map(str, self.ranges))

    def range_of(self, address: Address) -> Range | None:
        """The range that holds `address`."""
        return next((candidate for candidate in self.ranges if address in candidate), None)


@dataclass(frozen=True, slots=True)
class HostLocalConfig:
    """One configuration, checked. Paths are as the host sees them."""

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
    """A range as written; None where nothing is."""

    subnet: _Subnet | None
    first: Address | None
    last: Address | None
    gateway: Address | None


def read(fields: Mapping[str, Any], *, name: str, cni_version: str) -> HostLocalConfig:
    """The configuration in `fields`.

    Raises DecodingFailureError (6) for a value of the wrong JSON type, InvalidNetworkConfigError (7) for everything
    else.
    """
    try:
        ipam = gojson.get_object(fields, "ipam")
        if ipam is None:
            raise InvalidNetworkConfigError("IPAM config missing 'ipam' key")
        runtime = gojson.get_object(fields, "runtimeConfig") or {}
        given = gojson.get_object(gojson.get_object(fields, "args") or {}, "cni") or {}
        legacy = _read_range(ipam)
        drafts = [
            *_read_sets(runtime, "ipRanges"),
            *([[legacy]] if legacy.subnet is not None else []),
            *_read_sets(ipam, "ranges"),
        ]
        data_dir = gojson.get_str(ipam, "dataDir") or DEFAULT_DATA_DIR
        resolv_conf = gojson.get_str(ipam, "resolvConf") or ""
        wanted = [*(gojson.get_strings(given, "ips") or ()), *(gojson.get_strings(runtime, "ips") or ())]
        routes = tuple(
            cni_result.read_route(_as_object(item, "routes")) for item in gojson.get_list(ipam, "routes") or ()
        )
    except gojson.JsonError as error:
        raise DecodingFailureError(f"host-local: {error}") from error
    requested = tuple(_requested(text) for text in wanted)
    return HostLocalConfig(name, data_dir, resolv_conf, _range_sets(drafts, cni_version), requested, routes)


def unsupported(fields: Mapping[str, Any]) -> str:
    """What the `ipam` section asks for that is not known here; empty if nothing. Raises JsonError."""
    ipam = gojson.get_object(fields, "ipam") or {}
    if found := configuration.unknown_key(ipam, _IPAM_KEYS, within="ipam."):
        return found
    sets = [item for item in gojson.get_list(ipam, "ranges") or () if isinstance(item, list)]
    unknown = (
        configuration.unknown_key(_as_object(entry, "ranges"), _RANGE_KEYS, within="ipam.ranges: ")
        for entries in sets
        for entry in entries
    )
    return next(filter(None, unknown), "")


# --- requested addresses ---------------------------------------------------------------------------------------------


def _requested(text: str) -> Address:
    """An address; a prefix length is taken and ignored, the range's own counts."""
    if not text:
        raise InvalidNetworkConfigError(f"cannot understand ip: {_NO_ADDRESS}", "a requested address is empty")
    try:
        return _unmapped(_interface(text).ip if "/" in text else _plain(text))
    except ValueError as error:
        raise InvalidNetworkConfigError(f"invalid IP address {text}") from error


def with_args(config: HostLocalConfig, args: str) -> HostLocalConfig:
    """With `IP=` in CNI_ARGS, which comes before the other requested addresses. Raises InvalidEnvironmentError (4)."""
    text = configuration.own_args(args, ("IP",)).get("IP")
    if not text:
        return config
    try:
        return replace(config, requested=(_requested(text), *config.requested))
    except CniError as error:
        raise InvalidEnvironmentError(
            f'ARGS: error parsing value of pair "IP={text}": {error.msg}', "in CNI_ARGS"
        ) from error


# --- ranges ----------------------------------------------------------------------------------------------------------


def _as_object(value: Any, key: str) -> Mapping[str, Any]:
    """An item of an array; null is an empty object."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise gojson.JsonError(f"{key}: an object is needed, not {gojson.kind_of(value)}")
    return value


def _read_sets(fields: Mapping[str, Any], key: str) -> list[list[_Draft]]:
    sets = []
    for index, item in enumerate(gojson.get_list(fields, key) or ()):
        if not isinstance(item, list | None):
            raise gojson.JsonError(f"{key}[{index}]: an array of ranges is needed, not {gojson.kind_of(item)}")
        sets.append([_read_range(_as_object(entry, f"{key}[{index}]")) for entry in item or ()])
    return sets


def _read_range(fields: Mapping[str, Any]) -> _Draft:
    return _Draft(
        subnet=_read_subnet(gojson.get_str(fields, "subnet")),
        first=_read_address(fields, "rangeStart"),
        last=_read_address(fields, "rangeEnd"),
        gateway=_read_address(fields, "gateway"),
    )


def _plain(text: str) -> Address:
    # A zone ("fe80::1%eth0") means nothing in a file that outlives the interface; Go refuses it as well.
    if "%" in text:
        raise ValueError(text)
    return ipaddress.ip_address(text)


def _unmapped(address: Address) -> Address:
    """An IPv4-mapped address (::ffff:10.0.0.1) is the IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or address
    return address


def _interface(text: str) -> _Subnet:
    length = text.partition("/")[2]
    # ipaddress takes a netmask there, and a missing length.
    if "%" in text or not (length.isascii() and length.isdigit()):
        raise ValueError(text)
    return ipaddress.ip_interface(text)


def _read_subnet(text: str | None) -> _Subnet | None:
    if text is None:
        return None
    try:
        return _interface(text)
    except ValueError as error:
        raise InvalidNetworkConfigError(
            f"invalid CIDR address: {text}", "subnet: a network with its prefix length is needed, e.g. 10.1.0.0/16"
        ) from error


def _read_address(fields: Mapping[str, Any], key: str) -> Address | None:
    text = gojson.get_str(fields, key)
    if not text:
        return None
    try:
        return _unmapped(_plain(text))
    except ValueError as error:
        raise InvalidNetworkConfigError(
            f"invalid IP address: {text}", f"{key}: an address without prefix length is needed"
        ) from error


def _range_sets(drafts: list[list[_Draft]], cni_version: str) -> tuple[RangeSet, ...]:
    if not drafts:
        raise InvalidNetworkConfigError("no IP ranges specified")
    sets = tuple(_range_set(index, draft) for index, draft in enumerate(drafts))
    per_family = [sum(candidate.version == version for candidate in sets) for version in (4, 6)]
    if max(per_family) > 1 and not versions.at_least(cni_version, "0.3.0"):
        raise InvalidNetworkConfigError(f"CNI version {cni_version} does not support more than 1 address per family")
    numbered = [(index, item) for index, one in enumerate(sets) for item in one.ranges]
    if found := _overlap([item for _, item in numbered]):
        first, second = sorted(numbered[position][0] for position in found)
        raise InvalidNetworkConfigError(f"range set {first} overlaps with {second}")
    return sets


def _overlap(ranges: Sequence[Range]) -> tuple[int, int] | None:
    """The positions of two ranges that have an address in common, in order; None where no two have.

    By one look along the addresses: a network's author writes as many ranges as he likes.
    """
    found: list[tuple[int, int]] = []
    last: int | None = None
    for position in sorted(range(len(ranges)), key=lambda at: (ranges[at].version, ranges[at].first, at)):
        one = ranges[position]
        before = None if last is None else ranges[last]
        if before is not None and last is not None and before.overlaps(one):
            found.append((min(last, position), max(last, position)))
        if before is None or before.version != one.version or before.last < one.last:
            last = position
    return min(found, default=None)


def _range_set(index: int, drafts: list[_Draft]) -> RangeSet:
    try:
        if not drafts:
            raise InvalidNetworkConfigError("empty range set")
        ranges: list[Range] = []
        for draft in drafts:
            ranges.append(_range(draft))
            if ranges[-1].version != ranges[0].version:
                raise InvalidNetworkConfigError("mixed address families")
        if found := _overlap(ranges):
            one, other = (ranges[position] for position in found)
            raise InvalidNetworkConfigError(f"subnets {one} and {other} overlap")
    except InvalidNetworkConfigError as error:
        raise InvalidNetworkConfigError(f"invalid range set {index}: {error.msg}", error.details) from error
    return RangeSet(tuple(ranges))


def _range(draft: _Draft) -> Range:
    subnet = draft.subnet
    if subnet is None:
        raise InvalidNetworkConfigError(_NO_ADDRESS, "a range needs a 'subnet'")
    if isinstance(subnet, ipaddress.IPv6Interface) and subnet.ip.ipv4_mapped:
        raise InvalidNetworkConfigError("IPNet IP and Mask version mismatch", f"write {subnet} as an IPv4 network")
    network, length = subnet.network, subnet.network.prefixlen
    if length > network.max_prefixlen - _HOST_BITS_MIN:
        raise InvalidNetworkConfigError(f"Network {subnet.ip}/{length} too small to allocate from")
    if subnet.ip != network.network_address:
        raise InvalidNetworkConfigError(
            f"Network has host bits set. For a subnet mask of length {length} "
            f"the network address is {network.network_address}",
            f"subnet {subnet}: write {network}",
        )
    # The first address is the gateway as a rule, which is passed over when addresses are given away; an IPv4
    # subnet's last one is the broadcast address.
    lowest = int(network.network_address)
    first, last = lowest + 1, int(network.broadcast_address) - (1 if network.version == 4 else 0)
    if draft.first is not None:
        # An end before the start makes the range empty: then it is the start that does not lie in it.
        empty = draft.last is not None and draft.last.version == network.version and int(draft.last) < int(draft.first)
        if draft.first not in network or empty:
            raise InvalidNetworkConfigError(f"RangeStart {draft.first} not in network {network}")
        first = int(draft.first)
    if draft.last is not None:
        if draft.last not in network or int(draft.last) < first:
            raise InvalidNetworkConfigError(f"RangeEnd {draft.last} not in network {network}")
        last = int(draft.last)
    gateway = draft.gateway if draft.gateway is not None else network.network_address + 1
    return Range(network.version, length, first, last, gateway)
