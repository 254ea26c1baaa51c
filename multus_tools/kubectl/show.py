"""Answers of `kubectl multus` as tables for people, with nodes that did not answer at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from multus_daemon.spec.cni.remedies import MORE, parted
from multus_tools import terminal
from multus_tools.kubectl import causes
from multus_tools.terminal import SAME, Listing, Said, counted, literal, moment, say

SHOWN: Final = 5
"""Maximum number of names that are shown of a list without `-o wide`."""


def status(found: Mapping[str, Any], rows: Listing) -> None:
    """Print the nodes, those that are not ready first; then the errors by cause."""
    nodes = []
    for node in sorted(found["nodes"], key=lambda node: node["ready"]):
        state = ["[green]ready[/]" if node["ready"] else "[red]not ready[/]"]
        # A gate may have the name of a resource.
        problems = [*({**node["behind"], **node["gates"]}).items(), *node["degraded"].items()]
        state += [f"{literal(subject)}: {literal(problem)}" for subject, problem in problems]
        if rows.wide:
            state += map(_difference, node["differences"])
            state += _more(node["broken"] - len({(item["pod"], item["interface"]) for item in node["differences"]}))
        numbers = (str(node[key] or "") for key in ("containers", "spooled", "leftovers", "broken"))
        nodes.append(
            (literal(node["node"]), "\n".join(state), literal(node["version"]), *numbers, literal(node["daemon"]))
        )
    for item in found["unanswered"]:
        answer = "[red]no answer[/]" + (", its pod is Ready" if item["podReady"] else "")
        problem = f"{answer}\n{literal(item['problem'])}"
        nodes.append((literal(item["node"]), problem, *[""] * 5, literal(item["daemon"])))
    headers = ("node", "state", "version", "containers", "spool", "left over", "broken")
    least = ("version", "spool", "containers", "left over", "broken")
    rows.rows(headers, nodes, wide=("daemon",), texts=("state",), least=least)
    if found["errors"] and not rows.rows_only:
        title, texts = "errors of the last requests", ("cause", "nodes")
        errors = terminal.table("count", "verb", *texts, "last pod", title=title, texts=texts, least=("last pod",))
        for item in found["errors"]:
            cause, names = f"{literal(item['cause'])} [dim]({item['code']})[/]", _some(item["nodes"], rows)
            errors.add_row(str(item["count"]), literal(item["verb"]), cause, names, literal(item["pod"]))
        say(errors)
    if not rows.rows_only:
        probed = sum(item["podReady"] for item in found["unanswered"])
        more = f"; {probed} did not answer, and their pods are Ready" if probed else ""
        say(f"{sum(node['ready'] for node in found['nodes'])} of {len(nodes)} nodes are ready{more}")
    rows.note(*_end({**found, "unanswered": []}))


def pods(found: Mapping[str, Any], rows: Listing) -> None:
    """Print a table of causes and one of pods."""
    if found["pods"] and not rows.rows_only:
        causes = terminal.table("pods", "cause", "such as", texts=("cause", "such as"))
        for item in found["causes"]:
            causes.add_row(str(item["count"]), literal(item["cause"]), _some(item["pods"], rows))
        say(causes)
    cells = (
        (
            f"[bold]{literal(item['pod'])}[/]",
            literal(item["node"]),
            "\n".join(map(literal, item["lacks"])),
            literal(item["text"]),
        )
        for item in found["pods"]
    )
    rows.rows(("pod", "node", "lacks"), cells, wide=("cause",), least=("node",))
    if found["pods"] and not rows.rows_only:
        say("`kubectl multus why NAMESPACE/POD` says what to do")
    rows.note(*_nothing("No pods lack networks", found, found["pods"]), *_end(found))


def leaks(found: Mapping[str, Any], rows: Listing) -> None:
    """Print a row for each container."""
    terminal.leaks(rows, found["containers"])
    nothing = "Nothing is left over" if found["daemons"] else "Nothing is known"
    rows.note(*_nothing(nothing, found, found["containers"]), *_end(found))


def networks(found: Mapping[str, Any], rows: Listing) -> None:
    """Print a row for each network."""
    cells = []
    for item in found["networks"]:
        plugins = "[dim]a file on each node[/]" if item["onNodes"] else literal(", ".join(item["plugins"]))
        if item["problem"]:
            plugins = f"[red]{literal(item['problem'])}[/]"
        users = f"{len(item['pods'])}: {_some(item['pods'], rows)}" if item["pods"] else ""
        cells.append((f"[bold]{literal(item['network'])}[/]", plugins, users, _missing(item["missing"], rows)))
    headers = ("network", "plugins", "pods", "nodes that can't serve it")
    rows.rows(headers, cells, texts=headers[1:])
    rows.note(*_nothing("There are no networks", found, found["networks"]), *_end(found))


def why(found: Mapping[str, Any]) -> None:
    """Print cause and advice, then the facts that say something else."""
    cause, _ = parted(found["text"])
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
        say(f"  [red]left over[/] of container {literal(item['container'][:13])}: {said.new(item['problem'])}")
        say(*([f"    [green]->[/] {literal(item['advice'])}"] if item["advice"] else []))
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
    say(*counted(lines), *_end(found))


def _nothing(text: str, found: Mapping[str, Any], items: Sequence[Any]) -> list[str]:
    """Return `text` with the namespace, as kubectl says it, if there are no `items`."""
    where = f" in namespace {literal(found['namespace'])}; -A looks in all" if found["namespace"] else ""
    return [] if items else [text + where]


def _end(found: Mapping[str, Any]) -> list[str]:
    """Return lines with the nodes that did not answer, and the notes."""
    unanswered = [f"[red]node {literal(item['node'])}[/]: {literal(item['problem'])}" for item in found["unanswered"]]
    return [*unanswered, *(f"[yellow]{literal(note)}[/]" for note in found["notes"])]


def _difference(item: Mapping[str, str]) -> str:
    where = f"pod {item['pod']}, interface {item['interface']} (network {item['network']})"
    return f"[yellow]{literal(where)}[/]: {literal(item['difference'])}"


def _more(number: int) -> list[str]:
    return [f"[yellow]{number} more broken attachments[/]"] if number > 0 else []


def _missing(missing: Iterable[Mapping[str, str]], rows: Listing) -> str:
    """Group the nodes by the plugin that they lack."""
    nodes: dict[str, list[str]] = {}
    for item in missing:
        nodes.setdefault(f"{item['plugin']} {item['problem']}", []).append(item["node"])
    return "\n".join(f"[red]{literal(what)}[/]: {_some(names, rows)}" for what, names in nodes.items())


def _some(names: list[str], rows: Listing) -> str:
    shown = names if rows.wide else names[:SHOWN]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return literal(", ".join(shown)) + more
