"""`ipMasq`: what a container sends beyond its own network leaves with the host's address.

Chains, rules, names and comments are those of the reference plugins (containernetworking/plugins `pkg/ip`, ipmasq), so
that either removes what the other made. Different on purpose: one attachment's removal leaves that of another
interface of the same container alone, and a container whose namespace has gone leaves no rules behind.
"""

from __future__ import annotations

import hashlib
import ipaddress
import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from multus_daemon import deadlines
from multus_daemon.attachment import ToolExit
from multus_daemon.builtin import nftables
from multus_daemon.builtin.contract import Call
from multus_daemon.builtin.veth import Removed
from multus_daemon.cni import gojson
from multus_daemon.cni.errors import CniError, InternalError
from multus_daemon.ports import HostTools, ToolNotFoundError

IpInterface = ipaddress.IPv4Interface | ipaddress.IPv6Interface
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

KEYS: Final = ("ipMasq", "ipMasqBackend")
IPTABLES: Final = "iptables"
NFTABLES: Final = "nftables"

_WAIT: Final = ("-w", str(deadlines.IPTABLES_LOCK_SECONDS))
_ABSENT: Final = 1  # exit status of iptables for a chain or rule that is not there, or is already
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
    backend = gojson.get_str(call.fields, "ipMasqBackend")
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
    """Remove the rules of both backends, as the configuration may have changed; none is done.

    `addresses`: those that the interface had; None where the whole container has gone, or all that it may have had but
    those that are `spared`. Every backend is tried; then the failures of those that the host can use are raised, as
    CniError.
    """
    tools, owner = _tools(call), owner_of(call)
    failures: list[str] = []
    for version in (4, 6):
        mine = None if addresses is None else [item for item in addresses if item.version == version]
        if mine == []:
            continue
        try:
            _remove_iptables(tools, version, owner, mine, [item for item in spared if item.version == version])
        except ToolNotFoundError:
            pass
        except CniError as error:
            if _iptables_is_usable(tools, version):
                failures.append(str(error))
    try:
        _remove_nft(tools, owner)
    except ToolNotFoundError:
        pass
    except CniError as error:
        if nftables.is_usable(tools):
            failures.append(str(error))
    if failures:
        raise InternalError(f"failed to stop masquerading: {'; '.join(failures)}")


def forget(call: Call, removed: Removed) -> None:
    """`remove`, for a DEL which has found or removed the interface; nothing without `ipMasq`. Raises CniError."""
    try:
        if not is_wanted(call) or call.tools is None:
            return
    except gojson.JsonError:
        # No ADD has come past this either.
        return
    addresses = removed.addresses
    if addresses is None and not removed.is_namespace_gone and call.prev_result is not None:
        # Gone by itself, and another interface of the container may live: only what is known to be its own.
        addresses = tuple(ipaddress.ip_interface(ip.address) for ip in call.prev_result.ips)
    # Without a result the ADD was cut off, or the DEL of one that was, between interface and rules: all but what lives.
    remove(call, addresses, spared=removed.living)


def _tools(call: Call) -> HostTools:
    assert call.tools is not None, "asked of `unsupported` first"
    return call.tools


# --- iptables --------------------------------------------------------------------------------------------------------


def _add_iptables(tools: HostTools, version: int, owner: Owner, addresses: Sequence[IpInterface]) -> None:
    if not addresses:
        return
    rules = _rules(version, owner, addresses)
    if _nat(tools, version, "-N", owner.chain):
        # A new chain: no rule can be there yet, and one call makes all of them, or none.
        _restore(tools, version, [("-A", *rule) for rule in rules])
        return
    for rule in rules:
        if not _nat(tools, version, "-C", *rule) and not _nat(tools, version, "-A", *rule):
            raise InternalError(f"failed to masquerade: {_TOOL[version]} has not added {shlex.join(rule)}")


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
    tools: HostTools,
    version: int,
    owner: Owner,
    addresses: Sequence[IpInterface] | None,
    spared: Sequence[IpInterface],
) -> None:
    if not _nat(tools, version, "-S", owner.chain):
        return
    listed = _run(tools, _TOOL[version], [*_WAIT, "-t", "nat", "-S", _POSTROUTING])
    jumps = [jump for line in listed.stdout.decode().splitlines() if (jump := _jump(line, owner.chain))]
    # The host's address alone; older plugins wrote the network.
    sources = None if addresses is None else {network for item in addresses for network in (_host(item), item.network)}
    living = {_host(item) for item in spared}
    gone = [jump for jump in jumps if (_source(jump) not in living if sources is None else _source(jump) in sources)]
    changes = [("-D", *jump) for jump in gone]
    if len(gone) == len(jumps):
        changes += [("-F", owner.chain), ("-X", owner.chain)]
    if changes:
        _restore(tools, version, changes)


def _jump(line: str, chain: str) -> list[str]:
    """The specification in a line of `iptables -S`, if it leads to `chain`; else nothing."""
    if chain not in line:
        return []
    words = shlex.split(line)
    return words[1:] if words[0] == "-A" and ("-j", chain) in itertools.pairwise(words) else []


def _source(jump: list[str]) -> IpNetwork | None:
    return ipaddress.ip_network(jump[jump.index("-s") + 1]) if "-s" in jump else None


def _host(address: IpInterface) -> IpNetwork:
    return ipaddress.ip_network(address.ip)


def _nat(tools: HostTools, version: int, *arguments: str) -> bool:
    """One command on the table nat; False where the chain or rule is not there, or, to be made, is there already."""
    end = _run(tools, _TOOL[version], [*_WAIT, "-t", "nat", *arguments], tolerated=_ABSENT)
    return end.status == 0


def _restore(tools: HostTools, version: int, changes: Sequence[Sequence[str]]) -> None:
    """Several changes of the table nat as one transaction."""
    lines = ["*nat", *(" ".join(map(_quoted, change)) for change in changes), "COMMIT", ""]
    _run(tools, f"{_TOOL[version]}-restore", [*_WAIT, "--noflush"], "\n".join(lines).encode())


def _quoted(word: str) -> str:
    if not word or any(character in word for character in ' "\\'):
        return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return word


def _run(tools: HostTools, tool: str, arguments: Sequence[str], stdin: bytes = b"", *, tolerated: int = 0) -> ToolExit:
    end = tools.run(tool, arguments, stdin)
    if end.status not in (0, tolerated):
        raise InternalError(f"{tool} failed (exit status {end.status}): {end.stderr or 'no message'}")
    return end


def _iptables_is_usable(tools: HostTools, version: int = 4) -> bool:
    """Whether the host can work by this backend, whatever the table nat of today looks like."""
    try:
        _run(tools, _TOOL[version], [*_WAIT, "-t", "filter", "-S", "INPUT", "1"], tolerated=_ABSENT)
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


def _remove_nft(tools: HostTools, owner: Owner) -> None:
    if found := _nft_rules(tools, owner):
        table = f"{_CHECKS.family} {_CHECKS.table}"
        lines = [f"delete rule {table} {_CHECKS.name} handle {rule.handle}" for rule in found]
        nftables.run_text(tools, "\n".join((*lines, "")))


def _nft_rules(tools: HostTools, owner: Owner) -> list[nftables.Rule]:
    return [rule for rule in nftables.rules(tools, _CHECKS) if rule.comment.startswith(owner.nft_prefix)]
