"""`ipMasq`: packets from a container to other networks leave with the host's address; by iptables or nftables.

Chains, rules, names and comments are those of the reference plugins (containernetworking/plugins `pkg/ip`, ipmasq), so
that either removes what the other made; `docs/builtin-plugins.md` lists the differences.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from multus_daemon.kernel.inet import IpInterface, interface_of
from multus_daemon.kernel.links import ANY_LINK
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import backends, iptables, nftables, spoofing, veth
from multus_daemon.plugins.builtin.contract import Call, ipam_type, prefixed
from multus_daemon.plugins.builtin.interfaces import ignoring_absent_netns, located, step
from multus_daemon.plugins.plugin import HostTools
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError, InternalError

KEYS: Final = ("ipMasq", "ipMasqBackend")
_COMMENT_MAX: Final = 128  # bytes, NFTNL_UDATA_COMMENT_MAXLEN
_MULTICAST: Final = {4: "224.0.0.0/4", 6: "ff00::/8"}
_CHECKS: Final = nftables.Chain("inet", "cni_plugins_masquerade", "masq_checks")
_TABLE_COMMENT: Final = "Masquerading for plugins from github.com/containernetworking/plugins"
_CHECKS_COMMENT: Final = "Masquerade traffic from certain IPs to any (non-multicast) IP outside their subnet"


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of rules: an interface of a container on a network. Gives the names in its rules."""

    network: str
    container_id: str
    ifname: str

    @property
    def chain(self) -> str:
        """The chain of iptables, one for all interfaces of the container on the network."""
        return f"CNI-{_hash(self.network + self.container_id)[:24]}"

    @property
    def comment(self) -> str:
        """The comment on each rule of iptables."""
        return f'name: "{self.network}" id: "{self.container_id}"'

    @property
    def nft_prefix(self) -> str:
        """The unique prefix of the comment on each rule of nftables."""
        return f"{_hash(self.network)[:16]}-{_hash(f'{self.ifname}:{self.container_id}')[:16]}"

    @property
    def nft_comment(self) -> str:
        """The comment on each rule of nftables."""
        names = f"net: {self.network}, if: {self.ifname}, id: {self.container_id}".replace('"', "")
        return f"{self.nft_prefix}, {names}".encode()[:_COMMENT_MAX].decode("utf-8", "ignore")


def _hash(text: str) -> str:
    return hashlib.sha512(text.encode()).hexdigest()


def is_wanted(call: Call) -> bool:
    """Return `ipMasq`. Raises JsonError for an invalid `ipMasq` or `ipMasqBackend`."""
    gojson.get_str(call.fields, "ipMasqBackend")
    return bool(gojson.get_bool(call.fields, "ipMasq"))


def makes_rules(fields: Mapping[str, Any]) -> bool:
    """Return True if `bridge` or `ptp` with this configuration makes firewall rules; False if it can't be read."""
    try:
        return bool(gojson.get_bool(fields, "ipMasq") or gojson.get_bool(fields, "macspoofchk"))
    except gojson.JsonError:
        return False


def unsupported(call: Call) -> str:
    """Return a key or value of the configuration that this host does not support; empty if none. Raises JsonError."""
    if not is_wanted(call):
        return ""
    if call.tools is None:
        return "ipMasq: true"
    backend = gojson.get_str(call.fields, "ipMasqBackend")
    return "" if backend in (None, backends.IPTABLES, backends.NFTABLES) else f'ipMasqBackend: "{backend}"'


def add(call: Call, addresses: Sequence[IpInterface]) -> None:
    """Masquerade the addresses with the configured backend, else with iptables if the host has it, else nftables.

    Existing rules are kept. Raises CniError; then `remove` removes the rules that were made.
    """
    tools, owner, backend = _settings(call)

    def by_iptables() -> None:
        for version in (4, 6):
            rules: Sequence[Sequence[str]] = _rules(owner, version, addresses)
            if rules and not iptables.add_chain(tools, version, owner.chain):
                # It is that of another interface, or of an interrupted ADD; else the listing fails too. The rule that
                # masquerades may be there already, and the exceptions come before it.
                again = [("-I" if rule[-1] == "ACCEPT" else how, *rule) for how, *rule in rules]
                rules = iptables.lacking(tools, version, again)
            iptables.restore(tools, version, rules)

    def by_nftables() -> None:
        stale = _stale(tools, owner)
        nftables.run_commented(tools, lambda comments: _transaction(owner, addresses, stale, comments=comments))

    with prefixed("failed to masquerade"):
        backends.make(tools, backend, by_iptables=by_iptables, by_nftables=by_nftables)


def differences(call: Call, addresses: Sequence[IpInterface]) -> list[Difference]:
    """Return one difference if rules for the addresses are missing. Raises CniError.

    Without a configured backend, the rules of either suffice. Runs programs, except for a CHECK.
    """
    if call.invocation.verb == "CHECK":
        return []
    tools, owner, backend = _settings(call)

    def in_iptables() -> bool:
        return not any(iptables.lacking(tools, version, _rules(owner, version, addresses)) for version in (4, 6))

    if backends.has(backend, in_iptables=in_iptables, in_nftables=partial(_has_nft, tools, owner, addresses)):
        return []
    names = ", ".join(str(item.ip) for item in addresses)
    return [Difference(f"masquerading rules for {names} are missing", partial(add, call, addresses), on_host=True)]


def remove(call: Call, addresses: Sequence[IpInterface] | None, *, spared: Sequence[IpInterface] = ()) -> None:
    """Remove the rules of both backends. Raises CniError if rules may still exist, after both were tried.

    `addresses`: the masqueraded addresses. None, unknown: remove all rules of the container on the network, found by
    the names of chain and comments, except those for addresses in `spared`.
    """
    tools, owner, backend = _settings(call)
    removals: list[tuple[str, Callable[[], bool]]] = []
    for version in (4, 6) if addresses is None else sorted({item.version for item in addresses}):
        is_other = backend == backends.NFTABLES
        removal = partial(iptables.remove, tools, version, owner.chain, addresses, spared, is_other=is_other)
        removals.append((backends.IPTABLES, removal))
    removals.append((backends.NFTABLES, lambda: nftables.run_text(tools, _stale(tools, owner))))
    failures = backends.remove(backend, removals, is_added=call.prev_result is not None)
    if failures:
        raise InternalError(
            f"failed to stop masquerading: {'; '.join(failures)}",
            f"its rules contain {owner.chain} or {owner.nft_prefix}",
        )


def remove_link(call: Call, netns: PodNetns) -> list[Callable[[], object]]:
    """Remove the call's link; return functions that remove its rules, also those of `macspoofchk`. Raises CniError.

    Rules of `ipMasq` are removed for the addresses of ADD's result and of the removed link. Without a result, they are
    found by name, and rules for addresses of other interfaces stay.
    """
    is_masquerading = _may_have_rules(call)
    found = veth.remove(call, netns, addresses=is_masquerading)
    steps: list[Callable[[], object]] = [partial(spoofing.remove, call)] if spoofing.is_wanted(call) else []
    if is_masquerading:
        recorded = [interface_of(ip.address) for ip in call.prev_result.ips] if call.prev_result else []
        spared = [] if recorded else _living(call, netns)
        steps.append(partial(remove, call, [*recorded, *found] if recorded else None, spared=spared))
    return steps


def _may_have_rules(call: Call) -> bool:
    try:
        # bridge without an IPAM plugin masquerades nothing.
        return call.tools is not None and is_wanted(call) and bool(ipam_type(call))
    except (gojson.JsonError, CniError):
        # An ADD refuses such a configuration.
        return False


def _living(call: Call, netns: PodNetns) -> list[IpInterface]:
    """Return the addresses of the namespace's other links."""
    with ignoring_absent_netns(), located(call), netns.inside(), step("list the addresses of other interfaces"):
        return [item.address for item in netns.pod.addresses(ANY_LINK)]
    return []


def _settings(call: Call) -> tuple[HostTools, Owner, str]:
    """Return the tools, the owner, and the configured backend (empty: the one that the host has)."""
    try:
        backend = gojson.get_str(call.fields, "ipMasqBackend") or ""
    except gojson.JsonError:
        backend = ""
    return call.host_tools, Owner(call.name, call.invocation.container_id, call.invocation.ifname), backend


def _rules(owner: Owner, version: int, addresses: Sequence[IpInterface]) -> list[tuple[str, ...]]:
    """Return the changes that make the rules of iptables for the addresses of one IP version."""
    comment, changes = (*iptables.COMMENTED, owner.comment), list[tuple[str, ...]]()
    for address in addresses:
        if address.version == version:
            changes.append(("-A", owner.chain, "-d", str(address), *comment, "-j", "ACCEPT"))
            changes.append(("-A", owner.chain, "!", "-d", _MULTICAST[version], *comment, "-j", "MASQUERADE"))
            changes.append(("-A", iptables.POSTROUTING, "-s", str(address.ip), *comment, "-j", owner.chain))
    # Several addresses share one.
    return list(dict.fromkeys(changes))


# --- nftables: a rule for each address, in a chain that all plugins share --------------------------------------------


def _transaction(owner: Owner, addresses: Sequence[IpInterface], stale: Sequence[str], *, comments: bool) -> list[str]:
    table = f"{_CHECKS.family} {_CHECKS.table}"
    about_table = f' {{ comment "{_TABLE_COMMENT}" ; }}' if comments else ""
    about_chain = f' {{ comment "{_CHECKS_COMMENT}" ; }}' if comments else ""
    lines = [
        f"add table {table}{about_table}",
        f"add chain {table} {_CHECKS.name}{about_chain}",
        f"add chain {table} postrouting {{ type nat hook postrouting priority srcnat ; }}",
        # Filled again each time, so that its content does not depend on the plugin that made it.
        f"flush chain {table} postrouting",
        f"add rule {table} postrouting ip daddr 224.0.0.0/4 return",
        f"add rule {table} postrouting ip6 daddr ff00::/8 return",
        f"add rule {table} postrouting goto {_CHECKS.name}",
        *stale,
    ]
    for item in addresses:
        family = "ip" if item.version == 4 else "ip6"
        lines.append(
            f"add rule {table} {_CHECKS.name} {family} saddr {item.ip} {family} daddr != {item.network} masquerade "
            f'comment "{owner.nft_comment}"'
        )
    return lines


def _has_nft(tools: HostTools, owner: Owner, addresses: Sequence[IpInterface]) -> bool:
    rules = nftables.rules(tools, _CHECKS, of_table=True)
    own = [rule for rule in rules if rule.chain == _CHECKS.name and rule.comment.startswith(owner.nft_prefix)]
    return len(own) >= len(addresses) and any(rule.target == _CHECKS.name for rule in rules)


def _stale(tools: HostTools, owner: Owner) -> list[str]:
    """Return the commands that delete the owner's rules."""
    return nftables.deletions(tools, _CHECKS, lambda rule: rule.comment.startswith(owner.nft_prefix))
