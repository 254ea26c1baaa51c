"""`multusctl trace` for people."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rich.table import Table

from multus_daemon.runtime import terminal
from multus_daemon.runtime.terminal import literal


def requests(found: Mapping[str, Any]) -> None:
    """A headline and a table of steps for each request."""
    console = terminal.console()
    if not found["requests"]:
        of_whom = f" for pod {found['pod']}" if found["pod"] else ""
        console.print(
            f"no requests{of_whom} among those that the daemon remembers: since its start, the last 1,000 at most"
        )
    for item in found["requests"]:
        console.print(_headline(item), soft_wrap=True)
        if item["error"]:
            console.print(
                f"  [red]{literal(item['error']['text'])}[/] [dim](code {item['error']['code']})[/]", soft_wrap=True
            )
        console.print(_steps(item))


def _headline(item: Mapping[str, Any]) -> str:
    when = datetime.fromtimestamp(item["began"]).astimezone().isoformat(sep=" ", timespec="milliseconds")
    took = "is running" if item["seconds"] is None else f"{item['seconds'] * 1000:.1f} ms"
    state = "[red]failed[/]" if item["error"] else "[green]done[/]" if item["seconds"] is not None else ""
    names = " ".join(filter(None, (item["pod"], item["network"], item["ifname"], item["container"][:13])))
    return f"[bold]{literal(item['verb'])}[/] {literal(names)}  {when}  {took} {state}"


def _steps(item: Mapping[str, Any]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2))
    for _ in range(2):
        table.add_column(justify="right", style="dim")
    table.add_column(overflow="fold")
    for step in item["steps"]:
        took = f"{step['seconds'] * 1000:.1f} ms" if step["seconds"] else ""
        table.add_row(f"+{step['at'] * 1000:.1f}", took, literal(step["what"]))
    if item["stepsNotKept"]:
        table.add_row("", "", f"and {item['stepsNotKept']} more, which were not kept")
    return table
