"""Answers of `kubectl multus` as tables for people, with nodes that did not answer at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from rich.table import Table

from multus_daemon.runtime import terminal
from multus_daemon.runtime.terminal import SAME, Said, counted, literal, moment
from multus_daemon.tools.kubectl import causes

SHOWN: Final = 5
"""Maximum number of names that are shown of a list."""


def _say(part: str | Table) -> None:
    """Print a table or a line of markup; the terminal wraps the line, so that its text can be copied."""
    terminal.console().print(part, soft_wrap=isinstance(part, str))


def status(found: Mapping[str, Any]) -> None:
    """Print the nodes, those that are not ready first; then the errors by cause."""
    table = terminal.table("node", "state", "version", "containers", "spool", "left over")
    for node in sorted(found["nodes"], key=lambda node: node["ready"]):
        gates = [f"{literal(gate)}: {literal(reason)}" for gate, reason in node["gates"].items()]
        state = "[green]ready[/]" if node["ready"] else "\n".join(["[red]not ready[/]", *gates])
        numbers = (str(node[key] or "") for key in ("containers", "spooled", "leftovers"))
        table.add_row(literal(node["node"]), state, literal(node["version"]), *numbers)
    if found["nodes"]:
        _say(table)
    if found["errors"]:
        errors = terminal.table("count", "verb", "cause", "nodes", "last pod", title="errors of the last requests")
        for item in found["errors"]:
            cause = f"{literal(item['cause'])} [dim]({item['code']})[/]"
            errors.add_row(str(item["count"]), literal(item["verb"]), cause, _some(item["nodes"]), literal(item["pod"]))
        _say(errors)
    ready = sum(node["ready"] for node in found["nodes"])
    _say(f"{ready} of {len(found['nodes']) + len(found['unanswered'])} nodes are ready")
    _end(found)


def pods(found: Mapping[str, Any]) -> None:
    """Print a table of causes and one of pods."""
    if found["pods"]:
        causes = terminal.table("pods", "cause", "such as")
        for item in found["causes"]:
            causes.add_row(str(item["count"]), literal(item["cause"]), _some(item["pods"]))
        table = terminal.table("pod", "node", "lacks")
        for item in found["pods"]:
            lacks = "\n".join(map(literal, item["lacks"]))
            table.add_row(f"[bold]{literal(item['pod'])}[/]", literal(item["node"]), lacks)
        _say(causes)
        _say(table)
        _say("`kubectl multus why NAMESPACE/POD` says what to do")
    else:
        _say("[green]no pod lacks a network[/]")
    _end(found)


def leaks(found: Mapping[str, Any]) -> None:
    """Print a row for each container."""
    if found["containers"]:
        table = terminal.table("node", "pod", "networks", "since", "problem")
        for item in found["containers"]:
            networks = (f"{entry['network']} {' '.join(entry['addresses'])}" for entry in item["attachments"])
            owner = literal(item["pod"] or f"container {item['container'][:13]}")
            problem = "\n".join([literal(item["problem"]), *_advice(item)])
            table.add_row(
                literal(item["node"]), owner, "\n".join(map(literal, networks)), moment(item["since"]), problem
            )
        _say(table)
    else:
        _say("[green]nothing is left over[/]" if found["daemons"] else "nothing is known")
    _end(found)


def networks(found: Mapping[str, Any]) -> None:
    """Print a row for each network."""
    if found["networks"]:
        table = terminal.table("network", "plugins", "pods", "nodes that can't serve it")
        for item in found["networks"]:
            plugins = "[dim]a file on each node[/]" if item["onNodes"] else literal(", ".join(item["plugins"]))
            if item["problem"]:
                plugins = f"[red]{literal(item['problem'])}[/]"
            users = f"{len(item['pods'])}: {_some(item['pods'])}" if item["pods"] else ""
            table.add_row(f"[bold]{literal(item['network'])}[/]", plugins, users, _missing(item["missing"]))
        _say(table)
    else:
        _say("there are no networks")
    _end(found)


def why(found: Mapping[str, Any]) -> None:
    """Print cause and advice, then the facts that say something else."""
    said = Said(found["text"])
    pod = f"[bold]{literal(found['pod'])}[/]" + (f" [dim]on node {literal(found['node'])}[/]" if found["node"] else "")
    if found["cause"]:
        _say(f"{pod}: [red]{literal(found['text'])}[/]")
        if (advice := said.new(found["advice"])) != SAME:
            _say(f"  [green]->[/] {advice}")
    else:
        _say(f"{pod}: [green]nothing is wrong with its networks[/]")
    for name in found["lacks"]:
        _say(f"  [red]lacks[/] {literal(name)}")
    for name in found["attached"]:
        _say(f"  [green]has[/] {literal(name)}")
    for item in found["leftovers"]:
        head = f"  [red]left over[/] of container {literal(item['container'][:13])}: {said.new(item['problem'])}"
        _say("\n    ".join([head, *_advice(item)]))
    for step in found["steps"]:
        if step["problem"]:
            _say(f"  [red]no[/] {literal(step['what'])}: {said.new(step['problem'])}")
    lines = []
    for item in found["requests"]:
        state = f"[red]{said.new(item['error'])}[/]" if item["error"] else "done"
        if item["seconds"] is None:
            state = f"runs, at: {literal(item['step'])}"
        lines.append((moment(item["began"]), f"{literal(item['verb'])}: {state}", 1))
    for event in found["events"]:
        if event["type"] == "Warning":
            text = said.new(causes.of_plugin(event["message"]).partition(causes.HINT)[0])
            lines.append((literal(event["when"]), f"Event {literal(event['reason'])}: {text}", event["count"]))
    for line in counted(lines):
        _say(line)
    _end(found)


def _end(found: Mapping[str, Any]) -> None:
    """Print the nodes that did not answer, and the notes."""
    for item in found["unanswered"]:
        _say(f"[red]node {literal(item['node'])}[/]: {literal(item['problem'])}")
    for note in found["notes"]:
        _say(f"[yellow]{literal(note)}[/]")


def _advice(item: Mapping[str, Any]) -> list[str]:
    return [f"[green]->[/] {literal(item['advice'])}"] if item["advice"] else []


def _missing(missing: Iterable[Mapping[str, str]]) -> str:
    """Group the nodes by the plugin that they lack."""
    nodes: dict[str, list[str]] = {}
    for item in missing:
        nodes.setdefault(f"{item['plugin']} {item['problem']}", []).append(item["node"])
    return "\n".join(f"[red]{literal(what)}[/]: {_some(names)}" for what, names in nodes.items())


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return literal(", ".join(names[:SHOWN])) + more
