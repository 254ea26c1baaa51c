"""`multusctl explain` for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

_LONGEST: Final = 100_000
"""Characters of a line."""


def explanation(found: Mapping[str, Any]) -> None:
    """The verdict, the steps, each network with its plugins and their configuration, the last errors."""
    console = Console(highlight=False)
    # A tree cuts its lines at the width, even where nothing is to be wrapped.
    trees = Console(highlight=False, width=_LONGEST)
    console.print(_verdict(found), soft_wrap=True)
    for step in found["steps"]:
        mark, text = ("[red]no[/]", step["problem"]) if step["problem"] else ("[green]ok[/]", step["result"])
        console.print(f"  {mark} {escape(step['what'])}: {escape(text)}", soft_wrap=True)
    for network in found["networks"]:
        trees.print(_network(network), soft_wrap=True)
    if found["errors"]:
        console.print("[bold]what the daemon has answered to the runtime before[/]")
    for item in found["errors"]:
        when = datetime.fromtimestamp(item["began"]).astimezone().isoformat(sep=" ", timespec="seconds")[:19]
        console.print(f"  {when} {item['verb']}: [red]{escape(item['text'])}[/]", soft_wrap=True)


def _verdict(found: Mapping[str, Any]) -> str:
    pod = f"[bold]{escape(found['pod'])}[/]"
    if found["problem"]:
        return f"{pod}: [red]an ADD would fail: {escape(found['problem'])}[/] [dim](code {found['code']})[/]"
    if found["attached"]:
        container = escape(found["container"][:13])
        return f"{pod}: is attached [dim](container {container})[/]; an ADD of a new container would do this"
    if failed := [item for item in found["errors"] if item["verb"] == "ADD"]:
        return f"{pod}: [red]its last ADD failed: {escape(failed[-1]['text'])}[/]\nthe next one would do this"
    return f"{pod}: an ADD would do this"


def _network(network: Mapping[str, Any]) -> Tree:
    tree = Tree(
        f"[bold]{escape(network['interface'])}[/] {escape(network['network'])} [dim]by {escape(network['why'])}[/]"
    )
    for key, value in network["requests"].items():
        tree.add(f"asked for: {escape(key)} {escape(json.dumps(value))}")
    for text in network["unsupported"]:
        tree.add(f"[yellow]{escape(text)}[/]")
    for plugin in network["plugins"]:
        branch = tree.add(f"plugin [bold]{escape(plugin['type'])}[/] {escape(plugin['servedBy'] or 'nobody')}")
        branch.add(escape(json.dumps(plugin["config"], indent=2)))
    for plugin in network["calls"]:
        tree.add(f"calls [bold]{escape(plugin['type'])}[/] {escape(plugin['servedBy'] or 'nobody')}")
    if network["problem"]:
        tree.add(f"[red]{escape(network['problem'])}[/]")
    return tree
