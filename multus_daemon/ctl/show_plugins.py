"""`multusctl plugins` for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def plugins(found: Mapping[str, Any]) -> None:
    """One row each."""
    table = Table("plugin", "served by", "problem", box=box.ROUNDED)
    for item in found["plugins"]:
        table.add_row(escape(item["type"]), escape(item["servedBy"]), f"[red]{escape(item['problem'])}[/]")
    Console(highlight=False).print(table)
