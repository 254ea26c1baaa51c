"""`multusctl explain` for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from rich.tree import Tree

from multus_daemon.runtime import terminal
from multus_daemon.runtime.terminal import literal, moment

_LONGEST: Final = 100_000
"""Characters of a line."""


def explanation(found: Mapping[str, Any]) -> None:
    """The verdict, the steps, each network with its plugins and their configuration, the last errors."""
    console = terminal.console()
    # A tree cuts its lines at the width, even where nothing is to be wrapped.
    trees = terminal.console(width=_LONGEST)
    console.print(_verdict(found), soft_wrap=True)
    for step in found["steps"]:
        mark, text = ("[red]no[/]", step["problem"]) if step["problem"] else ("[green]ok[/]", step["result"])
        console.print(f"  {mark} {literal(step['what'])}: {literal(text)}", soft_wrap=True)
    for network in found["networks"]:
        trees.print(_network(network), soft_wrap=True)
    if found["errors"]:
        console.print("[bold]what the daemon has answered to the runtime before[/]")
    for item in found["errors"]:
        console.print(f"  {moment(item['began'])} {item['verb']}: [red]{literal(item['text'])}[/]", soft_wrap=True)


def _verdict(found: Mapping[str, Any]) -> str:
    pod = f"[bold]{literal(found['pod'])}[/]"
    if found["problem"]:
        return f"{pod}: [red]an ADD would fail: {literal(found['problem'])}[/] [dim](code {found['code']})[/]"
    if found["attached"]:
        container = literal(found["container"][:13])
        return f"{pod}: is attached [dim](container {container})[/]; an ADD of a new container would do this"
    if failed := [item for item in found["errors"] if item["verb"] == "ADD"]:
        return f"{pod}: [red]its last ADD failed: {literal(failed[-1]['text'])}[/]\nthe next one would do this"
    return f"{pod}: an ADD would do this"


def _network(network: Mapping[str, Any]) -> Tree:
    tree = Tree(
        f"[bold]{literal(network['interface'])}[/] {literal(network['network'])} [dim]by {literal(network['why'])}[/]"
    )
    for key, value in network["requests"].items():
        tree.add(f"asked for: {literal(key)} {literal(json.dumps(value))}")
    for text in network["unsupported"]:
        tree.add(f"[yellow]{literal(text)}[/]")
    for plugin in network["plugins"]:
        branch = tree.add(f"plugin [bold]{literal(plugin['type'])}[/] {literal(plugin['servedBy'] or 'nobody')}")
        branch.add("\n".join(map(literal, json.dumps(plugin["config"], indent=2).splitlines())))
    for plugin in network["calls"]:
        tree.add(f"calls [bold]{literal(plugin['type'])}[/] {literal(plugin['servedBy'] or 'nobody')}")
    if network["problem"]:
        tree.add(f"[red]{literal(network['problem'])}[/]")
    return tree
