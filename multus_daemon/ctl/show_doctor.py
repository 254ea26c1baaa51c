"""`multusctl doctor` for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

_COLOURS = {"error": "red", "warning": "yellow", "info": "cyan"}


def findings(found: Mapping[str, Any]) -> None:
    """Three lines each: what, the evidence, what to do."""
    console = Console(highlight=False)
    if not found["findings"]:
        console.print("[green]nothing is wrong[/]")
    for item in found["findings"]:
        colour = _COLOURS[item["severity"]]
        console.print(
            f"[bold {colour}]{item['severity']}[/] {escape(item['check'])}: [bold]{escape(item['subject'])}[/]",
            soft_wrap=True,
        )
        console.print(f"  {escape(item['evidence'])}", soft_wrap=True)
        safe = " [dim](--fix does it)[/]" if item["fix"] else ""
        console.print(f"  [green]->[/] {escape(item['advice'])}{safe}", soft_wrap=True)
