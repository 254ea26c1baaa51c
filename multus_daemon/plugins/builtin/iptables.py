"""Run the host's iptables programs: list rules, add what is missing, remove a chain with the jumps to it.

A rule is its chain and its words. A change is a command, such as `-A`, and a rule.
"""

from __future__ import annotations

import io
import ipaddress
import itertools
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

from multus_daemon import deadlines
from multus_daemon.kernel.inet import IpInterface, IpNetwork
from multus_daemon.plugins.plugin import HostTools
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import ToolExit
from multus_daemon.spec.cni.errors import CniError, InternalError, Origin

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
CHAIN: Final = re.compile(r"[\w.:@+][\w.:@+-]{0,27}")
"""A valid name of a chain in a configuration: it becomes a part of a program's input."""
COMMENTED: Final = ("-m", "comment", "--comment")
POSTROUTING: Final = "POSTROUTING"
_TOOL: Final = {4: "iptables", 6: "ip6tables"}
_COMPARED: Final = ("-i", "-o", "-p", "--dport", "--dports", "--to-destination", "-j")


class IptablesError(InternalError, origin=Origin.NODE):
    """A program of iptables refused; `iptables-restore` has changed nothing then."""


def settle(
    tools: HostTools, version: int, changes: Callable[[], Sequence[Sequence[str]]], *, table: str = "nat"
) -> None:
    """Make the changes that `changes` returns; if that fails, those that it returns then.

    Another ADD may have made a chain meanwhile. Raises CniError.
    """
    wanted = changes()
    try:
        restore(tools, version, wanted, table=table)
    except IptablesError:
        restore(tools, version, changes(), table=table)


def lacking(
    tools: HostTools, version: int, wanted: Sequence[Sequence[str]], *, table: str = "nat"
) -> list[Sequence[str]]:
    """Return those of the changes `wanted` whose rules are missing, after the changes that make missing chains.

    They fail if another program has made such a chain meanwhile. (A declaration as in `iptables-save` would empty that
    chain.) The last word of each rule must be one that a listing has in the same form. Raises CniError.
    """
    listed: dict[str, list[list[str]] | None] = {}
    for chain in dict.fromkeys(rule[0] for _, *rule in wanted):
        ends = {rule[-1] for _, *rule in wanted if rule[0] == chain}
        listed[chain] = rules_in(tools, version, chain, ends, table=table)
    present = {_meaning(rule) for rules in listed.values() for rule in rules or ()}
    missing = [change for change in wanted if _meaning(change[1:]) not in present]
    return [*(("-N", chain) for chain, rules in listed.items() if rules is None), *missing]


def _meaning(rule: Sequence[str]) -> tuple[object, ...]:
    """Return a key that is equal for rules with the same meaning: a listing has them with other words."""
    value = dict(itertools.pairwise(rule))
    networks = [ipaddress.ip_network(value[key], strict=False) if key in value else None for key in ("-s", "-d")]
    return rule[0], "!" in rule, *networks, *map(value.get, _COMPARED)


def remove(
    tools: HostTools,
    version: int,
    chain: str,
    addresses: Sequence[IpInterface] | None,
    spared: Sequence[IpInterface],
    *,
    is_other: bool,
    parent: str = POSTROUTING,
) -> bool:
    """Remove the rules with one listing and one transaction; return True if there were any.

    `addresses` and `spared`: see `masquerade.remove`. `is_other`: the configuration names another backend. `parent`:
    the chain that has the jumps to `chain`. Raises CniError.
    """
    listed = tools.run(_TOOL[version], [*_wait(), "-t", "nat", "-S", parent])
    if listed.status and any(text in listed.stderr for text in _NO_TABLE):
        return False
    if parent == POSTROUTING or listed.status != _ABSENT:
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
    # An interrupted ADD may leave a chain without a jump.
    if len(doomed) == len(jumps) and (jumps or (not is_other and rules_in(tools, version, chain) is not None)):
        # The declaration empties the chain, and creates it if it is absent.
        changes = [(f":{chain}", "-", "[0:0]"), *changes, ("-X", chain)]
    restore(tools, version, changes)
    return bool(changes)


def rules_in(
    tools: HostTools, version: int, chain: str, naming: Collection[str] = ("",), *, table: str = "nat"
) -> list[list[str]] | None:
    """Return the rules of `chain` with one of the texts `naming`; None if there is no `chain`. Raises CniError."""
    end = tools.run(_TOOL[version], [*_wait(), "-t", table, "-S", chain])
    if end.status == _ABSENT and not any(text in end.stderr for text in _NO_TABLE):
        return None
    _require(_TOOL[version], end)
    return list(_rules_naming(naming, end))


def jumps_to(chain: str, listed: ToolExit) -> list[list[str]]:
    """Return the rules in the output of `iptables -S` that jump to `chain`, each with its own chain first."""
    return [rule for rule in _rules_naming([chain], listed) if ("-j", chain) in itertools.pairwise(rule)]


def _rules_naming(texts: Collection[str], listed: ToolExit) -> Iterator[list[str]]:
    # The comments of other rules can hold anything. All of them as text would take three times the memory.
    encoded = [text.encode() for text in texts]
    for line in io.BytesIO(listed.stdout):
        if any(text in line for text in encoded):
            command, *rule = shlex.split(line.decode(errors="surrogateescape"))
            if command == "-A":
                yield rule


def _source(jump: list[str]) -> IpNetwork | None:
    return ipaddress.ip_network(jump[jump.index("-s") + 1]) if "-s" in jump else None


def add_chain(tools: HostTools, version: int, chain: str) -> bool:
    """Add a chain to the table nat; return False if it exists. Raises CniError."""
    end = tools.run(_TOOL[version], [*_wait(), "-t", "nat", "-N", chain])
    if end.status != _ABSENT:
        _require(_TOOL[version], end)
    return not end.status


def restore(tools: HostTools, version: int, changes: Sequence[Sequence[str]], *, table: str = "nat") -> None:
    """Make all changes of a table, or none, by `iptables-restore`. Raises CniError."""
    if changes:
        lines = [f"*{table}", *(" ".join(map(quoted, change)) for change in changes), "COMMIT", ""]
        tool, stdin = f"{_TOOL[version]}-restore", "\n".join(lines).encode(errors="surrogateescape")
        _require(tool, tools.run(tool, [*_wait(), "--noflush"], stdin))


def quoted(word: str) -> str:
    """Return the word quoted for `iptables-restore`."""
    if not word or any(character in word for character in ' "\\'):
        return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return word


def _require(tool: str, end: ToolExit) -> None:
    if end.status:
        raise IptablesError(f"{tool} failed (exit status {end.status}): {end.stderr or 'no message'}")


def _wait() -> tuple[str, str]:
    """Return options to wait for the lock, within the deadline: a killed iptables gives no reason."""
    seconds = min(float(deadlines.IPTABLES_LOCK_SECONDS), deadline.current().left - 1)
    return "-w", str(max(1, int(seconds)))


def is_usable(tools: HostTools) -> bool:
    """Return True if iptables works on the host, even if the table nat has no rules yet."""
    try:
        rules_in(tools, 4, "INPUT", table="filter")
    except CniError:
        return False
    return True
