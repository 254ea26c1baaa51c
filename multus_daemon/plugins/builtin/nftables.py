"""nftables through the host's `nft`: changes as one transaction, and the rules of a chain (libnftables-json(5))."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multus_daemon.plugins.plugin import HostTools, ToolNotFoundError
from multus_daemon.spec.attachment import ToolExit
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError, InternalError

# What `nft` says, in its first words, of a table or a chain that is not there. A library that is not there has others.
_ABSENT = ("Error: No such file or directory", "Error: Could not process rule: No such file or directory")
# What it says where the kernel has no nftables.
_UNSUPPORTED = ("Protocol not supported", "Operation not supported", "Invalid argument")


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of a chain; its handle is what a deletion names."""

    handle: int
    comment: str


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain by its full name: `inet`, `cni_plugins_masquerade`, `masq_checks`."""

    family: str
    table: str
    name: str

    def to_object(self, **more: Any) -> dict[str, Any]:
        """As in a command, with `more` keys."""
        return {"family": self.family, "table": self.table, "name": self.name, **more}


class NftError(InternalError):
    """`nft` has refused a transaction; nothing of it was done."""

    @property
    def is_absent(self) -> bool:
        """True where something that the transaction names is not there."""
        return self.details.startswith(_ABSENT)

    @property
    def is_unsupported(self) -> bool:
        """True where the kernel may have no nftables, and so no rules; `is_usable` tells."""
        return any(text in self.msg for text in _UNSUPPORTED)


def run_text(tools: HostTools, text: str) -> None:
    """One transaction in the language of nft(8). Raises NftError, ToolNotFoundError, and as HostTools does."""
    _require_success(tools.run("nft", ["-f", "-"], text.encode()))


def run_commands(tools: HostTools, commands: Sequence[dict[str, Any]]) -> None:
    """One transaction of commands in JSON, which takes names that the language has no way to write.

    Raises as `run_text` does.
    """
    stdin = gojson.dumps({"nftables": [{"metainfo": {"json_schema_version": 1}}, *commands]}, sort_keys=False)
    _require_success(tools.run("nft", ["-j", "-f", "-"], stdin))


def rules(tools: HostTools, chain: Chain) -> list[Rule]:
    """The rules of a chain that have a comment, in their order; none where there is no chain, or no nftables at all.

    Raises as `run_text` does.
    """
    end = tools.run("nft", ["-j", "list", "chain", chain.family, chain.table, chain.name])
    try:
        _require_success(end)
    except NftError as error:
        if error.is_absent or (error.is_unsupported and not is_usable(tools)):
            return []
        raise
    try:
        items = gojson.get_list(gojson.loads_object(end.stdout), "nftables") or []
        found = [item["rule"] for item in items if isinstance(item, dict) and isinstance(item.get("rule"), dict)]
        return [
            Rule(handle, comment)
            for item in found
            if (handle := gojson.get_int(item, "handle")) is not None
            and (comment := gojson.get_str(item, "comment")) is not None
        ]
    except gojson.JsonError as error:
        raise InternalError(f"nft printed what is no list of rules: {error}") from error


def is_usable(tools: HostTools) -> bool:
    """Whether the host has an `nft` that may change something."""
    try:
        end = tools.run("nft", ["--check", "-f", "-"], b"add table ip supports_nftables_test\n")
    except (ToolNotFoundError, CniError):
        return False
    return end.status == 0


def _require_success(end: ToolExit) -> None:
    if end.status:
        # The first line is the cause; below it are parts of the input, with marks.
        cause = (end.stderr.splitlines() or ["no message"])[0]
        raise NftError(f"nft failed (exit status {end.status}): {cause}", end.stderr)
