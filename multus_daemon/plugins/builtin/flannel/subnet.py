"""`subnet.env`, by which flanneld tells what it has assigned to the node; pure.

Format: `KEY=value` lines as flannel `pkg/subnet` WriteSubnetFile writes them; no quotes, no comments; unknown lines are
passed over.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

_MTU_MAX = 2**32 - 1


class SubnetError(ValueError):
    """A file that can't be used; the message says why."""


@dataclass(slots=True)
class Subnets:
    """One file. Networks and subnets in CIDR notation without host bits, IPv4 and IPv6 apart."""

    networks: list[str] = field(default_factory=list)
    """Of the cluster."""
    networks_v6: list[str] = field(default_factory=list)
    subnet: str = ""
    """Of the node; empty: none."""
    subnet_v6: str = ""
    mtu: int | None = None
    """In bytes."""
    masquerades: bool | None = None
    """flanneld does it."""


def read(text: str, path: str) -> Subnets:
    """The content of the file at `path`. Raises SubnetError."""
    found = Subnets()
    for line in text.split("\n"):
        key, equals, value = line.removesuffix("\r").partition("=")
        if key in _KEYS:
            if not equals:
                raise SubnetError(f"{path}: {key} has no value")
            _set(found, key, value)
    if missing := _missing(found):
        raise SubnetError(f"{path} is missing {', '.join(missing)}")
    return found


_KEYS = frozenset(
    {
        *("FLANNEL_NETWORK", "FLANNEL_SUBNET", "FLANNEL_IPV6_NETWORK", "FLANNEL_IPV6_SUBNET"),
        *("FLANNEL_MTU", "FLANNEL_IPMASQ"),
    }
)


def _set(found: Subnets, key: str, value: str) -> None:
    match key:
        case "FLANNEL_NETWORK":
            found.networks = _networks(value)
        case "FLANNEL_IPV6_NETWORK":
            found.networks_v6 = _networks(value)
        case "FLANNEL_SUBNET":
            found.subnet = _network(value)
        case "FLANNEL_IPV6_SUBNET":
            found.subnet_v6 = _network(value)
        case "FLANNEL_MTU":
            # No signs, no white space, no underscores.
            if not (value.isascii() and value.isdigit()) or len(value) > len(str(_MTU_MAX)) or int(value) > _MTU_MAX:
                raise SubnetError(f'parsing "{value[:40]}": invalid MTU')
            found.mtu = int(value)
        case _:
            found.masquerades = value == "true"


def _networks(value: str) -> list[str]:
    """Several, separated by commas; each counts once, in order."""
    return list(dict.fromkeys(map(_network, value.split(","))))


def _network(text: str) -> str:
    length = text.partition("/")[2]
    try:
        # ipaddress takes a netmask there, and a missing length.
        if "%" in text or not (length.isascii() and length.isdigit()):
            raise ValueError(text)
        return str(ipaddress.ip_interface(text).network)
    except ValueError as error:
        raise SubnetError(f"invalid CIDR address: {text[:60]}") from error


def _missing(found: Subnets) -> list[str]:
    missing = []
    if not (found.networks or found.networks_v6):
        missing += ["FLANNEL_NETWORK", "FLANNEL_IPV6_NETWORK"]
    if not (found.subnet or found.subnet_v6):
        missing += ["FLANNEL_SUBNET", "FLANNEL_IPV6_SUBNET"]
    if found.mtu is None:
        missing.append("FLANNEL_MTU")
    if found.masquerades is None:
        missing.append("FLANNEL_IPMASQ")
    return missing
