"""nftables through the host's `nft`: run a transaction, list the rules of a chain (libnftables-json(5))."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multus_daemon.plugins.plugin import HostTools, ToolNotFoundError
from multus_daemon.spec.attachment import ToolExit
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError, InternalError

# The first words of `nft` for an absent table or chain. For an absent library it prints other words.
_ABSENT = ("Error: No such file or directory", "Error: Could not process rule: No such file or directory")
# Messages of a kernel without nftables.
_UNSUPPORTED = ("Protocol not supported", "Operation not supported", "Invalid argument")


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of a chain; a deletion names its handle."""

    handle: int
    comment: str
    """Empty without one."""
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
        """Return the chain as a command in JSON names it, with `more` keys."""
        return {"family": self.family, "table": self.table, "name": self.name, **more}


class NftError(InternalError):
    """`nft` refused a transaction; none of it was done."""


def run_text(tools: HostTools, text: str) -> None:
    """Run a transaction in the language of nft(8). Raises NftError, ToolNotFoundError, and as HostTools does."""
    _require_success(tools.run("nft", ["-f", "-"], text.encode()))


def run_commands(tools: HostTools, commands: Sequence[dict[str, Any]]) -> None:
    """Run a transaction of commands in JSON, which can hold names that the language can't. Raises as `run_text`."""
    stdin = gojson.dumps({"nftables": [{"metainfo": {"json_schema_version": 1}}, *commands]}, sort_keys=False)
    _require_success(tools.run("nft", ["-j", "-f", "-"], stdin))


def rules(tools: HostTools, chain: Chain) -> list[Rule]:
    """Return the rules of a chain that have a comment, in order; empty without the chain or without nftables.

    Raises as `run_text`.
    """
    return [rule for rule in _listed(tools, ["chain", chain.family, chain.table, chain.name]) if rule.comment]


def _listed(tools: HostTools, what: Sequence[str]) -> list[Rule]:
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


def rules_of_table(tools: HostTools, chain: Chain) -> list[Rule]:
    """Return all rules of the chain's table, as `rules` does those of the chain."""
    return _listed(tools, ["table", chain.family, chain.table])


def is_usable(tools: HostTools) -> bool:
    """Report whether the host has an `nft` that can change something."""
    try:
        end = tools.run("nft", ["--check", "-f", "-"], b"add table ip supports_nftables_test\n")
    except (ToolNotFoundError, CniError):
        return False
    return end.status == 0


def _require_success(end: ToolExit) -> None:
    if end.status:
        # The first line is the cause. The lines below quote the input.
        cause = (end.stderr.splitlines() or ["no message"])[0]
        raise NftError(f"nft failed (exit status {end.status}): {cause}", end.stderr)


def _target(rule: Mapping[str, Any]) -> str:
    """Return the chain of the first `jump` or `goto`. Raises JsonError."""
    for statement in gojson.get_list(rule, "expr") or ():
        for verdict in ("jump", "goto"):
            if isinstance(statement, dict) and isinstance(found := statement.get(verdict), dict):
                return gojson.get_str(found, "target") or ""
    return ""
