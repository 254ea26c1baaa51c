"""`macspoofchk`: a port of a bridge drops frames that don't come from its container's MAC address.

Table, chains, rules and comments are those of the reference plugin (containernetworking/plugins `pkg/link`,
spoofcheck), so that either removes what the other made. The table and its base chain stay after a DEL.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, Final

from multus_daemon.plugins.builtin import nftables
from multus_daemon.plugins.builtin.contract import Call, prefixed
from multus_daemon.plugins.plugin import ToolNotFoundError
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni import gojson

_BASE: Final = nftables.Chain("bridge", "nat", "PREROUTING")
_RULES: Final = 4
"""Number of rules that `add` makes."""


def is_wanted(call: Call) -> bool:
    """Return True if ADD makes rules for this configuration; False if it is malformed, as ADD then refuses it."""
    try:
        return call.tools is not None and bool(gojson.get_bool(call.fields, "macspoofchk"))
    except gojson.JsonError:
        return False


def add(call: Call, port: str, mac: str) -> None:
    """Make rules that drop frames from `port` whose source is not `mac`. If it raises CniError, it changed nothing."""
    _replace(call, port, mac, stale=())


def differences(call: Call, port: str, mac: str) -> list[Difference]:
    """Return one difference if a rule is missing. Runs `nft`, except for a CHECK. Raises CniError."""
    if call.invocation.verb == "CHECK":
        return []
    rules = _own(call)
    chain, mac_chain, _ = _names(call)
    # `add` makes one jump to each chain, and two rules about the address.
    if len([rule for rule in rules if rule.target in (chain.name, mac_chain.name)]) >= 2 and len(rules) >= _RULES:
        return []
    text = f"rules against other MAC addresses of port {port} are missing"
    return [Difference(text, functools.partial(restore, call, port, mac), on_host=True)]


def restore(call: Call, port: str, mac: str) -> None:
    """Repair: replace the remaining rules by a full set, in one transaction. Raises CniError."""
    _replace(call, port, mac, stale=[rule for rule in _own(call) if rule.chain == _BASE.name])


def _own(call: Call) -> list[nftables.Rule]:
    _, _, comment = _names(call)
    return [rule for rule in nftables.rules(call.host_tools, _BASE, of_table=True) if rule.comment == comment]


def _replace(call: Call, port: str, mac: str, *, stale: Sequence[nftables.Rule]) -> None:
    chain, mac_chain, comment = _names(call)
    by_port = _equals({"meta": {"key": "iifname"}}, port)
    by_mac = _equals({"payload": {"protocol": "ether", "field": "saddr"}}, mac)
    commands = [
        {"add": {"table": {"family": _BASE.family, "name": _BASE.table}}},
        {"add": {"chain": _BASE.to_object(type="filter", hook="prerouting", prio=-300, policy="accept")}},
        *_deletions(stale),
        *_emptied(chain),
        *_emptied(mac_chain),
        _rule(_BASE, comment, by_port, {"jump": {"target": chain.name}}),
        _rule(chain, comment, {"jump": {"target": mac_chain.name}}),
        _rule(mac_chain, comment, by_mac, {"return": None}),
        _rule(mac_chain, comment, {"drop": None}),
    ]
    with prefixed("failed to setup spoof-check"):
        nftables.run_commands(call.host_tools, commands)


def remove(call: Call) -> None:
    """Remove the interface's rules and chains; absent ones are not an error.

    Raises CniError if they may still exist: `nft` fails, or is gone since ADD.
    """
    chain, mac_chain, comment = _names(call)
    # A tool that is missing existed when ADD succeeded.
    allowed = () if call.prev_result else (ToolNotFoundError,)
    with prefixed("failed to teardown spoof-check"), contextlib.suppress(*allowed):
        jumps = [rule for rule in nftables.rules(call.host_tools, _BASE) if rule.comment == comment]
        if not jumps:
            # The rule and the chains are made in one transaction and removed in one.
            return
        commands = _deletions(jumps)
        # The chains are added first, because the deletion of an absent one is an error.
        commands += [*_emptied(chain), *_emptied(mac_chain)]
        commands += [{"delete": {"chain": item.to_object()}} for item in (chain, mac_chain)]
        nftables.run_commands(call.host_tools, commands)


def _names(call: Call) -> tuple[nftables.Chain, nftables.Chain, str]:
    """Return the interface's chain, the chain that it jumps to, and the comment on every rule."""
    interface = f"{call.invocation.container_id}-{call.invocation.ifname}"
    chain = nftables.Chain(_BASE.family, _BASE.table, f"cni-br-iface-{interface}")
    return chain, nftables.Chain(_BASE.family, _BASE.table, f"{chain.name}-mac"), f"macspoofchk-{interface}"


def _emptied(chain: nftables.Chain) -> list[dict[str, Any]]:
    return [{"add": {"chain": chain.to_object()}}, {"flush": {"chain": chain.to_object()}}]


def _deletions(rules: Sequence[nftables.Rule]) -> list[dict[str, Any]]:
    return [{"delete": {"rule": _in_chain(_BASE, handle=rule.handle)}} for rule in rules]


def _in_chain(chain: nftables.Chain, **more: Any) -> dict[str, Any]:
    return {"family": chain.family, "table": chain.table, "chain": chain.name, **more}


def _rule(chain: nftables.Chain, comment: str, *statements: dict[str, Any]) -> dict[str, Any]:
    return {"add": {"rule": _in_chain(chain, expr=list(statements), comment=comment)}}


def _equals(left: dict[str, Any], right: str) -> dict[str, Any]:
    return {"match": {"op": "==", "left": left, "right": right}}
