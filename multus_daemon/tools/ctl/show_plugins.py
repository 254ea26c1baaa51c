"""`multusctl plugins` for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multus_daemon.runtime import terminal
from multus_daemon.runtime.terminal import literal


def plugins(found: Mapping[str, Any]) -> None:
    """One row each."""
    table = terminal.table("plugin", "served by", "problem")
    for item in found["plugins"]:
        table.add_row(literal(item["type"]), literal(item["servedBy"]), f"[red]{literal(item['problem'])}[/]")
    terminal.console().print(table)
