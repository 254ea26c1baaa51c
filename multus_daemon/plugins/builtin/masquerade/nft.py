"""Masquerading by nftables: a rule for each address, in a chain of all plugins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from multus_daemon.plugins.builtin import nftables
from multus_daemon.plugins.builtin.masquerade.owner import MULTICAST, IpInterface, Owner
from multus_daemon.plugins.plugin import HostTools

_CHECKS: Final = nftables.Chain("inet", "cni_plugins_masquerade", "masq_checks")
_TABLE_IS: Final = "Masquerading for plugins from github.com/containernetworking/plugins"
_CHECKS_ARE: Final = "Masquerade traffic from certain IPs to any (non-multicast) IP outside their subnet"


def add(tools: HostTools, owner: Owner, addresses: Sequence[IpInterface]) -> None:
    """Masquerade the addresses. Raises ToolNotFoundError, CniError."""
    stale = _rules(tools, owner)
    try:
        nftables.run_text(tools, _text(owner, addresses, stale, comments=True))
    except nftables.NftError:
        # A kernel before 5.10 knows no comments on tables and chains; any other cause comes up again.
        nftables.run_text(tools, _text(owner, addresses, stale, comments=False))


def _text(owner: Owner, addresses: Sequence[IpInterface], stale: Sequence[nftables.Rule], *, comments: bool) -> str:
    table = f"{_CHECKS.family} {_CHECKS.table}"
    about_table, about_chain = (f' {{ comment "{text}" ; }}' if comments else "" for text in (_TABLE_IS, _CHECKS_ARE))
    lines = [
        f"add table {table}{about_table}",
        f"add chain {table} {_CHECKS.name}{about_chain}",
        f"add chain {table} postrouting {{ type nat hook postrouting priority srcnat ; }}",
        # Filled anew each time, so that there is one way in whoever has made the chain.
        f"flush chain {table} postrouting",
        f"add rule {table} postrouting ip daddr {MULTICAST[4]} return",
        f"add rule {table} postrouting ip6 daddr {MULTICAST[6]} return",
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


def remove(tools: HostTools, owner: Owner) -> bool:
    """Remove the rules; whether there were any. Raises ToolNotFoundError, CniError."""
    found = _rules(tools, owner)
    if found:
        table = f"{_CHECKS.family} {_CHECKS.table}"
        lines = [f"delete rule {table} {_CHECKS.name} handle {rule.handle}" for rule in found]
        nftables.run_text(tools, "\n".join((*lines, "")))
    return bool(found)


def _rules(tools: HostTools, owner: Owner) -> list[nftables.Rule]:
    return [rule for rule in nftables.rules(tools, _CHECKS) if rule.comment.startswith(owner.nft_prefix)]
