"""Masquerading by iptables: a chain for each container on a network, and a jump for each of its addresses."""

from __future__ import annotations

import ipaddress
import itertools
import shlex
from collections.abc import Sequence
from typing import Final

from multus_daemon import deadlines
from multus_daemon.plugins.builtin.masquerade.owner import MULTICAST, IpInterface, IpNetwork, Owner
from multus_daemon.plugins.plugin import HostTools, ToolNotFoundError
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import ToolExit
from multus_daemon.spec.cni.errors import CniError, InternalError

_ABSENT: Final = 1  # exit status of iptables for a chain or rule that is not there, or is already; and for much else
# What iptables says where the kernel has no such table, so that there are no rules; its exit status says other things.
_NO_TABLE: Final = (
    "Table does not exist",
    "Protocol not supported",
    "Operation not supported",
    "Address family not supported",
    "rule set generation id: Invalid argument",
)
_TOOL: Final = {4: "iptables", 6: "ip6tables"}
_POSTROUTING: Final = "POSTROUTING"


def add(tools: HostTools, version: int, owner: Owner, addresses: Sequence[IpInterface]) -> None:
    """Masquerade the addresses, which are of one version. Raises ToolNotFoundError, CniError."""
    if not addresses:
        return
    rules = _rules(version, owner, addresses)
    if not _nat(tools, version, "-N", owner.chain):
        # There already, for another interface or by an ADD that was cut off. Or it is not, which the listing tells.
        present = set()
        for chain in (owner.chain, _POSTROUTING):
            listed = _run(tools, _TOOL[version], [*_wait(), "-t", "nat", "-S", chain])
            present |= {_meaning(words) for line in _lines(listed) if (words := _words(line, owner.chain))}
        rules = [rule for rule in rules if _meaning(rule) not in present]
    if rules:
        # All of them, or none. Each once: several addresses share one.
        _restore(tools, version, [("-A", *rule) for rule in dict.fromkeys(rules)])


def _rules(version: int, owner: Owner, addresses: Sequence[IpInterface]) -> list[tuple[str, ...]]:
    """Chain and specification of each rule."""
    comment = ("-m", "comment", "--comment", owner.comment)
    return [
        rule
        for address in addresses
        for rule in (
            (owner.chain, "-d", str(address), "-j", "ACCEPT", *comment),
            (owner.chain, "!", "-d", MULTICAST[version], "-j", "MASQUERADE", *comment),
            (_POSTROUTING, "-s", str(address.ip), "-j", owner.chain, *comment),
        )
    ]


def remove(
    tools: HostTools,
    version: int,
    owner: Owner,
    addresses: Sequence[IpInterface] | None,
    spared: Sequence[IpInterface],
    *,
    is_other: bool,
) -> bool:
    """Remove the rules; whether there were any. One listing, and one transaction.

    `addresses` and `spared`: see `rules.remove`. `is_other`: the configuration names another backend.
    """
    chain = owner.chain
    listed = tools.run(_TOOL[version], [*_wait(), "-t", "nat", "-S", _POSTROUTING])
    if listed.status and any(text in listed.stderr for text in _NO_TABLE):
        return False
    _require(_TOOL[version], listed)
    jumps = [jump for line in _lines(listed) if (jump := jump_of(line, chain))]
    # The host's address alone; older plugins wrote the network.
    sources = None if addresses is None else {network for item in addresses for network in (_host(item), item.network)}
    living = {_host(item) for item in spared}
    gone = [jump for jump in jumps if (_source(jump) not in living if sources is None else _source(jump) in sources)]
    changes = [("-D", *jump) for jump in gone]
    # Without a jump: the chain of an ADD that was cut off. The program works, so 1 means that there is none.
    if len(gone) == len(jumps) and (jumps or (not is_other and _nat(tools, version, "-S", chain))):
        # Declared, it is there and empty, whatever was before.
        changes = [(f":{chain}", "-", "[0:0]"), *changes, ("-X", chain)]
    if changes:
        _restore(tools, version, changes)
    return bool(changes)


def jump_of(line: str, chain: str) -> list[str]:
    """The specification in a line of `iptables -S`, if it leads to `chain`; else nothing."""
    words = _words(line, chain)
    return words if ("-j", chain) in itertools.pairwise(words) else []


def _lines(listed: ToolExit) -> list[str]:
    # The comments of others can hold anything.
    return listed.stdout.decode(errors="surrogateescape").split("\n")


def _words(line: str, chain: str) -> list[str]:
    """Chain and specification in a line of `iptables -S`, if `chain` is in it; else nothing."""
    words = shlex.split(line) if chain in line else []
    return words[1:] if words[:1] == ["-A"] else []


def _meaning(rule: Sequence[str]) -> tuple[object, ...]:
    """What makes two of the rules of an owner the same, however they are written."""
    value = dict(itertools.pairwise(rule))
    networks = [ipaddress.ip_network(value[key], strict=False) if key in value else None for key in ("-s", "-d")]
    return rule[0], "!" in rule, *networks, value.get("-j")


def _source(jump: list[str]) -> IpNetwork | None:
    return ipaddress.ip_network(jump[jump.index("-s") + 1]) if "-s" in jump else None


def _host(address: IpInterface) -> IpNetwork:
    return ipaddress.ip_network(address.ip)


def _nat(tools: HostTools, version: int, *arguments: str) -> bool:
    """One command on the table nat; False where the chain or rule is not there, or, to be made, is there already."""
    end = _run(tools, _TOOL[version], [*_wait(), "-t", "nat", *arguments], tolerated=_ABSENT)
    return end.status == 0


def _restore(tools: HostTools, version: int, changes: Sequence[Sequence[str]]) -> None:
    """Several changes of the table nat as one transaction."""
    lines = ["*nat", *(" ".join(map(quoted, change)) for change in changes), "COMMIT", ""]
    _run(tools, f"{_TOOL[version]}-restore", [*_wait(), "--noflush"], "\n".join(lines).encode(errors="surrogateescape"))


def quoted(word: str) -> str:
    """Return the word as `iptables-restore` reads it."""
    if not word or any(character in word for character in ' "\\'):
        return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return word


def _run(tools: HostTools, tool: str, arguments: Sequence[str], stdin: bytes = b"", *, tolerated: int = 0) -> ToolExit:
    end = tools.run(tool, arguments, stdin)
    if end.status != tolerated:
        _require(tool, end)
    return end


def _require(tool: str, end: ToolExit) -> None:
    if end.status:
        raise InternalError(f"{tool} failed (exit status {end.status}): {end.stderr or 'no message'}")


def _wait() -> tuple[str, str]:
    """Wait for the lock, but no longer than the caller has: a killed iptables gives no reason."""
    seconds = min(float(deadlines.IPTABLES_LOCK_SECONDS), deadline.current().left - 1)
    return "-w", str(max(1, int(seconds)))


def is_usable(tools: HostTools) -> bool:
    """Whether the host can work by this backend, whatever the table nat of today looks like."""
    try:
        _run(tools, _TOOL[4], [*_wait(), "-t", "filter", "-S", "INPUT", "1"], tolerated=_ABSENT)
    except (ToolNotFoundError, CniError):
        return False
    return True
