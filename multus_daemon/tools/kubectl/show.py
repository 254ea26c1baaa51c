"""Answers of `kubectl multus` as tables for people, with nodes that did not answer at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from multus_daemon.runtime import terminal
from multus_daemon.runtime.terminal import SAME, Said, counted, literal, moment, say
from multus_daemon.spec.cni.remedies import MORE
from multus_daemon.tools.kubectl import causes

SHOWN: Final = 5
"""Maximum number of names that are shown of a list."""


def status(found: Mapping[str, Any]) -> None:
    """Print the nodes, those that are not ready first; then the errors by cause."""
    headers = ("node", "state", "version", "containers", "spool", "left over")
    table = terminal.table(*headers, texts=("state",), least=("version", "spool", "containers", "left over"))
    for node in sorted(found["nodes"], key=lambda node: node["ready"]):
        gates = [f"{literal(gate)}: {literal(reason)}" for gate, reason in node["gates"].items()]
        state = "[green]ready[/]" if node["ready"] else "\n".join(["[red]not ready[/]", *gates])
        numbers = (str(node[key] or "") for key in ("containers", "spooled", "leftovers"))
        table.add_row(literal(node["node"]), state, literal(node["version"]), *numbers)
    if found["nodes"]:
        say(table)
    if found["errors"]:
        title, texts = "errors of the last requests", ("cause", "nodes")
        errors = terminal.table("count", "verb", *texts, "last pod", title=title, texts=texts, least=("last pod",))
        for item in found["errors"]:
            cause = f"{literal(item['cause'])} [dim]({item['code']})[/]"
            errors.add_row(str(item["count"]), literal(item["verb"]), cause, _some(item["nodes"]), literal(item["pod"]))
        say(errors)
    ready = sum(node["ready"] for node in found["nodes"])
    say(f"{ready} of {len(found['nodes']) + len(found['unanswered'])} nodes are ready")
    _end(found)


def pods(found: Mapping[str, Any]) -> None:
    """Print a table of causes and one of pods."""
    if found["pods"]:
        causes = terminal.table("pods", "cause", "such as", texts=("cause", "such as"))
        for item in found["causes"]:
            causes.add_row(str(item["count"]), literal(item["cause"]), _some(item["pods"]))
        table = terminal.table("pod", "node", "lacks", least=("node",))
        for item in found["pods"]:
            lacks = "\n".join(map(literal, item["lacks"]))
            table.add_row(f"[bold]{literal(item['pod'])}[/]", literal(item["node"]), lacks)
        say(causes)
        say(table)
        say("`kubectl multus why NAMESPACE/POD` says what to do")
    else:
        say("[green]no pod lacks a network[/]")
    _end(found)


def leaks(found: Mapping[str, Any]) -> None:
    """Print a row for each container."""
    if found["containers"]:
        headers = ("node", "pod", "networks", "since", "problem")
        table = terminal.table(*headers, texts=("problem", "networks"), least=("since", "networks"))
        for item in found["containers"]:
            networks = (f"{entry['network']} {' '.join(entry['addresses'])}" for entry in item["attachments"])
            owner = literal(item["pod"] or f"container {item['container'][:13]}")
            problem = "\n".join([literal(item["problem"]), *_advice(item)])
            table.add_row(
                literal(item["node"]), owner, "\n".join(map(literal, networks)), moment(item["since"]), problem
            )
        say(table)
    else:
        say("[green]nothing is left over[/]" if found["daemons"] else "nothing is known")
    _end(found)


def networks(found: Mapping[str, Any]) -> None:
    """Print a row for each network."""
    if found["networks"]:
        headers = ("network", "plugins", "pods", "nodes that can't serve it")
        table = terminal.table(*headers, texts=headers[1:])
        for item in found["networks"]:
            plugins = "[dim]a file on each node[/]" if item["onNodes"] else literal(", ".join(item["plugins"]))
            if item["problem"]:
                plugins = f"[red]{literal(item['problem'])}[/]"
            users = f"{len(item['pods'])}: {_some(item['pods'])}" if item["pods"] else ""
            table.add_row(f"[bold]{literal(item['network'])}[/]", plugins, users, _missing(item["missing"]))
        say(table)
    else:
        say("there are no networks")
    _end(found)


def why(found: Mapping[str, Any]) -> None:
    """Print cause and advice, then the facts that say something else."""
    cause, _, _ = found["text"].partition("; ")
    said = Said(cause)
    pod = f"[bold]{literal(found['pod'])}[/]" + (f" [dim]on node {literal(found['node'])}[/]" if found["node"] else "")
    if found["cause"]:
        say(f"{pod}: [red]{literal(cause)}[/]")
        if (advice := said.new(found["advice"])) != SAME:
            say(f"  [green]->[/] {advice}")
    else:
        say(f"{pod}: [green]nothing is wrong with its networks[/]")
    for name in found["lacks"]:
        say(f"  [red]lacks[/] {literal(name)}")
    for name in found["attached"]:
        say(f"  [green]has[/] {literal(name)}")
    for item in found["leftovers"]:
        head = f"  [red]left over[/] of container {literal(item['container'][:13])}: {said.new(item['problem'])}"
        say("\n    ".join([head, *_advice(item)]))
    for step in found["steps"]:
        if step["problem"]:
            say(f"  [red]no[/] {literal(step['what'])}: {said.new(step['problem'])}")
    lines = []
    for item in found["requests"]:
        state = f"[red]{said.new(item['error'])}[/]" if item["error"] else "done"
        if item["seconds"] is None:
            state = f"runs, at: {literal(item['step'])}"
        lines.append((moment(item["began"]), f"{literal(item['verb'])}: {state}", 1))
    for event in found["events"]:
        if event["type"] == "Warning":
            text = said.new(causes.of_plugin(event["message"]).partition(MORE)[0])
            lines.append((literal(event["when"]), f"Event {literal(event['reason'])}: {text}", event["count"]))
    for line in counted(lines):
        say(line)
    _end(found)


def _end(found: Mapping[str, Any]) -> None:
    """Print the nodes that did not answer, and the notes."""
    for item in found["unanswered"]:
        say(f"[red]node {literal(item['node'])}[/]: {literal(item['problem'])}")
    for note in found["notes"]:
        say(f"[yellow]{literal(note)}[/]")


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
