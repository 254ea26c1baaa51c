"""Answers of `kubectl multus` as tables for people, with nodes that did not answer at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from rich.console import Console

from multus_daemon.runtime import terminal
from multus_daemon.runtime.terminal import literal, moment

SHOWN: Final = 5
"""Maximum number of names that are shown of a list."""


def status(found: Mapping[str, Any]) -> None:
    """Print the nodes, those that are not ready first; then the errors by cause."""
    console = terminal.console()
    table = terminal.table("node", "state", "version", "containers", "spool", "left over")
    for node in sorted(found["nodes"], key=lambda node: node["ready"]):
        gates = [f"{literal(gate)}: {literal(reason)}" for gate, reason in node["gates"].items()]
        state = "[green]ready[/]" if node["ready"] else "\n".join(["[red]not ready[/]", *gates])
        numbers = (str(node[key] or "") for key in ("containers", "spooled", "leftovers"))
        table.add_row(literal(node["node"]), state, literal(node["version"]), *numbers)
    if found["nodes"]:
        console.print(table)
    if found["errors"]:
        errors = terminal.table("count", "verb", "cause", "nodes", "last pod", title="errors of the last requests")
        for item in found["errors"]:
            cause = f"{literal(item['cause'])} [dim]({item['code']})[/]"
            errors.add_row(str(item["count"]), literal(item["verb"]), cause, _some(item["nodes"]), literal(item["pod"]))
        console.print(errors)
    ready = sum(node["ready"] for node in found["nodes"])
    console.print(f"{ready} of {len(found['nodes']) + len(found['unanswered'])} nodes are ready")
    _end(console, found)


def pods(found: Mapping[str, Any]) -> None:
    """Print a table of causes and one of pods."""
    console = terminal.console()
    if found["pods"]:
        reasons = terminal.table("pods", "cause", "such as")
        for item in found["causes"]:
            reasons.add_row(str(item["count"]), literal(item["cause"]), _some(item["pods"]))
        console.print(reasons)
        table = terminal.table("pod", "node", "lacks")
        for item in found["pods"]:
            table.add_row(
                f"[bold]{literal(item['pod'])}[/]", literal(item["node"]), "\n".join(map(literal, item["lacks"]))
            )
        console.print(table)
        console.print("`kubectl multus why NAMESPACE/POD` says what to do")
    else:
        console.print("[green]no pod lacks a network[/]")
    _end(console, found)


def leaks(found: Mapping[str, Any]) -> None:
    """Print a row for each container."""
    console = terminal.console()
    if found["containers"]:
        table = terminal.table("node", "pod", "networks", "since", "problem")
        for item in found["containers"]:
            networks = [
                f"{literal(entry['network'])} {literal(' '.join(entry['addresses']))}" for entry in item["attachments"]
            ]
            who = literal(item["pod"] or f"container {item['container'][:13]}")
            problem = "\n".join(filter(None, (literal(item["problem"]), _advice(item["advice"]))))
            table.add_row(literal(item["node"]), who, "\n".join(networks), moment(item["since"]), problem)
        console.print(table)
    else:
        console.print("[green]nothing is left over[/]" if found["daemons"] else "nothing is known")
    _end(console, found)


def networks(found: Mapping[str, Any]) -> None:
    """Print a row for each network."""
    console = terminal.console()
    if found["networks"]:
        table = terminal.table("network", "plugins", "pods", "nodes that can't serve it")
        for item in found["networks"]:
            plugins = "[dim]a file on each node[/]" if item["onNodes"] else literal(", ".join(item["plugins"]))
            if item["problem"]:
                plugins = f"[red]{literal(item['problem'])}[/]"
            table.add_row(
                f"[bold]{literal(item['network'])}[/]", plugins, _users(item["pods"]), _places(item["missing"])
            )
        console.print(table)
    else:
        console.print("there are no networks")
    _end(console, found)


def why(found: Mapping[str, Any]) -> None:
    """Print cause and advice, then the facts that they rest on."""
    console = terminal.console()
    pod = f"[bold]{literal(found['pod'])}[/]"
    where = f" [dim]on node {literal(found['node'])}[/]" if found["node"] else ""
    if found["cause"]:
        console.print(f"{pod}{where}: [red]{literal(found['text'])}[/]", soft_wrap=True)
        console.print(f"  [green]->[/] {literal(found['advice'])}", soft_wrap=True)
    else:
        console.print(f"{pod}{where}: [green]nothing is wrong with its networks[/]", soft_wrap=True)
    for name in found["lacks"]:
        console.print(f"  [red]lacks[/] {literal(name)}", soft_wrap=True)
    for name in found["attached"]:
        console.print(f"  [green]has[/] {literal(name)}", soft_wrap=True)
    for item in found["leftovers"]:
        head = f"  [red]left over[/] of container {literal(item['container'][:13])}: {literal(item['problem'])}"
        console.print("\n".join(filter(None, (head, _advice(item["advice"], indent="    ")))), soft_wrap=True)
    for step in found["steps"]:
        mark, text = ("[red]no[/]", step["problem"]) if step["problem"] else ("[green]ok[/]", step["result"])
        console.print(f"  {mark} {literal(step['what'])}: {literal(text)}", soft_wrap=True)
    for item in found["requests"]:
        if item["seconds"] is None:
            state = f"runs, at: {literal(item['step'])}"
        else:
            state = f"[red]{literal(item['error'])}[/]" if item["error"] else "done"
        console.print(f"  {moment(item['began'])} {literal(item['verb'])}: {state}", soft_wrap=True)
    for event in found["events"]:
        if event["type"] == "Warning":
            times = f" [dim]({event['count']} times)[/]" if event["count"] > 1 else ""
            head = f"  {literal(event['when'])} Event {literal(event['reason'])}: "
            console.print(f"{head}{literal(event['message'])}{times}", soft_wrap=True)
    _end(console, found)


def _end(console: Console, found: Mapping[str, Any]) -> None:
    """Print the nodes that did not answer, and the notes."""
    for item in found["unanswered"]:
        console.print(f"[red]node {literal(item['node'])}[/]: {literal(item['problem'])}", soft_wrap=True)
    for note in found["notes"]:
        console.print(f"[yellow]{literal(note)}[/]", soft_wrap=True)


def _advice(text: str, *, indent: str = "") -> str:
    return f"{indent}[green]->[/] {literal(text)}" if text else ""


def _users(pods: list[str]) -> str:
    return f"{len(pods)}: {_some(pods)}" if pods else ""


def _places(missing: Iterable[Mapping[str, str]]) -> str:
    """Group the nodes by the plugin that they lack."""
    nodes: dict[str, list[str]] = {}
    for item in missing:
        nodes.setdefault(f"{item['plugin']} {item['problem']}", []).append(item["node"])
    return "\n".join(f"[red]{literal(what)}[/]: {_some(names)}" for what, names in nodes.items())


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return literal(", ".join(names[:SHOWN])) + more
