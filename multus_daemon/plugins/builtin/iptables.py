"""Masquerading by iptables: a chain for each container on a network, and a jump for each of its addresses."""

from __future__ import annotations

import io
import ipaddress
import itertools
import shlex
from collections.abc import Sequence
from typing import Final

from multus_daemon import deadlines
from multus_daemon.kernel.inet import IpInterface, IpNetwork
from multus_daemon.plugins.plugin import HostTools, ToolNotFoundError
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import ToolExit
from multus_daemon.spec.cni.errors import CniError, InternalError

# Exit status of iptables for an absent chain or rule, or an existing one that is to be made; and for much else.
_ABSENT: Final = 1
# Messages of iptables if the kernel has no such table, so no rules. The exit status is the same for other errors.
_NO_TABLE: Final = (
    "Table does not exist",
    "Protocol not supported",
    "Operation not supported",
    "Address family not supported",
    "rule set generation id: Invalid argument",
)
_TOOL: Final = {4: "iptables", 6: "ip6tables"}
_MULTICAST: Final = {4: "224.0.0.0/4", 6: "ff00::/8"}
_POSTROUTING: Final = "POSTROUTING"


def add(tools: HostTools, version: int, chain: str, comment: str, addresses: Sequence[IpInterface]) -> None:
    """Masquerade the addresses, which are of one IP version. Raises ToolNotFoundError, CniError."""
    if not addresses:
        return
    rules = _rules(version, chain, addresses, ("-m", "comment", "--comment", comment))
    exists = False
    if not _nat(tools, version, "-N", chain):
        # The chain exists, for another interface or from an interrupted ADD; else the listing fails too.
        present = set()
        for name in (chain, _POSTROUTING):
            listed = _run(tools, _TOOL[version], [*_wait(), "-t", "nat", "-S", name])
            present |= {_meaning(rule) for rule in _rules_naming(chain, listed)}
        rules = [rule for rule in rules if _meaning(rule) not in present]
        exists = True
    if rules:
        # In an existing chain the rule that masquerades may be there already, and the exceptions come before it.
        changes = [("-I" if exists and "ACCEPT" in rule else "-A", *rule) for rule in rules]
        # Each once: several addresses share one.
        _restore(tools, version, list(dict.fromkeys(changes)))


def _rules(
    version: int, chain: str, addresses: Sequence[IpInterface], commented: tuple[str, ...] = ()
) -> list[tuple[str, ...]]:
    rules: list[tuple[str, ...]] = []
    for address in addresses:
        rules.append((chain, "-d", str(address), "-j", "ACCEPT", *commented))
        rules.append((chain, "!", "-d", _MULTICAST[version], "-j", "MASQUERADE", *commented))
        rules.append((_POSTROUTING, "-s", str(address.ip), "-j", chain, *commented))
    return rules


def has(tools: HostTools, version: int, chain: str, addresses: Sequence[IpInterface]) -> bool:
    """Report whether the addresses are masqueraded as `add` does it. Raises ToolNotFoundError, CniError."""
    if not addresses:
        return True
    present: list[tuple[object, ...]] = []
    for name in (chain, _POSTROUTING):
        listed = tools.run(_TOOL[version], [*_wait(), "-t", "nat", "-S", name])
        if listed.status == _ABSENT:
            return False
        _require(_TOOL[version], listed)
        present += map(_meaning, _rules_naming(chain, listed))
    return set(map(_meaning, _rules(version, chain, addresses))) <= set(present)


def remove(
    tools: HostTools,
    version: int,
    chain: str,
    addresses: Sequence[IpInterface] | None,
    spared: Sequence[IpInterface],
    *,
    is_other: bool,
) -> bool:
    """Remove the rules with one listing and one transaction; return True if there were any.

    `addresses` and `spared`: see `masquerade.remove`. `is_other`: the configuration names another backend.
    Raises ToolNotFoundError, CniError.
    """
    listed = tools.run(_TOOL[version], [*_wait(), "-t", "nat", "-S", _POSTROUTING])
    if listed.status and any(text in listed.stderr for text in _NO_TABLE):
        return False
    _require(_TOOL[version], listed)
    jumps = jumps_to(chain, listed)
    if addresses is None:
        living = {ipaddress.ip_network(item.ip) for item in spared}
        doomed = [jump for jump in jumps if _source(jump) not in living]
    else:
        # The source is the host's address; older plugins wrote the network.
        sources = {network for item in addresses for network in (ipaddress.ip_network(item.ip), item.network)}
        doomed = [jump for jump in jumps if _source(jump) in sources]
    changes = [("-D", *jump) for jump in doomed]
    # An interrupted ADD may leave a chain without a jump. The program works, so exit status 1 means an absent chain.
    if len(doomed) == len(jumps) and (jumps or (not is_other and _nat(tools, version, "-S", chain))):
        # The declaration empties the chain, and creates it if it is absent.
        changes = [(f":{chain}", "-", "[0:0]"), *changes, ("-X", chain)]
    if changes:
        _restore(tools, version, changes)
    return bool(changes)


def jumps_to(chain: str, listed: ToolExit) -> list[list[str]]:
    """Return the rules in the output of `iptables -S` that jump to `chain`, each with its own chain first."""
    return [rule for rule in _rules_naming(chain, listed) if ("-j", chain) in itertools.pairwise(rule)]


def _rules_naming(chain: str, listed: ToolExit) -> list[list[str]]:
    # The comments of other rules can hold anything. All of them as text would take three times the memory.
    lines = [line.decode(errors="surrogateescape") for line in io.BytesIO(listed.stdout) if chain.encode() in line]
    rules = [shlex.split(line) for line in lines]
    return [rule[1:] for rule in rules if rule[0] == "-A"]


def _meaning(rule: Sequence[str]) -> tuple[object, ...]:
    """Return a key that is equal for equal rules of one owner, however they are written."""
    value = dict(itertools.pairwise(rule))
    networks = [ipaddress.ip_network(value[key], strict=False) if key in value else None for key in ("-s", "-d")]
    return rule[0], "!" in rule, *networks, value.get("-j")


def _source(jump: list[str]) -> IpNetwork | None:
    return ipaddress.ip_network(jump[jump.index("-s") + 1]) if "-s" in jump else None


def _nat(tools: HostTools, version: int, *arguments: str) -> bool:
    """Run a command on the table nat; return False if its chain or rule is absent (or exists, for -N)."""
    end = _run(tools, _TOOL[version], [*_wait(), "-t", "nat", *arguments], tolerated=_ABSENT)
    return end.status == 0


def _restore(tools: HostTools, version: int, changes: Sequence[Sequence[str]]) -> None:
    """Change the table nat in one transaction."""
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
    """Wait for the lock, but not longer than the deadline: a killed iptables gives no reason."""
    seconds = min(float(deadlines.IPTABLES_LOCK_SECONDS), deadline.current().left - 1)
    return "-w", str(max(1, int(seconds)))


def is_usable(tools: HostTools) -> bool:
    """Report whether the host can use this backend, whatever the present state of the table nat."""
    try:
        _run(tools, _TOOL[4], [*_wait(), "-t", "filter", "-S", "INPUT", "1"], tolerated=_ABSENT)
    except (ToolNotFoundError, CniError):
        return False
    return True
