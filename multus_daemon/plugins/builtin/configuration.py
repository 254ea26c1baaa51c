"""Read the configuration of a built-in: known keys, requests of the pod, CNI_ARGS, addresses. Pure."""

from __future__ import annotations

import contextlib
import ipaddress
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from multus_daemon.spec.cni import gojson, names, versions
from multus_daemon.spec.cni.errors import DecodingFailureError, InvalidEnvironmentError, InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Dns, Route, read_dns, read_route

COMMON_KEYS: Final = frozenset(
    {
        # The SPEC's keys, and those that remain from a configuration that was written for a list of one plugin.
        *("cniVersion", "cniVersions", "name", "type", "capabilities", "ipam", "dns", "prevResult"),
        *("disableCheck", "disableGC", "loadOnlyInlinedPlugins"),
        # CONVENTIONS: a plugin takes its own keys from these and ignores the rest.
        *("args", "runtimeConfig"),
        *("cni.dev/attachments", "cni.dev/valid-attachments"),
        # Multus gives them to each plugin of a network that has a resource. Only plugins for devices read them.
        *("deviceID", "pciBusID"),
    }
)
SIGNED_MAX: Final = 2**31 - 1
UNSIGNED_MAX: Final = 2**32 - 1
_VETH_MTU_MAX: Final = 65535
_SHOWN: Final = 60
_BOOLEANS: Final[Mapping[str, bool]] = {"0": False, "false": False, "1": True, "true": True}


@contextlib.contextmanager
def reading(network: str, step: str = "failed to load netconf") -> Iterator[None]:
    """Turn a JsonError of the block into a DecodingFailureError (6) that names the network, if one is given."""
    try:
        yield
    except gojson.JsonError as error:
        raise DecodingFailureError(f"{step}: {error}", f"network {network!r}" if network else "") from error


class UnknownKey(str):
    """The answer of `unknown_key` as text, with its parts. Without the value, which may be a password."""

    within: str
    """The objects around the key, as a prefix of the text."""
    key: str
    known: frozenset[str]
    """The keys that are allowed at this place."""


def unknown_key(fields: Mapping[str, Any], known: Iterable[str], *, within: str = "") -> str:
    """Return the first key of `fields` that is not in `known` (in any case); empty if there is none.

    A key whose value is null is ignored. A non-empty answer is an UnknownKey.
    """
    lower = {key.lower() for key in known}
    for key, value in fields.items():
        if key.lower() not in lower and value is not None:
            unknown = UnknownKey(f"{within}{key}")
            unknown.within, unknown.key, unknown.known = within, key, frozenset(known)
            return unknown
    return ""


def shown(value: Any) -> str:
    """Return a value of a configuration for a message, shortened to 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def requests(fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return `runtimeConfig` and `args.cni` (CNI CONVENTIONS), each empty if absent. Raises JsonError."""
    runtime = gojson.get_object(fields, "runtimeConfig") or {}
    return runtime, gojson.get_object(gojson.get_object(fields, "args") or {}, "cni") or {}


def makes_rules(fields: Mapping[str, Any]) -> bool:
    """Report whether `bridge` or `ptp` would make rules of a firewall; False for what cannot be read."""
    try:
        return bool(gojson.get_bool(fields, "ipMasq") or gojson.get_bool(fields, "macspoofchk"))
    except gojson.JsonError:
        return False


def own_args(text: str, keys: Iterable[str]) -> dict[str, str]:
    """Return the values of `keys` in CNI_ARGS (containernetworking/cni `pkg/types`, LoadArgs).

    Raises InvalidEnvironmentError for malformed CNI_ARGS, and for other keys unless IgnoreUnknown allows them.
    """
    wanted = {*keys, "IgnoreUnknown"}
    values, unknown = {}, []
    try:
        pairs = names.parse_args(text)
    except InvalidEnvironmentError as error:
        raise InvalidEnvironmentError(f"ARGS: invalid pair {error.details}") from error
    for key, value in pairs:
        if key in wanted:
            values[key] = value
        else:
            unknown.append(key)
    ignore = values.pop("IgnoreUnknown", "0")
    if ignore.lower() not in _BOOLEANS:
        raise InvalidEnvironmentError(
            f'ARGS: error parsing value of pair "IgnoreUnknown={ignore}": '
            f"boolean unmarshal error: invalid input {ignore}"
        )
    if unknown and not _BOOLEANS[ignore.lower()]:
        # The reference shows their values too, which may be passwords.
        quoted = " ".join(json.dumps(key, ensure_ascii=False) for key in unknown)
        raise InvalidEnvironmentError(f"ARGS: unknown args [{quoted}]")
    return values


def as_object(value: Any, where: str) -> Mapping[str, Any]:
    """Return an item of an array as an object; null is an empty object. Raises JsonError."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise gojson.JsonError(f"{where}: an object is needed, not {gojson.kind_of(value)}")
    return value


def ipam_routes(ipam: Mapping[str, Any]) -> tuple[Route, ...]:
    """Return `routes` of the section `ipam`. Raises JsonError."""
    return tuple([read_route(as_object(item, "routes")) for item in gojson.get_list(ipam, "routes") or ()])


def require_one_per_family(are_ipv4: Sequence[bool], cni_version: str) -> None:
    """Raise InvalidNetworkConfigError for two addresses of one family if the version's results can't have them."""
    if max(are_ipv4.count(True), are_ipv4.count(False)) > 1 and not versions.at_least(cni_version, "0.3.0"):
        raise InvalidNetworkConfigError(f"CNI version {cni_version} does not support more than 1 address per family")


def path(fields: Mapping[str, Any], key: str, default: str = "") -> str:
    """Return the path `key`, `default` if it is absent. Raises JsonError, InvalidNetworkConfigError."""
    text = gojson.get_str(fields, key)
    if text and (problem := names.path_problem(text)):
        raise InvalidNetworkConfigError(f"{key}: {shown(text)} is not a path: {problem}")
    return default if text is None else text


def in_range(key: str, value: int, most: int) -> int:
    """Return `value` if it is between 0 and `most`. Raises InvalidNetworkConfigError."""
    if not 0 <= value <= most:
        raise InvalidNetworkConfigError(f"{key}: {value} is out of range", f"0 to {most}")
    return value


def mtu(fields: Mapping[str, Any]) -> int:
    """Return `mtu` in bytes; 0 if it is absent, or negative as in the reference plugins.

    Raises JsonError, InvalidNetworkConfigError.
    """
    value = max(gojson.get_int(fields, "mtu") or 0, 0)
    if value > _VETH_MTU_MAX:
        raise InvalidNetworkConfigError(
            f"invalid MTU {value}, must be [0, veth MTU({_VETH_MTU_MAX})]",
            "the pod's interface is a veth: lower 'mtu' in the network's configuration",
        )
    return value


def own_dns(fields: Mapping[str, Any]) -> Dns | None:
    """Return `dns`, which replaces the IPAM plugin's as a whole; None if it sets nothing. Raises JsonError."""
    dns = gojson.get_object(fields, "dns")
    if not dns:
        return None
    lists = [gojson.get_list(dns, key) for key in ("nameservers", "search", "options")]
    return read_dns(dns) if gojson.get_str(dns, "domain") or any(item is not None for item in lists) else None


def mac_address(text: str) -> str:
    """Return an Ethernet address in the kernel's spelling. Raises InvalidNetworkConfigError."""
    if address := names.mac_address(text):
        return address
    raise InvalidNetworkConfigError(
        f"address {text[:_SHOWN]}: invalid MAC address", "six bytes are needed, e.g. 02:00:5e:10:00:01"
    )


def ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Read an address as Go's net.ParseIP does: `::ffff:a.b.c.d` is IPv4, a zone is an error. Raises ValueError."""
    if "%" in text:
        raise ValueError(text)
    address = ipaddress.ip_address(text)
    return address.ipv4_mapped or address if isinstance(address, ipaddress.IPv6Address) else address


def ip_prefix(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """Read an address and its prefix length as Go's net.ParseCIDR does. Raises ValueError."""
    address, _, length = text.partition("/")
    # ipaddress also accepts a netmask there, and a missing length.
    if "%" in text or not (length.isascii() and length.isdigit()):
        raise ValueError(text)
    ip = ipaddress.ip_address(address)
    if int(length) > ip.max_prefixlen:
        raise ValueError(text)
    return ip, int(length)
