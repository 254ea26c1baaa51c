"""`macspoofchk`: a port of a bridge drops frames that don't come from its container's MAC address.

Table, chains, rules and comments are those of the reference plugin (containernetworking/plugins `pkg/link`,
spoofcheck), so that either removes what the other made. The table and its base chain stay.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

from multus_daemon.plugins.builtin import nftables
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.plugin import Difference, ToolNotFoundError
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError, InternalError, from_code

_BASE: Final = nftables.Chain("bridge", "nat", "PREROUTING")
_RULES: Final = 4
"""Number of rules that `add` makes."""


def is_wanted(call: Call) -> bool:
    """Report whether ADD has made rules; it refuses a configuration that cannot be read."""
    try:
        return call.tools is not None and bool(gojson.get_bool(call.fields, "macspoofchk"))
    except gojson.JsonError:
        return False


def add(call: Call, port: str, mac: str) -> None:
    """Drop frames from `port` whose source address is not `mac`. Raises CniError; nothing is changed then."""
    _replace(call, port, mac, stale=())


def differences(call: Call, port: str, mac: str) -> list[Difference]:
    """Return one difference if a rule is missing. Raises CniError. Runs `nft`."""
    rules = _own(call)
    chain, mac_chain, _ = _names(call)
    # `add` makes one jump to each chain, and two rules about the address.
    if len([rule for rule in rules if rule.target in (chain.name, mac_chain.name)]) >= 2 and len(rules) >= _RULES:
        return []
    text = f"rules against other MAC addresses of port {port} are missing"
    return [Difference(text, functools.partial(restore, call, port, mac), on_host=True)]


def restore(call: Call, port: str, mac: str) -> None:
    """Replace the rules that are left, in one transaction. Raises CniError."""
    _replace(call, port, mac, stale=[rule for rule in _own(call) if rule.chain == _BASE.name])


def _own(call: Call) -> list[nftables.Rule]:
    assert call.tools is not None, "`unsupported` requires it"
    _, _, comment = _names(call)
    try:
        return [rule for rule in nftables.rules_of_table(call.tools, _BASE) if rule.comment == comment]
    except ToolNotFoundError as error:
        raise InternalError(f"the rules of spoof-check cannot be read: {error}") from error


def _replace(call: Call, port: str, mac: str, *, stale: Sequence[nftables.Rule]) -> None:
    assert call.tools is not None, "`unsupported` requires it"
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
    try:
        nftables.run_commands(call.tools, commands)
    except (ToolNotFoundError, nftables.NftError) as error:
        raise InternalError(f"failed to setup spoof-check: {error}") from error


def remove(call: Call) -> None:
    """Remove the interface's rules and chains; absent ones are not an error.

    Raises CniError where they may still exist: `nft` fails, or has disappeared since ADD.
    """
    assert call.tools is not None, "`unsupported` requires it"
    chain, mac_chain, comment = _names(call)
    try:
        jumps = [rule for rule in nftables.rules(call.tools, _BASE) if rule.comment == comment]
        if not jumps:
            # The rule and the chains are made in one transaction and removed in one.
            return
        commands = _deletions(jumps)
        # The chains are added first, because the deletion of an absent one is an error.
        commands += [*_emptied(chain), *_emptied(mac_chain)]
        commands += [{"delete": {"chain": item.to_object()}} for item in (chain, mac_chain)]
        nftables.run_commands(call.tools, commands)
    except ToolNotFoundError as error:
        # The tool existed when ADD succeeded.
        if call.prev_result is not None:
            raise InternalError(f"failed to teardown spoof-check: {error}") from error
    except CniError as error:
        raise from_code(error.code, f"failed to teardown spoof-check: {error.msg}", error.details) from error


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
