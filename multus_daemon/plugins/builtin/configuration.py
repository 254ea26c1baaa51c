"""What the configurations of the built-ins have in common: known keys, CNI_ARGS, `dns`, MAC addresses. Pure."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from multus_daemon.spec.cni import args as cni_args
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import InvalidEnvironmentError, InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Dns, read_dns

COMMON_KEYS: Final = frozenset(
    {
        # The SPEC's, and those that a configuration keeps which was written for a list of one plugin.
        *("cniVersion", "cniVersions", "name", "type", "capabilities", "ipam", "dns", "prevResult"),
        *("disableCheck", "disableGC", "loadOnlyInlinedPlugins"),
        # CONVENTIONS: a plugin takes what is its own from these and passes over the rest.
        *("args", "runtimeConfig"),
        *("cni.dev/attachments", "cni.dev/valid-attachments"),
        # Multus gives them to each plugin of a network that has a resource; they mean something to device plugins' CNI
        # plugins only.
        *("deviceID", "pciBusID"),
    }
)
SIGNED_MAX: Final = 2**31 - 1
UNSIGNED_MAX: Final = 2**32 - 1
_SHOWN: Final = 60
# Go's net.ParseMAC, as far as it is 6 bytes.
_MAC: Final = re.compile(
    r"[0-9a-f]{2}(?::[0-9a-f]{2}){5}|[0-9a-f]{2}(?:-[0-9a-f]{2}){5}|[0-9a-f]{4}(?:\.[0-9a-f]{4}){2}",
    re.ASCII | re.IGNORECASE,
)
_BOOLEANS: Final[Mapping[str, bool]] = {"0": False, "false": False, "1": True, "true": True}


class UnknownKey(str):
    """What `unknown_key` has found, as text, and what it is about."""

    within: str
    """Before the key: the objects that it is in."""
    key: str
    known: frozenset[str]
    """The keys that there are in its place."""


def unknown_key(fields: Mapping[str, Any], known: Iterable[str], *, within: str = "") -> str:
    """The first key of `fields`, with its value, that is not among `known` (in any case); empty if all are.

    A key without a value (null) asks for nothing. What is found is an UnknownKey.
    """
    lower = {key.lower() for key in known}
    for key, value in fields.items():
        if key.lower() not in lower and value is not None:
            found = UnknownKey(f"{within}{key}: {shown(value)}")
            found.within, found.key, found.known = within, key, frozenset(known)
            return found
    return ""


def shown(value: Any) -> str:
    """A value of a configuration for a message, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def own_args(text: str, keys: Iterable[str]) -> dict[str, str]:
    """The values of `keys` in CNI_ARGS.

    Raises InvalidEnvironmentError for other keys, unless IgnoreUnknown says that they are meant for others, and for
    what is no CNI_ARGS (containernetworking/cni `pkg/types`, LoadArgs).
    """
    wanted = {*keys, "IgnoreUnknown"}
    pairs = cni_args.parse(text)
    found = {key: value for key, value in pairs if key in wanted}
    unknown = [f"{key}={value}" for key, value in pairs if key not in wanted]
    ignore = found.pop("IgnoreUnknown", "0")
    if ignore.lower() not in _BOOLEANS:
        raise InvalidEnvironmentError(
            f'ARGS: error parsing value of pair "IgnoreUnknown={ignore}": '
            f"boolean unmarshal error: invalid input {ignore}",
            "in CNI_ARGS",
        )
    if unknown and not _BOOLEANS[ignore.lower()]:
        quoted = " ".join(json.dumps(pair, ensure_ascii=False) for pair in unknown)
        raise InvalidEnvironmentError(f"ARGS: unknown args [{quoted}]", "in CNI_ARGS; IgnoreUnknown=1 allows them")
    return found


def in_range(key: str, value: int, most: int) -> int:
    """`value`, which the kernel can be told. Raises InvalidNetworkConfigError."""
    if not 0 <= value <= most:
        raise InvalidNetworkConfigError(f"{key}: {value} is out of range", f"0 to {most}")
    return value


def mtu(fields: Mapping[str, Any]) -> int:
    """`mtu` in bytes; 0 where it is absent, or negative as in the reference plugins.

    Raises JsonError, InvalidNetworkConfigError.
    """
    return in_range("mtu", max(gojson.get_int(fields, "mtu") or 0, 0), SIGNED_MAX)


def own_dns(fields: Mapping[str, Any]) -> Dns | None:
    """`dns`, which replaces the IPAM plugin's as a whole; None where it says nothing. Raises JsonError."""
    dns = gojson.get_object(fields, "dns") or {}
    lists = [gojson.get_list(dns, key) for key in ("nameservers", "search", "options")]
    says = gojson.get_str(dns, "domain") or any(item is not None for item in lists)
    return read_dns(dns) if says else None


def mac_address(text: str) -> str:
    """An Ethernet address as the kernel writes it. Raises InvalidNetworkConfigError."""
    if not _MAC.fullmatch(text):
        raise InvalidNetworkConfigError(
            f"address {text[:_SHOWN]}: invalid MAC address", "six bytes are needed, e.g. 02:00:5e:10:00:01"
        )
    digits = re.sub("[:.-]", "", text.lower())
    return ":".join(digits[at : at + 2] for at in range(0, len(digits), 2))


def ip_address(text: str) -> str:
    """An address without a prefix length as Go's net.ParseIP takes it: `::ffff:a.b.c.d` is IPv4, a zone is none.

    Raises ValueError.
    """
    if "%" in text:
        raise ValueError(text)
    address = ipaddress.ip_address(text)
    return str(address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else str(address)
