"""`multusctl graph` for people, in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.tree import Tree

from multus_daemon.runtime import terminal
from multus_daemon.runtime.terminal import literal


def tree(found: Mapping[str, Any]) -> None:
    """From the node down to the interfaces in pods."""
    console = terminal.console()
    if not found["parents"]:
        console.print("nothing is attached")
        return
    root = Tree("[bold]node[/]")
    for parent in found["parents"]:
        on = root.add(f"[bold cyan]{literal(parent['name'])}[/]" if parent["name"] else "[dim]routed[/]")
        for network in parent["networks"]:
            branch = on.add(f"[green]{literal(network['name'])}[/] [dim]{literal(network['plugin'])}[/]")
            for item in network["interfaces"]:
                host = f" [dim]{literal(', '.join(item['hostInterfaces']))}[/]" if item["hostInterfaces"] else ""
                who = literal(item["pod"] or item["container"][:13])
                addresses = literal(" ".join(item["addresses"]))
                branch.add(f"{who} [bold]{literal(item['interface'])}[/] {addresses}{host}")
    console.print(root, soft_wrap=True)
