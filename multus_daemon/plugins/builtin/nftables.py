"""Run the host's `nft`: a transaction, or a listing of a chain's rules (libnftables-json(5))."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multus_daemon.plugins.plugin import HostTools
from multus_daemon.spec.attachment import ToolExit
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError, InternalError

# The first words of `nft` for an absent table or chain. For an absent library it prints other words.
_ABSENT = ("Error: No such file or directory", "Error: Could not process rule: No such file or directory")
# Messages of a kernel without nftables.
_UNSUPPORTED = ("Protocol not supported", "Operation not supported", "Invalid argument")


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of a chain; its handle identifies it for a deletion."""

    handle: int
    comment: str
    """The rule's comment; empty if it has none."""
    chain: str = ""
    target: str = ""
    """The chain that it jumps or goes to; empty if there is none."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain by its full name: `inet`, `cni_plugins_masquerade`, `masq_checks`."""

    family: str
    table: str
    name: str

    def to_object(self, **more: Any) -> dict[str, Any]:
        """Return the chain as an object of a command in JSON, with further keys."""
        return {"family": self.family, "table": self.table, "name": self.name, **more}


class NftError(InternalError):
    """`nft` refused a transaction, and changed nothing."""


def run_text(tools: HostTools, lines: Sequence[str]) -> bool:
    """Run a transaction of commands in the language of nft(8); return False if there are none.

    Raises NftError, and as `HostTools.run` does.
    """
    if lines:
        _require_success(tools.run("nft", ["-f", "-"], "".join(f"{line}\n" for line in lines).encode()))
    return bool(lines)


def deletions(tools: HostTools, chain: Chain, is_own: Callable[[Rule], bool], *, of_table: bool = False) -> list[str]:
    """Return the commands that delete the rules that are `is_own`; arguments and errors as of `rules`."""
    found = filter(is_own, rules(tools, chain, of_table=of_table))
    return [f"delete rule {chain.family} {chain.table} {rule.chain} handle {rule.handle}" for rule in found]


def run_commented(tools: HostTools, lines: Callable[[bool], Sequence[str]]) -> None:
    """Run the transaction `lines(True)`, with comments on tables and chains; if `nft` refuses it, `lines(False)`."""
    try:
        run_text(tools, lines(True))
    except NftError:
        # A kernel before 5.10 has none. For any other cause the second run fails too.
        run_text(tools, lines(False))


def run_commands(tools: HostTools, commands: Sequence[dict[str, Any]]) -> None:
    """Run a transaction of commands in JSON, which can hold names that the language can't. Raises as `run_text`."""
    stdin = gojson.dumps({"nftables": [{"metainfo": {"json_schema_version": 1}}, *commands]}, sort_keys=False)
    _require_success(tools.run("nft", ["-j", "-f", "-"], stdin))


def rules(tools: HostTools, chain: Chain, *, of_table: bool = False) -> list[Rule]:
    """Return the rules of a chain, or of its whole table, in order; empty if it or nftables is missing.

    Raises as `run_text`.
    """
    what = ["table", chain.family, chain.table] if of_table else ["chain", chain.family, chain.table, chain.name]
    end = tools.run("nft", ["-j", "list", *what])
    try:
        _require_success(end)
    except NftError as error:
        may_be_unsupported = any(text in error.msg for text in _UNSUPPORTED)
        if end.stderr.startswith(_ABSENT) or (may_be_unsupported and not is_usable(tools)):
            return []
        raise
    try:
        items = gojson.get_list(gojson.loads_object(end.stdout), "nftables") or []
        found = [item["rule"] for item in items if isinstance(item, dict) and isinstance(item.get("rule"), dict)]
        return [
            Rule(handle, gojson.get_str(item, "comment") or "", gojson.get_str(item, "chain") or "", _target(item))
            for item in found
            if (handle := gojson.get_int(item, "handle")) is not None
        ]
    except gojson.JsonError as error:
        raise InternalError(f"the output of nft is not a list of rules: {error}") from error


def is_usable(tools: HostTools) -> bool:
    """Return True if the host's `nft` works, and may change rules."""
    try:
        end = tools.run("nft", ["--check", "-f", "-"], b"add table ip supports_nftables_test\n")
    except CniError:
        return False
    return end.status == 0


def _require_success(end: ToolExit) -> None:
    if end.status:
        # The first line is the cause. The lines below quote the input.
        cause = (end.stderr.splitlines() or ["no message"])[0]
        raise NftError(f"nft failed (exit status {end.status}): {cause}", end.stderr)


def _target(rule: Mapping[str, Any]) -> str:
    for statement in gojson.get_list(rule, "expr") or ():
        for verdict in ("jump", "goto"):
            if isinstance(statement, dict) and isinstance(found := statement.get(verdict), dict):
                return gojson.get_str(found, "target") or ""
    return ""
