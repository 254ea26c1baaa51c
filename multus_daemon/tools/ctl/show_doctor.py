"""`multusctl doctor` for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multus_daemon.runtime import terminal
from multus_daemon.runtime.terminal import literal

_COLOURS = {"error": "red", "warning": "yellow", "info": "cyan"}


def findings(found: Mapping[str, Any]) -> None:
    """Three lines each: what, the evidence, what to do."""
    console = terminal.console()
    if not found["findings"]:
        console.print("[green]nothing is wrong[/]")
    for item in found["findings"]:
        colour = _COLOURS[item["severity"]]
        console.print(
            f"[bold {colour}]{item['severity']}[/] {literal(item['check'])}: [bold]{literal(item['subject'])}[/]",
            soft_wrap=True,
        )
        console.print(f"  {literal(item['evidence'])}", soft_wrap=True)
        safe = " [dim](--fix does it)[/]" if item["fix"] else ""
        console.print(f"  [green]->[/] {literal(item['advice'])}{safe}", soft_wrap=True)
