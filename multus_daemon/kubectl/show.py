"""What `kubectl multus` shows to people: tables on standard output, nodes that do not answer at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

SHOWN: Final = 5
"""Names of a longer list."""


def status(found: Mapping[str, Any]) -> None:
    """The nodes, those that are not ready first; errors by cause."""
    console = _console()
    table = Table("node", "state", "version", "containers", "spool", "left over", box=box.ROUNDED)
    for node in sorted(found["nodes"], key=lambda node: node["ready"]):
        gates = [f"{_text(gate)}: {_text(reason)}" for gate, reason in node["gates"].items()]
        state = "[green]ready[/]" if node["ready"] else "\n".join(["[red]not ready[/]", *gates])
        numbers = (str(node[key] or "") for key in ("containers", "spooled", "leftovers"))
        table.add_row(_text(node["node"]), state, _text(node["version"]), *numbers)
    if found["nodes"]:
        console.print(table)
    if found["errors"]:
        errors = Table(
            "count", "verb", "cause", "nodes", "last pod", title="errors of the last requests", box=box.ROUNDED
        )
        for item in found["errors"]:
            cause = f"{_text(item['cause'])} [dim]({item['code']})[/]"
            errors.add_row(str(item["count"]), _text(item["verb"]), cause, _some(item["nodes"]), _text(item["pod"]))
        console.print(errors)
    ready = sum(node["ready"] for node in found["nodes"])
    console.print(f"{ready} of {len(found['nodes']) + len(found['unanswered'])} nodes are ready")
    _end(console, found)


def pods(found: Mapping[str, Any]) -> None:
    """A table of causes, one of pods."""
    console = _console()
    if found["pods"]:
        reasons = Table("pods", "cause", "such as", box=box.ROUNDED)
        for item in found["causes"]:
            reasons.add_row(str(item["count"]), _text(item["cause"]), _some(item["pods"]))
        console.print(reasons)
        table = Table("pod", "node", "lacks", box=box.ROUNDED)
        for item in found["pods"]:
            table.add_row(f"[bold]{_text(item['pod'])}[/]", _text(item["node"]), "\n".join(map(_text, item["lacks"])))
        console.print(table)
        console.print("`kubectl multus why NAMESPACE/POD` says what to do")
    else:
        console.print("[green]no pod lacks a network[/]")
    _end(console, found)


def leaks(found: Mapping[str, Any]) -> None:
    """A row for each container."""
    console = _console()
    if found["containers"]:
        table = Table("node", "pod", "networks", "since", "problem", box=box.ROUNDED)
        for item in found["containers"]:
            networks = [
                f"{_text(entry['network'])} {_text(' '.join(entry['addresses']))}" for entry in item["attachments"]
            ]
            who = _text(item["pod"] or f"container {item['container'][:13]}")
            table.add_row(_text(item["node"]), who, "\n".join(networks), _time(item["since"]), _text(item["problem"]))
        console.print(table)
    else:
        console.print("[green]nothing is left over[/]" if found["daemons"] else "nothing is known")
    _end(console, found)


def networks(found: Mapping[str, Any]) -> None:
    """A row for each network."""
    console = _console()
    if found["networks"]:
        table = Table("network", "plugins", "pods", "nodes that can't serve it", box=box.ROUNDED)
        for item in found["networks"]:
            plugins = "[dim]a file on each node[/]" if item["onNodes"] else _text(", ".join(item["plugins"]))
            if item["problem"]:
                plugins = f"[red]{_text(item['problem'])}[/]"
            table.add_row(f"[bold]{_text(item['network'])}[/]", plugins, _users(item["pods"]), _places(item["missing"]))
        console.print(table)
    else:
        console.print("there are no networks")
    _end(console, found)


def why(found: Mapping[str, Any]) -> None:
    """Cause and advice first, then what they rest on."""
    console = _console()
    pod = f"[bold]{_text(found['pod'])}[/]"
    where = f" [dim]on node {_text(found['node'])}[/]" if found["node"] else ""
    if found["cause"]:
        console.print(f"{pod}{where}: [red]{_text(found['text'])}[/]", soft_wrap=True)
        console.print(f"  [green]->[/] {_text(found['advice'])}", soft_wrap=True)
    else:
        console.print(f"{pod}{where}: [green]nothing is wrong with its networks[/]", soft_wrap=True)
    for name in found["lacks"]:
        console.print(f"  [red]lacks[/] {_text(name)}", soft_wrap=True)
    for name in found["attached"]:
        console.print(f"  [green]has[/] {_text(name)}", soft_wrap=True)
    for step in found["steps"]:
        mark, text = ("[red]no[/]", step["problem"]) if step["problem"] else ("[green]ok[/]", step["result"])
        console.print(f"  {mark} {_text(step['what'])}: {_text(text)}", soft_wrap=True)
    for item in found["requests"]:
        if item["seconds"] is None:
            state = f"runs, at: {_text(item['step'])}"
        else:
            state = f"[red]{_text(item['error'])}[/]" if item["error"] else "done"
        console.print(f"  {_time(item['began'])} {_text(item['verb'])}: {state}", soft_wrap=True)
    for event in found["events"]:
        if event["type"] == "Warning":
            times = f" [dim]({event['count']} times)[/]" if event["count"] > 1 else ""
            head = f"  {_text(event['when'])} Event {_text(event['reason'])}: "
            console.print(f"{head}{_text(event['message'])}{times}", soft_wrap=True)
    _end(console, found)


def validate(found: Mapping[str, Any]) -> None:
    """Two lines each: what, what is meant."""
    console = _console()
    for item in found["findings"]:
        colour = {"error": "red", "warning": "yellow"}[item["severity"]]
        many = f" and {item['alike']} more" if item["alike"] else ""
        head = f"[bold {colour}]{item['severity']}[/] [bold]{_text(item['subject'])}[/]{many}"
        console.print(f"{head}: {_text(item['problem'])} [dim]{_text(item['check'])}[/]", soft_wrap=True)
        if item["advice"]:
            console.print(f"  [green]->[/] {_text(item['advice'])}", soft_wrap=True)
    numbers = f"{found['errors']} errors, {found['warnings']} warnings"
    console.print(f"networks and pods looked at: {found['objects']}; {numbers}")
    for note in found["notes"]:
        console.print(f"[yellow]{_text(note)}[/]", soft_wrap=True)


def _end(console: Console, found: Mapping[str, Any]) -> None:
    """Who did not answer, and what could not be looked at."""
    for item in found["unanswered"]:
        console.print(f"[red]node {_text(item['node'])}[/]: {_text(item['problem'])}", soft_wrap=True)
    for note in found["notes"]:
        console.print(f"[yellow]{_text(note)}[/]", soft_wrap=True)


def _users(pods: list[str]) -> str:
    return f"{len(pods)}: {_some(pods)}" if pods else ""


def _places(missing: Iterable[Mapping[str, str]]) -> str:
    """Nodes by what they lack."""
    nodes: dict[str, list[str]] = {}
    for item in missing:
        nodes.setdefault(f"{item['plugin']} {item['problem']}", []).append(item["node"])
    return "\n".join(f"[red]{_text(what)}[/]: {_some(names)}" for what, names in nodes.items())


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return _text(", ".join(names[:SHOWN])) + more


def _text(text: str) -> str:
    """What others have written, as it is: neither markup nor a terminal's commands."""
    return escape("".join(letter if letter.isprintable() else " " for letter in text))


def _time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")[:19]
    except (OverflowError, OSError, ValueError):
        return "?"


def _console() -> Console:
    return Console(highlight=False)
