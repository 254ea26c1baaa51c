"""`ipMasq`: packets from a container to other networks leave with the host's address; by iptables or nftables.

Chains, rules, names and comments are those of the reference plugins (containernetworking/plugins `pkg/ip`, ipmasq), so
that either removes what the other made; `docs/builtin-plugins.md` lists the differences.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from multus_daemon.kernel.inet import IpInterface
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import iptables, nftables, spoofing, veth
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.veth import Removed
from multus_daemon.plugins.plugin import Difference, HostTools, ToolNotFoundError
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError, InternalError

log = logging.getLogger(__name__)

KEYS: Final = ("ipMasq", "ipMasqBackend")
_IPTABLES: Final = "iptables"
_NFTABLES: Final = "nftables"
_INSTALL: Final = "install it on the host, or choose the other ipMasqBackend"
_COMMENT_MAX: Final = 128  # bytes, NFTNL_UDATA_COMMENT_MAXLEN
_CHECKS: Final = nftables.Chain("inet", "cni_plugins_masquerade", "masq_checks")
_TABLE_COMMENT: Final = "Masquerading for plugins from github.com/containernetworking/plugins"
_CHECKS_COMMENT: Final = "Masquerade traffic from certain IPs to any (non-multicast) IP outside their subnet"


@dataclass(frozen=True, slots=True)
class Owner:
    """An interface of a container on a network, and the names in its rules."""

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
    """Return `ipMasq`. Raises JsonError, also for `ipMasqBackend`."""
    gojson.get_str(call.fields, "ipMasqBackend")
    return bool(gojson.get_bool(call.fields, "ipMasq"))


def unsupported(call: Call) -> str:
    """Name the key or value of the configuration that this host can't provide; empty if none. Raises JsonError."""
    if not is_wanted(call):
        return ""
    if call.tools is None:
        return "ipMasq: true"
    backend = gojson.get_str(call.fields, "ipMasqBackend")
    return "" if backend in (None, _IPTABLES, _NFTABLES) else f'ipMasqBackend: "{backend}"'


def add(call: Call, addresses: Sequence[IpInterface]) -> None:
    """Masquerade the addresses by the configured backend; without one by iptables, if the host has it, else nftables.

    Existing rules are kept. Raises CniError; then `remove` removes the rules that were made.
    """
    tools, owner, backend = _settings(call)
    try:
        if backend == _NFTABLES:
            _add_nft(tools, owner, addresses)
            return
        try:
            for version in (4, 6):
                of_version = [item for item in addresses if item.version == version]
                iptables.add(tools, version, owner.chain, owner.comment, of_version)
        except (ToolNotFoundError, CniError):
            if backend == _IPTABLES or iptables.is_usable(tools) or not nftables.is_usable(tools):
                raise
            _add_nft(tools, owner, addresses)
    except ToolNotFoundError as error:
        raise InternalError(f"failed to masquerade: {error}", _INSTALL) from error


def differences(call: Call, addresses: Sequence[IpInterface]) -> list[Difference]:
    """Return one difference if rules for the addresses are missing. Raises CniError.

    Without a configured backend either may have them. Runs programs.
    """
    tools, owner, backend = _settings(call)
    try:
        if backend != _NFTABLES and _has_iptables(tools, owner, addresses, is_only=bool(backend)):
            return []
        if backend != _IPTABLES and _has_nft(tools, owner, addresses):
            return []
    except ToolNotFoundError as error:
        raise InternalError(f"the masquerading rules cannot be read: {error}", _INSTALL) from error
    names = ", ".join(str(item.ip) for item in addresses)
    return [Difference(f"masquerading rules for {names} are missing", partial(add, call, addresses), on_host=True)]


def _has_iptables(tools: HostTools, owner: Owner, addresses: Sequence[IpInterface], *, is_only: bool) -> bool:
    """Raises ToolNotFoundError and CniError if `is_only`: then no other backend can have the rules."""
    try:
        return all(
            iptables.has(tools, version, owner.chain, [item for item in addresses if item.version == version])
            for version in (4, 6)
        )
    except (ToolNotFoundError, CniError):
        if is_only:
            raise
        return False


def remove(call: Call, addresses: Sequence[IpInterface] | None, *, spared: Sequence[IpInterface] = ()) -> None:
    """Remove the rules of both backends. Raises CniError if rules may still exist, after both were tried.

    `addresses`: the masqueraded ones. None if they are unknown: remove all rules of the container on the network, by
    the names of chain and comments, but those for the addresses in `spared`.
    """
    tools, owner, backend = _settings(call)
    removals = []
    for version in (4, 6) if addresses is None else sorted({item.version for item in addresses}):
        is_other = backend == _NFTABLES
        removal = partial(iptables.remove, tools, version, owner.chain, addresses, spared, is_other=is_other)
        removals.append((_IPTABLES, removal))
    removals.append((_NFTABLES, partial(_remove_nft, tools, owner)))
    outcomes: list[tuple[str, bool | Exception]] = []
    for name, removal in removals:
        try:
            outcomes.append((name, removal()))
        except (ToolNotFoundError, CniError) as error:
            outcomes.append((name, error))
    # An ADD makes all rules in one backend.
    had_rules = {backend} if backend else {name for name, outcome in outcomes if outcome is True}
    failures = []
    for name, outcome in outcomes:
        if isinstance(outcome, CniError):
            if had_rules - {name}:
                log.warning("another backend had the masquerading rules, so this error is ignored: %s", outcome)
            else:
                failures.append(str(outcome))
    # The tool existed when ADD succeeded.
    asked = [outcome for name, outcome in outcomes if backend in ("", name)]
    if call.prev_result is not None and not failures and all(isinstance(item, ToolNotFoundError) for item in asked):
        failures = [str(item) for item in asked]
    if failures:
        raise InternalError(
            f"failed to stop masquerading: {'; '.join(dict.fromkeys(failures))}",
            f"its rules are those with {owner.chain} or {owner.nft_prefix} in them",
        )


def remove_link(call: Call, netns: PodNetns) -> Removed:
    """Remove the call's link by `veth.remove`; return the addresses that `forget` needs. Raises CniError."""
    if not _may_have_rules(call):
        return veth.remove(call, netns)
    # Without a result the rules go by name, and those for the addresses of other interfaces stay.
    return veth.remove(call, netns, addresses=True, others=not _recorded(call))


def forget(call: Call, removed: Removed) -> None:
    """Remove the rules in a DEL: those for the addresses of ADD's result and of the removed links. Raises CniError."""
    if _may_have_rules(call):
        recorded = _recorded(call)
        remove(call, (*recorded, *(removed.addresses or ())) if recorded else None, spared=removed.living)


def remove_left(call: Call, netns: PodNetns) -> None:
    """Remove the link and the rules that a DEL by a binary has left, also those of `macspoofchk`. Raises CniError."""
    forget(call, remove_link(call, netns))
    if spoofing.is_wanted(call):
        spoofing.remove(call)


def _may_have_rules(call: Call) -> bool:
    try:
        return call.tools is not None and is_wanted(call)
    except gojson.JsonError:
        # An ADD refuses such a configuration.
        return False


def _recorded(call: Call) -> list[IpInterface]:
    return [] if call.prev_result is None else [ipaddress.ip_interface(ip.address) for ip in call.prev_result.ips]


def _settings(call: Call) -> tuple[HostTools, Owner, str]:
    """Return the tools, the owner and the configured backend, empty if the host decides."""
    assert call.tools is not None, "`unsupported` requires it"
    try:
        backend = gojson.get_str(call.fields, "ipMasqBackend") or ""
    except gojson.JsonError:
        backend = ""
    return call.tools, Owner(call.name, call.invocation.container_id, call.invocation.ifname), backend


# --- nftables: a rule for each address, in a chain that all plugins share --------------------------------------------


def _add_nft(tools: HostTools, owner: Owner, addresses: Sequence[IpInterface]) -> None:
    """Raises ToolNotFoundError, CniError."""
    stale = _nft_rules(tools, owner)
    try:
        nftables.run_text(tools, _transaction(owner, addresses, stale, comments=True))
    except nftables.NftError:
        # A kernel before 5.10 has no comments on tables and chains. For any other cause the second run fails too.
        nftables.run_text(tools, _transaction(owner, addresses, stale, comments=False))


def _transaction(
    owner: Owner, addresses: Sequence[IpInterface], stale: Sequence[nftables.Rule], *, comments: bool
) -> str:
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
        *_deletions(stale),
    ]
    for item in addresses:
        family = "ip" if item.version == 4 else "ip6"
        lines.append(
            f"add rule {table} {_CHECKS.name} {family} saddr {item.ip} {family} daddr != {item.network} masquerade "
            f'comment "{owner.nft_comment}"'
        )
    return "\n".join((*lines, ""))


def _has_nft(tools: HostTools, owner: Owner, addresses: Sequence[IpInterface]) -> bool:
    """Report whether each address has a rule, and the table's hook leads to it. Raises ToolNotFoundError, CniError."""
    rules = nftables.rules_of_table(tools, _CHECKS)
    own = [rule for rule in rules if rule.chain == _CHECKS.name and rule.comment.startswith(owner.nft_prefix)]
    return len(own) >= len(addresses) and any(rule.target == _CHECKS.name for rule in rules)


def _remove_nft(tools: HostTools, owner: Owner) -> bool:
    """Remove the rules; return True if there were any. Raises ToolNotFoundError, CniError."""
    rules = _nft_rules(tools, owner)
    if rules:
        nftables.run_text(tools, "\n".join((*_deletions(rules), "")))
    return bool(rules)


def _deletions(rules: Sequence[nftables.Rule]) -> list[str]:
    return [f"delete rule {_CHECKS.family} {_CHECKS.table} {_CHECKS.name} handle {rule.handle}" for rule in rules]


def _nft_rules(tools: HostTools, owner: Owner) -> list[nftables.Rule]:
    return [rule for rule in nftables.rules(tools, _CHECKS) if rule.comment.startswith(owner.nft_prefix)]
