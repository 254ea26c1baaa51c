"""The names that an attachment's rules have, in both backends."""

from __future__ import annotations

import hashlib
import ipaddress
from dataclasses import dataclass
from typing import Final

IpInterface = ipaddress.IPv4Interface | ipaddress.IPv6Interface
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

MULTICAST: Final = {4: "224.0.0.0/4", 6: "ff00::/8"}
_COMMENT_MAX: Final = 128  # bytes, NFTNL_UDATA_COMMENT_MAXLEN


@dataclass(frozen=True, slots=True)
class Owner:
    """One interface of a container on a network."""

    network: str
    container_id: str
    ifname: str

    @property
    def chain(self) -> str:
        """The chain of iptables; one for all interfaces of the container on the network."""
        return f"CNI-{_hash(self.network + self.container_id)[:24]}"

    @property
    def comment(self) -> str:
        """The comment on each rule of iptables."""
        return f'name: "{self.network}" id: "{self.container_id}"'

    @property
    def nft_prefix(self) -> str:
        """What the comment of each of its rules of nftables begins with, and no other."""
        return f"{_hash(self.network)[:16]}-{_hash(f'{self.ifname}:{self.container_id}')[:16]}"

    @property
    def nft_comment(self) -> str:
        """The comment on each rule of nftables."""
        said = f"net: {self.network}, if: {self.ifname}, id: {self.container_id}".replace('"', "")
        return f"{self.nft_prefix}, {said}".encode()[:_COMMENT_MAX].decode("utf-8", "ignore")


def _hash(text: str) -> str:
    return hashlib.sha512(text.encode()).hexdigest()
