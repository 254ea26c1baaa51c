"""`ipMasq`: what a container sends beyond its own network leaves with the host's address.

Chains, rules, names and comments are those of the reference plugins (containernetworking/plugins `pkg/ip`, ipmasq), so
that either removes what the other made. Different on purpose: one attachment's removal leaves that of another
interface of the same container alone, and a container whose namespace has gone leaves no rules behind.
"""

from __future__ import annotations

import hashlib
import ipaddress
import itertools
import logging
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from multus_daemon import deadlines
from multus_daemon.plugins.builtin import nftables
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.veth import Removed
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import ToolExit
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError, InternalError
from multus_daemon.spec.ports import HostTools, ToolNotFoundError

log = logging.getLogger(__name__)

IpInterface = ipaddress.IPv4Interface | ipaddress.IPv6Interface
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

KEYS: Final = ("ipMasq", "ipMasqBackend")
IPTABLES: Final = "iptables"
NFTABLES: Final = "nftables"

_ABSENT: Final = 1  # exit status of iptables for a chain or rule that is not there, or is already; and for much else
# What iptables says where the kernel has no such table, so that there are no rules; its exit status says other things.
_NO_TABLE: Final = (
    "Table does not exist",
    "Protocol not supported",
    "Operation not supported",
    "Address family not supported",
    "rule set generation id: Invalid argument",
)
_MULTICAST: Final = {4: "224.0.0.0/4", 6: "ff00::/8"}
_TOOL: Final = {4: "iptables", 6: "ip6tables"}
_POSTROUTING: Final = "POSTROUTING"
_CHECKS: Final = nftables.Chain("inet", "cni_plugins_masquerade", "masq_checks")
_TABLE_IS: Final = "Masquerading for plugins from github.com/containernetworking/plugins"
_CHECKS_ARE: Final = "Masquerade traffic from certain IPs to any (non-multicast) IP outside their subnet"
_COMMENT_MAX: Final = 128  # bytes, NFTNL_UDATA_COMMENT_MAXLEN


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose rules: one interface of a container on a network."""

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


def owner_of(call: Call) -> Owner:
    """The owner that a call is about."""
    return Owner(call.name, call.invocation.container_id, call.invocation.ifname)


def is_wanted(call: Call) -> bool:
    """`ipMasq`. Raises JsonError, for what `ipMasqBackend` is too."""
    gojson.get_str(call.fields, "ipMasqBackend")
    return bool(gojson.get_bool(call.fields, "ipMasq"))


def unsupported(call: Call) -> str:
    """What the call asks for that can't be done here; empty if nothing. Raises JsonError."""
    if not is_wanted(call):
        return ""
    if call.tools is None:
        return "ipMasq: true"
    backend = gojson.get_str(call.fields, "ipMasqBackend")
    return "" if backend in (None, IPTABLES, NFTABLES) else f'ipMasqBackend: "{backend}"'


# --- both backends ---------------------------------------------------------------------------------------------------


def add(call: Call, addresses: Sequence[IpInterface]) -> None:
    """Masquerade the addresses, by the backend that the configuration names, else iptables if the host has it.

    What is there already counts as done. Raises CniError; `remove` undoes what was made until then.
    """
    tools, owner = _tools(call), owner_of(call)
    backend = _backend(call)
    try:
        if backend == NFTABLES:
            _add_nft(tools, owner, addresses)
            return
        try:
            for version in (4, 6):
                _add_iptables(tools, version, owner, [item for item in addresses if item.version == version])
        except (ToolNotFoundError, CniError):
            if backend == IPTABLES or _iptables_is_usable(tools) or not nftables.is_usable(tools):
                raise
            _add_nft(tools, owner, addresses)
    except ToolNotFoundError as error:
        raise InternalError(
            f"failed to masquerade: {error}", "install it on the host, or choose the other ipMasqBackend"
        ) from error


def remove(call: Call, addresses: Sequence[IpInterface] | None, *, spared: Sequence[IpInterface] = ()) -> None:
    """Remove the rules of both backends; none is done.

    `addresses`: those that were masqueraded. None where they are not known: by the names of chain and comments, all
    rules of the container on the network but those of the addresses that are `spared`. Both backends are tried. Then
    it is a failure, raised as CniError, where the rules may still be there: a program that fails, for want of the lock
    or whatever else, has not said that there are none.
    """
    tools, owner, backend = _tools(call), owner_of(call), _backend(call)
    versions = (4, 6) if addresses is None else sorted({item.version for item in addresses})
    attempts = [
        *(_tried(IPTABLES, partial(_remove_iptables, call, version, addresses, spared)) for version in versions),
        _tried(NFTABLES, partial(_remove_nft, tools, owner)),
    ]
    failures = [str(attempt.error) for attempt in attempts if attempt.error and _counts(attempt, attempts, backend)]
    # Whose ADD was done had the program.
    asked = [attempt for attempt in attempts if backend in ("", attempt.backend)]
    if call.prev_result is not None and not failures and all(attempt.is_missing for attempt in asked):
        failures = [str(attempt.error) for attempt in asked]
    if failures:
        raise InternalError(
            f"failed to stop masquerading: {'; '.join(dict.fromkeys(failures))}",
            f"its rules are those with {owner.chain} or {owner.nft_prefix} in them",
        )


def forget(call: Call, removed: Removed) -> None:
    """`remove`, for a DEL which has found or removed the interface; nothing without `ipMasq`. Raises CniError.

    By the addresses that the ADD reported, whatever the interface has now, and by those that it had.
    """
    if not _may_be(call):
        return
    recorded = _recorded(call)
    remove(call, (*recorded, *(removed.addresses or ())) if recorded else None, spared=removed.living)


def goes_by_name(call: Call) -> bool:
    """Whether a DEL has rules to remove and no result that has their addresses: the ADD was cut off, as a rule.

    Then the container's other interfaces are to be spared, so their addresses have to be known.
    """
    return _may_be(call) and not _recorded(call)


def _may_be(call: Call) -> bool:
    try:
        return call.tools is not None and is_wanted(call)
    except gojson.JsonError:
        # No ADD has come past this either.
        return False


def _recorded(call: Call) -> tuple[IpInterface, ...]:
    result = call.prev_result
    return () if result is None else tuple(ipaddress.ip_interface(ip.address) for ip in result.ips)


def _backend(call: Call) -> str:
    """The one that the configuration names; empty where it leaves that to the host."""
    try:
        return gojson.get_str(call.fields, "ipMasqBackend") or ""
    except gojson.JsonError:
        return ""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """To remove the rules of one backend, and of one family where there is a program for each."""

    backend: str
    found: bool = False
    """There were rules, which are gone."""
    error: Exception | None = None
    is_missing: bool = False
    """There is no such program."""


def _tried(backend: str, removal: Callable[[], bool]) -> _Attempt:
    try:
        return _Attempt(backend, found=removal())
    except ToolNotFoundError as error:
        return _Attempt(backend, error=error, is_missing=True)
    except CniError as error:
        return _Attempt(backend, error=error)


def _counts(attempt: _Attempt, attempts: Sequence[_Attempt], backend: str) -> bool:
    """Whether the rules may still be there by this failure. An ADD makes all of them in one backend."""
    if attempt.is_missing:
        return False
    if backend:
        is_other = attempt.backend != backend
    else:
        is_other = any(other.found for other in attempts if other.backend != attempt.backend)
    if is_other:
        log.warning("masquerading was by another backend, so this is no failure: %s", attempt.error)
    return not is_other


def _tools(call: Call) -> HostTools:
    assert call.tools is not None, "asked of `unsupported` first"
    return call.tools


# --- iptables --------------------------------------------------------------------------------------------------------


def _add_iptables(tools: HostTools, version: int, owner: Owner, addresses: Sequence[IpInterface]) -> None:
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
            (owner.chain, "!", "-d", _MULTICAST[version], "-j", "MASQUERADE", *comment),
            (_POSTROUTING, "-s", str(address.ip), "-j", owner.chain, *comment),
        )
    ]


def _remove_iptables(
    call: Call, version: int, addresses: Sequence[IpInterface] | None, spared: Sequence[IpInterface]
) -> bool:
    """Whether there were any: one listing, and one transaction, which does not ask what there was of the chain."""
    tools, chain = _tools(call), owner_of(call).chain
    listed = tools.run(_TOOL[version], [*_wait(), "-t", "nat", "-S", _POSTROUTING])
    if listed.status and any(text in listed.stderr for text in _NO_TABLE):
        return False
    _require(_TOOL[version], listed)
    jumps = [jump for line in _lines(listed) if (jump := _jump(line, chain))]
    # The host's address alone; older plugins wrote the network.
    sources = None if addresses is None else {network for item in addresses for network in (_host(item), item.network)}
    living = {_host(item) for item in spared}
    gone = [jump for jump in jumps if (_source(jump) not in living if sources is None else _source(jump) in sources)]
    changes = [("-D", *jump) for jump in gone]
    # Without a jump: the chain of an ADD that was cut off. The program works, so 1 means that there is none.
    if len(gone) == len(jumps) and (jumps or (_backend(call) != NFTABLES and _nat(tools, version, "-S", chain))):
        # Declared, it is there and empty, whatever was before.
        changes = [(f":{chain}", "-", "[0:0]"), *changes, ("-X", chain)]
    if changes:
        _restore(tools, version, changes)
    return bool(changes)


def _jump(line: str, chain: str) -> list[str]:
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
    lines = ["*nat", *(" ".join(map(_quoted, change)) for change in changes), "COMMIT", ""]
    _run(tools, f"{_TOOL[version]}-restore", [*_wait(), "--noflush"], "\n".join(lines).encode(errors="surrogateescape"))


def _quoted(word: str) -> str:
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
    """For the lock, but no longer than the caller has: iptables tells why it failed, who is ended does not."""
    seconds = min(float(deadlines.IPTABLES_LOCK_SECONDS), deadline.current().left - 1)
    return "-w", str(max(1, int(seconds)))


def _iptables_is_usable(tools: HostTools) -> bool:
    """Whether the host can work by this backend, whatever the table nat of today looks like."""
    try:
        _run(tools, _TOOL[4], [*_wait(), "-t", "filter", "-S", "INPUT", "1"], tolerated=_ABSENT)
    except (ToolNotFoundError, CniError):
        return False
    return True


# --- nftables --------------------------------------------------------------------------------------------------------


def _add_nft(tools: HostTools, owner: Owner, addresses: Sequence[IpInterface]) -> None:
    stale = _nft_rules(tools, owner)
    try:
        nftables.run_text(tools, _nft_text(owner, addresses, stale, comments=True))
    except nftables.NftError:
        # A kernel before 5.10 knows no comments on tables and chains; any other cause comes up again.
        nftables.run_text(tools, _nft_text(owner, addresses, stale, comments=False))


def _nft_text(owner: Owner, addresses: Sequence[IpInterface], stale: Sequence[nftables.Rule], *, comments: bool) -> str:
    table = f"{_CHECKS.family} {_CHECKS.table}"
    about_table, about_chain = (f' {{ comment "{text}" ; }}' if comments else "" for text in (_TABLE_IS, _CHECKS_ARE))
    lines = [
        f"add table {table}{about_table}",
        f"add chain {table} {_CHECKS.name}{about_chain}",
        f"add chain {table} postrouting {{ type nat hook postrouting priority srcnat ; }}",
        # Filled anew each time, so that there is one way in whoever has made the chain.
        f"flush chain {table} postrouting",
        f"add rule {table} postrouting ip daddr {_MULTICAST[4]} return",
        f"add rule {table} postrouting ip6 daddr {_MULTICAST[6]} return",
        f"add rule {table} postrouting goto {_CHECKS.name}",
        *(f"delete rule {table} {_CHECKS.name} handle {rule.handle}" for rule in stale),
    ]
    for item in addresses:
        family = "ip" if item.version == 4 else "ip6"
        lines.append(
            f"add rule {table} {_CHECKS.name} {family} saddr {item.ip} {family} daddr != {item.network} masquerade "
            f'comment "{owner.nft_comment}"'
        )
    return "\n".join((*lines, ""))


def _remove_nft(tools: HostTools, owner: Owner) -> bool:
    """Whether there were any."""
    found = _nft_rules(tools, owner)
    if found:
        table = f"{_CHECKS.family} {_CHECKS.table}"
        lines = [f"delete rule {table} {_CHECKS.name} handle {rule.handle}" for rule in found]
        nftables.run_text(tools, "\n".join((*lines, "")))
    return bool(found)


def _nft_rules(tools: HostTools, owner: Owner) -> list[nftables.Rule]:
    return [rule for rule in nftables.rules(tools, _CHECKS) if rule.comment.startswith(owner.nft_prefix)]
