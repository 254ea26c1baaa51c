"""`macspoofchk`: a port passes on only what comes from its container's MAC address.

Table, chains, rules and comments are those of the reference plugin (containernetworking/plugins `pkg/link`,
spoofcheck), so that either removes what the other made. The table and its base chain stay.
"""

from __future__ import annotations

from typing import Any, Final

from multus_daemon.plugins.builtin import nftables
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.plugin import HostTools, ToolNotFoundError
from multus_daemon.spec.cni.errors import CniError, InternalError, from_code

_BASE: Final = nftables.Chain("bridge", "nat", "PREROUTING")
_TABLE: Final = {"family": _BASE.family, "name": _BASE.table}


def add(call: Call, port: str, mac: str) -> None:
    """Drop what comes in by `port` from another address than `mac`.

    Raises CniError; nothing is done then.
    """
    chain, mac_chain, comment = _names(call)
    by_port = _equals({"meta": {"key": "iifname"}}, port)
    by_mac = _equals({"payload": {"protocol": "ether", "field": "saddr"}}, mac)
    commands = [
        {"add": {"table": _TABLE}},
        {"add": {"chain": _BASE.to_object(type="filter", hook="prerouting", prio=-300, policy="accept")}},
        *_emptied(chain),
        *_emptied(mac_chain),
        _rule(_BASE, comment, by_port, {"jump": {"target": chain.name}}),
        _rule(chain, comment, {"jump": {"target": mac_chain.name}}),
        _rule(mac_chain, comment, by_mac, {"return": None}),
        _rule(mac_chain, comment, {"drop": None}),
    ]
    try:
        nftables.run_commands(_tools(call), commands)
    except (ToolNotFoundError, nftables.NftError) as error:
        raise InternalError(f"failed to setup spoof-check: {error}") from error


def remove(call: Call) -> None:
    """Remove the interface's rules and chains; none is done.

    Raises CniError where they may still be there: `nft` fails, or is not there any more.
    """
    tools = _tools(call)
    chain, mac_chain, comment = _names(call)
    try:
        jumps = [rule for rule in nftables.rules(tools, _BASE) if rule.comment == comment]
        if not jumps:
            # One transaction makes, and one removes, the rule with the chains.
            return
        commands = [{"delete": {"rule": _in_chain(_BASE, handle=rule.handle)}} for rule in jumps]
        # Added before, so that it is no error where one of them is missing.
        commands += [*_emptied(chain), *_emptied(mac_chain)]
        commands += [{"delete": {"chain": item.to_object()}} for item in (chain, mac_chain)]
        nftables.run_commands(tools, commands)
    except ToolNotFoundError as error:
        # Whose ADD was done had the program.
        if call.prev_result is not None:
            raise InternalError(f"failed to teardown spoof-check: {error}") from error
    except CniError as error:
        raise from_code(error.code, f"failed to teardown spoof-check: {error.msg}", error.details) from error


def _tools(call: Call) -> HostTools:
    assert call.tools is not None, "asked of `unsupported` first"
    return call.tools


def _names(call: Call) -> tuple[nftables.Chain, nftables.Chain, str]:
    """The interface's chain, the chain that it jumps to, and the comment on every rule."""
    interface = f"{call.invocation.container_id}-{call.invocation.ifname}"
    name = f"cni-br-iface-{interface}"
    chains = [nftables.Chain(_BASE.family, _BASE.table, item) for item in (name, f"{name}-mac")]
    return chains[0], chains[1], f"macspoofchk-{interface}"


def _emptied(chain: nftables.Chain) -> list[dict[str, Any]]:
    return [{"add": {"chain": chain.to_object()}}, {"flush": {"chain": chain.to_object()}}]


def _in_chain(chain: nftables.Chain, **more: Any) -> dict[str, Any]:
    return {"family": chain.family, "table": chain.table, "chain": chain.name, **more}


def _rule(chain: nftables.Chain, comment: str, *statements: dict[str, Any]) -> dict[str, Any]:
    return {"add": {"rule": _in_chain(chain, expr=list(statements), comment=comment)}}


def _equals(left: dict[str, Any], right: str) -> dict[str, Any]:
    return {"match": {"op": "==", "left": left, "right": right}}
