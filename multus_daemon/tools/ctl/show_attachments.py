"""`multusctl attachments` for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Column, Table

from multus_daemon.runtime import terminal
from multus_daemon.runtime.terminal import literal, moment


def containers(found: Mapping[str, Any], *, leaks: bool) -> None:
    """One table: a row for each interface, a line for what is wrong with a container."""
    console = terminal.console()
    if not found["containers"]:
        console.print("nothing is left over" if leaks else "nothing is attached")
        return
    # What is cut can't be copied: names are folded instead, and what has no spaces stays in one piece.
    table = Table(
        Column("pod", overflow="fold"),
        Column("interface", no_wrap=True),
        Column("network", overflow="fold"),
        Column("addresses, MAC", no_wrap=True),
        Column("plugins"),
        Column("since"),
        box=box.ROUNDED,
    )
    for item in found["containers"]:
        for number, attachment in enumerate(item["attachments"]):
            table.add_row(_pod(item) if number == 0 else "", *_cells(item, attachment))
        if not item["attachments"]:
            table.add_row(_pod(item), "", "", "", "", "")
        table.add_section()
    console.print(table)
    for item in found["containers"]:
        for text, style in ((_problem(item), "yellow"), (item["check"], "red")):
            if text:
                console.print(f"[{style}]{_pod(item)}: {literal(text)}[/]", soft_wrap=True)
        if item["advice"]:
            console.print(f"  [green]->[/] {literal(item['advice'])}", soft_wrap=True)
        if item["check"] == "":
            console.print(f"[green]{_pod(item)}: CHECK found everything as it should be[/]", soft_wrap=True)


def forgotten(found: Mapping[str, Any]) -> None:
    """One line, and one for each network whose plugins may still hold something."""
    console = terminal.console()
    pod = f" of pod {literal(found['pod'])}" if found["pod"] else ""
    console.print(f"[bold]container {literal(found['container'])}{pod} is forgotten[/]", soft_wrap=True)
    for item in found["attachments"]:
        held = ", ".join([item["interface"], *item["addresses"]])
        plugins = ", ".join(plugin["type"] for plugin in item["plugins"])
        console.print(f"  {literal(item['network'])} ({literal(held)}), by {literal(plugins)}", soft_wrap=True)


def _problem(item: Mapping[str, Any]) -> str:
    problem = str(item["problem"])
    return f"since {moment(item['setAside'])} {problem}" if item["setAside"] else problem


def _pod(item: Mapping[str, Any]) -> str:
    return literal(item["pod"] or f"container {item['container'][:13]}")


def _cells(item: Mapping[str, Any], attachment: Mapping[str, Any]) -> tuple[str, ...]:
    network = literal(attachment["network"])
    if attachment["clusterNetwork"]:
        network = f"[green]{network}[/]"
    state = "" if attachment["attached"] else " [yellow]begun[/]"
    plugins = "\n".join(
        literal(plugin["type"]) + (" [dim]built-in[/]" if plugin["servedBy"] == "built-in" else "")
        for plugin in attachment["plugins"]
    )
    return (
        f"[bold]{literal(attachment['interface'])}[/]{state}",
        network,
        "\n".join([*attachment["addresses"], attachment["mac"]]).strip(),
        plugins,
        moment(item["since"]),
    )
