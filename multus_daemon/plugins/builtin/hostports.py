"""The rules of `portmap`, with iptables or nftables, that lead from a port of the host to a port of a container.

Chains, rules and comments are those of the reference plugin (containernetworking/plugins `plugins/meta/portmap`), so
that either removes what the other made. With iptables, each container has a chain, and entries in a chain that all
containers share, to which the table jumps. With nftables, the rules of all containers are in two chains, and the
comment names the container.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from multus_daemon.kernel.inet import IpAddress, IpInterface
from multus_daemon.plugins.builtin import iptables, nftables
from multus_daemon.plugins.builtin.iptables import COMMENTED
from multus_daemon.plugins.plugin import HostTools
from multus_daemon.spec.cni.errors import CniError

_DNAT: Final = "CNI-HOSTPORT-DNAT"
_MARK: Final = "CNI-HOSTPORT-SETMARK"
_MASQUERADE: Final = "CNI-HOSTPORT-MASQ"
_ENTRANCES: Final[Sequence[tuple[str, ...]]] = tuple(
    ("-A", chain, "-m", "addrtype", "--dst-type", "LOCAL", "-j", _DNAT) for chain in ("PREROUTING", "OUTPUT")
)
_EXIT: Final = ("-I", iptables.POSTROUTING, *COMMENTED, "CNI portfwd requiring masquerade", "-j", _MASQUERADE)
_PORTS_MAX: Final = 15
"""Maximum number of ports in one `multiport` match of iptables."""
_COMMENT_MAX: Final = 255
_NFT_COMMENT_MAX: Final = 128
_TABLE: Final = "cni_hostport"
_ALL: Final = "hostports_all"
_JUMPS: Final = (("prerouting", _ALL), ("output", _ALL), (_ALL, "hostip_hostports"), (_ALL, "hostports"))
_FAMILIES: Final = {4: "ip", 6: "ip6"}
_LOCALHOST: Final = "127.0.0.1"
_SEEN_SECONDS: Final = 30.0
"""Shared chains that were seen this long ago are not checked again: each check runs a program."""

_seen: dict[tuple[int, int], float] = {}
"""When the shared chains were last seen on the monotonic clock, by IP version and mark (0: none)."""


@dataclass(frozen=True, slots=True)
class PortMapping:
    """A port of the host, and the container's port to which it leads."""

    host_port: int
    container_port: int
    protocol: str
    host_ip: IpAddress | None
    """The host's address that has the port; None: all addresses."""

    @property
    def is_of_address(self) -> bool:
        """True if only one address of the host has the port."""
        return self.host_ip is not None and not self.host_ip.is_unspecified

    def destination(self, target: IpInterface) -> str:
        """Return address and port of the container, in the syntax of iptables and nft."""
        return f"{target.ip if target.version == 4 else f'[{target.ip}]'}:{self.container_port}"


@dataclass(frozen=True, slots=True)
class HostPorts:
    """The host ports of a container on a network, and the options for their rules."""

    network: str
    container_id: str
    mappings: Sequence[PortMapping]
    backend: str
    """`iptables` or `nftables`; empty: the one that the host has."""
    snat: bool
    """True: masquerade packets from the container itself and from the host, so that they reach the port, too."""
    masquerade_all: bool
    """True: masquerade every packet to the port."""
    mark: int
    """The mark of packets that are masqueraded."""
    mark_chain: str
    """A chain of the administrator that marks packets; empty: the plugin's own chain."""
    conditions: Mapping[int, Sequence[str]]
    """Further words of each rule's match, by IP version."""

    @property
    def marks(self) -> bool:
        """True if packets pass the plugin's own chains that mark and masquerade."""
        return self.snat and not self.mark_chain

    @property
    def chain(self) -> str:
        """The container's chain of iptables."""
        return f"CNI-DN-{hashlib.sha512((self.network + self.container_id).encode()).hexdigest()[:21]}"

    def of(self, version: int) -> list[PortMapping]:
        """Return the mappings of an IP version."""
        return [item for item in self.mappings if item.host_ip is None or item.host_ip.version == version]


# --- iptables --------------------------------------------------------------------------------------------------------


def add_iptables(tools: HostTools, ports: HostPorts, target: IpInterface) -> None:
    """Make the rules that lead the ports to `target`. Raises CniError."""
    version = target.version
    # The declaration empties the chain, and creates it if it is absent.
    added = [("-A", *rule) for rule in (*_rules(ports, target), *_entries(ports, version))]
    rules = [(f":{ports.chain}", "-", "[0:0]"), *added]
    key = version, ports.marks and ports.mark
    if time.monotonic() - _seen.get(key, -_SEEN_SECONDS) < _SEEN_SECONDS:
        # All or nothing: if it fails, most likely somebody has removed a shared chain.
        with contextlib.suppress(CniError):
            iptables.restore(tools, version, rules)
            return
    iptables.settle(tools, version, lambda: [*_shared(ports), *_lacking(tools, version, ports), *rules])
    _seen[key] = time.monotonic()


def has_iptables(tools: HostTools, ports: HostPorts, target: IpInterface) -> bool:
    """Return True if the rules to `target` exist; else the next ADD checks the shared chains. Raises as `add_nft`"""
    version, filled = target.version, (_MARK, _MASQUERADE) if ports.marks else ()
    wanted, entries = [("-A", *rule) for rule in _rules(ports, target)], list(_entries(ports, version))
    # Entries are counted: a listing may have the words of a condition otherwise.
    if (
        not iptables.lacking(tools, version, [*_jumps(ports), *wanted])
        and len(iptables.rules_in(tools, version, _DNAT, [ports.chain]) or ()) >= len(entries)
        and all(iptables.rules_in(tools, version, chain) for chain in filled)
    ):
        return True
    _seen.clear()
    return False


def remove_iptables(tools: HostTools, version: int, ports: HostPorts) -> bool:
    """Remove the container's chain and its entries; return True if there were any. Raises as `add_iptables`."""
    entries = [("-D", *entry) for entry in _entries(ports, version)]
    # As they were made; a listing is another program.
    with contextlib.suppress(CniError):
        iptables.restore(tools, version, [(f":{ports.chain}", "-", "[0:0]"), *entries, ("-X", ports.chain)])
        return True
    return iptables.remove(tools, version, ports.chain, None, (), is_other=False, parent=_DNAT)


def _shared(ports: HostPorts) -> Iterator[tuple[str, ...]]:
    """Yield the changes that make the chains which mark and masquerade, with the mark of this network.

    Not made for each container, as the kernel takes 10 ms to replace rules.
    """
    if ports.marks:
        mark = f"{ports.mark:#x}/{ports.mark:#x}"
        yield f":{_MARK}", "-", "[0:0]"
        yield "-A", _MARK, *COMMENTED, "CNI portfwd masquerade mark", "-j", "MARK", "--set-xmark", mark
        yield f":{_MASQUERADE}", "-", "[0:0]"
        yield "-A", _MASQUERADE, "-m", "mark", "--mark", mark, "-j", "MASQUERADE"


def _rules(ports: HostPorts, target: IpInterface) -> Iterator[tuple[str, ...]]:
    """Yield the rules of the container's chain, each after the chain."""
    version = target.version
    for item in ports.of(version):
        match = [ports.chain, "-p", item.protocol, "--dport", str(item.host_port)]
        if item.is_of_address:
            match += ["-d", str(item.host_ip)]
        if ports.snat:
            sources = [("-s", str(target)), *([("-s", _LOCALHOST)] if version == 4 else [])]
            for source in [()] if ports.masquerade_all else sources:
                yield *match, *source, "-j", ports.mark_chain or _MARK
        yield *match, "-j", "DNAT", "--to-destination", item.destination(target)


def _entries(ports: HostPorts, version: int) -> Iterator[tuple[str, ...]]:
    """Yield the container's entries in the shared chain, each after the chain."""
    comment = f'dnat name: "{ports.network}" id: "{ports.container_id}"'[:_COMMENT_MAX]
    # Ports of the other family too, as with the reference, whose CHECK looks for them.
    for protocol in sorted({item.protocol for item in ports.mappings}):
        numbers = list(dict.fromkeys(str(item.host_port) for item in ports.mappings if item.protocol == protocol))
        for start in range(0, len(numbers), _PORTS_MAX):
            some = ",".join(numbers[start : start + _PORTS_MAX])
            match = [_DNAT, "-p", protocol, *COMMENTED, comment, "-m", "multiport", "--dports", some]
            yield *match, *ports.conditions.get(version, ()), "-j", ports.chain


def _lacking(tools: HostTools, version: int, ports: HostPorts) -> list[Sequence[str]]:
    """Return the changes that add the shared chain and the jumps to it, and remove the container's old entries."""
    entries = iptables.rules_in(tools, version, _DNAT, [ports.chain])
    stale = [("-D", *entry) for entry in entries or () if entry[-1] == ports.chain]
    return [*([("-N", _DNAT)] if entries is None else stale), *iptables.lacking(tools, version, _jumps(ports))]


def _jumps(ports: HostPorts) -> Sequence[tuple[str, ...]]:
    return (*_ENTRANCES, _EXIT) if ports.marks else _ENTRANCES


# --- nftables --------------------------------------------------------------------------------------------------------


def add_nft(tools: HostTools, ports: HostPorts, target: IpInterface) -> None:
    """Make the rules that lead the ports to `target`, replacing earlier ones. Raises CniError."""
    stale = _stale(tools, target.version, ports)
    nftables.run_commented(tools, lambda comments: _transaction(ports, target, stale, comments=comments))


def has_nft(tools: HostTools, ports: HostPorts, target: IpInterface) -> bool:
    """Return True if the rules that lead the ports to `target` exist. Raises as `add_nft`."""
    found = nftables.rules(tools, _chain(target.version), of_table=True)
    jumps = {(item.chain, item.target) for item in found}
    own = [item for item in found if item.comment == _comment(ports)]
    return len(own) >= len(list(_nft_rules(ports, target))) and jumps.issuperset(_JUMPS)


def remove_nft(tools: HostTools, version: int, ports: HostPorts) -> bool:
    """Remove the container's rules; return True if there were any. Raises as `add_nft`."""
    return nftables.run_text(tools, _stale(tools, version, ports))


def _comment(ports: HostPorts) -> str:
    return ports.container_id[:_NFT_COMMENT_MAX]


def _chain(version: int) -> nftables.Chain:
    return nftables.Chain(_FAMILIES[version], _TABLE, "hostports")


def _stale(tools: HostTools, version: int, ports: HostPorts) -> list[str]:
    """Return the commands that delete the container's rules."""
    return nftables.deletions(tools, _chain(version), lambda rule: rule.comment == _comment(ports), of_table=True)


def _nft_rules(ports: HostPorts, target: IpInterface) -> Iterator[tuple[str, str]]:
    """Yield each rule as its chain and its text, without the comment."""
    family = _FAMILIES[target.version]
    for item in ports.of(target.version):
        rule = f"{item.protocol} dport {item.host_port} dnat to {item.destination(target)}"
        if item.is_of_address:
            yield "hostip_hostports", f"{family} daddr {item.host_ip} {rule}"
        else:
            yield "hostports", rule
    if ports.snat:
        sources = [str(target.ip), *([_LOCALHOST] if target.version == 4 else [])]
        for source in ["0.0.0.0/0" if target.version == 4 else "::/0"] if ports.masquerade_all else sources:
            yield "masquerading", f"{family} saddr {source} {family} daddr {target.ip} masquerade"


def _transaction(ports: HostPorts, target: IpInterface, stale: Sequence[str], *, comments: bool) -> list[str]:
    table = f"{_FAMILIES[target.version]} {_TABLE}"
    match = f"{' '.join(ports.conditions.get(target.version, ()))} fib daddr type local"
    return [
        f"add table {table}" + (' { comment "CNI portmap plugin" ; }' if comments else ""),
        *(f"add chain {table} {name}" for name in ("hostports", "hostip_hostports", _ALL)),
        f"add chain {table} prerouting {{ type nat hook prerouting priority dstnat ; }}",
        f"add chain {table} output {{ type nat hook output priority -100 ; }}",
        f"add chain {table} masquerading {{ type nat hook postrouting priority srcnat ; }}",
        # Filled again each time, so that their content does not depend on the plugin that made it.
        *(f"flush chain {table} {name}" for name in dict(_JUMPS)),
        *(f"add rule {table} {name} {'' if name == _ALL else match} jump {to}" for name, to in _JUMPS),
        *stale,
        *(f'add rule {table} {chain} {rule} comment "{_comment(ports)}"' for chain, rule in _nft_rules(ports, target)),
    ]
