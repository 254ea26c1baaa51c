"""`multusctl graph` for people, in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree


def tree(found: Mapping[str, Any]) -> None:
    """From the node down to the interfaces in pods."""
    console = Console(highlight=False)
    if not found["parents"]:
        console.print("nothing is attached")
        return
    root = Tree("[bold]node[/]")
    for parent in found["parents"]:
        on = root.add(f"[bold cyan]{escape(parent['name'])}[/]" if parent["name"] else "[dim]routed[/]")
        for network in parent["networks"]:
            branch = on.add(f"[green]{escape(network['name'])}[/] [dim]{escape(network['plugin'])}[/]")
            for item in network["interfaces"]:
                host = f" [dim]{escape(', '.join(item['hostInterfaces']))}[/]" if item["hostInterfaces"] else ""
                who = escape(item["pod"] or item["container"][:13])
                addresses = escape(" ".join(item["addresses"]))
                branch.add(f"{who} [bold]{escape(item['interface'])}[/] {addresses}{host}")
    console.print(root, soft_wrap=True)
