"""Answers of `multusctl` as tables and lines for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from rich.table import Table
from rich.tree import Tree

from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.remedies import HANGS, parted
from multus_tools import terminal
from multus_tools.ctl.sandbox import Outcome
from multus_tools.terminal import SAME, Listing, Said, counted, literal, moment, say

_COLOURS: Final = {"error": "red", "warning": "yellow", "info": "cyan"}
_IDS: Final = (("request", "request"), ("trace", "traceId"))
"""Names and keys of what the log has of a request, too."""


def _owner(item: Mapping[str, Any]) -> str:
    return literal(item["pod"] or f"container {item['container'][:13]}")


def cni_error(error: CniError) -> None:
    """Print the error on standard error: the cause first, then the details."""
    details = [f"  {literal(error.details)}"] if error.details else []
    say(f"[bold red]{literal(error.msg)}[/] [dim](CNI error {error.code})[/]", *details, stderr=True)


# --- sandbox ---


def outcome(verb: str, pod: str, found: Outcome) -> None:
    """Print what the verb did; after `up` also interfaces and routes."""
    words = {"up": "is up", "check": "is as it should be", "down": "is down"}[verb]
    took = f" [dim]({found.milliseconds:.1f} ms)[/]"
    say(f"[bold]pod {pod} {words}[/]{took}" if found.container_id else f"pod {pod} was not up")
    if found.notes:
        say(f"[yellow]{literal(found.notes)}[/]")
    if verb == "up":
        say(interfaces(found), routes(found), f"[dim]network namespace {found.netns}[/]")


def interfaces(found: Outcome) -> Table:
    """Return a row for each interface, within 80 columns. The network's name is from the network-status."""
    table = terminal.table("interface", "network", "addresses", "mac", "mtu", title="interfaces", least=("mtu", "mac"))
    entries: dict[str, dict[str, Any]] = {item.get("interface", ""): item for item in found.network_status}
    for item in found.pod["interfaces"]:
        entry = entries.get(item["name"], {})
        network = literal(str(entry.get("name", "")))
        table.add_row(
            f"[bold]{literal(item['name'])}[/]" + ("" if item["up"] else " [red]down[/]"),
            f"[green]{network}[/]" if entry.get("default") else network,
            "\n".join(item["addresses"]),
            item["mac"],
            str(item["mtu"]),
        )
    return table


def routes(found: Outcome) -> Table:
    """Return a row for each route in the pod."""
    table = terminal.table("destination", "gateway", "interface", title="routes")
    for item in found.pod["routes"]:
        default = item["dst"] in ("0.0.0.0/0", "::/0")
        table.add_row("[green]default[/]" if default else item["dst"], item["gw"], literal(item["interface"]))
    return table


# --- status ---


def status(found: Mapping[str, Any]) -> None:
    """Print what is wrong, a table of the parts, then the errors of the last requests by cause."""
    version = f"multus-daemon {literal(found['version'])}"
    since = f"[bold green]ready[/] {version}, since {moment(found['startedAt'])}"
    say(since if found["ready"] else f"[bold red]not ready[/] {version}")
    say(*(f"  [red]{literal(gate)}[/]: {literal(reason)}" for gate, reason in found["gates"].items()))
    say(*(f"  [yellow]{literal(name)}[/]: {literal(reason)}" for name, reason in found["degraded"].items()))
    parts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    parts.add_column(style="dim")
    parts.add_column(overflow="fold")
    for name, text in _parts(found):
        parts.add_row(name, text)
    say(parts)
    if found["errors"]:
        errors = terminal.table("count", "verb", "cause", "last", title="errors of the last requests", texts=("cause",))
        for item in found["errors"]:
            cause = f"{literal(item['cause'])} [dim]({item['code']})[/]"
            last = f"{moment(item['last'])}\n{literal(item['pod'])}"
            errors.add_row(str(item["count"]), literal(item["verb"]), cause, last)
        say(errors)


def _parts(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    primary = found["primary"]
    if primary["wanted"]:
        yield "primary network", literal(primary["file"] or "none yet")
        yield "placed", literal(primary["placed"] or "nothing yet")
        for item in primary["passedOver"]:
            yield "passed over", literal(f"{item['file']}: {item['reason']}")
    cluster = found["cluster"]
    for informer in cluster["informers"]:
        behind = found["behind"].get(informer["resource"])
        # A watch whose connection is dead looks like a quiet one for some minutes.
        heard = f" {informer['heardSeconds']:g} s ago" if informer["heardSeconds"] else ""
        age = f"[red]{literal(behind)}[/]" if behind else f"up to date{heard}"
        yield f"{cluster['kind']}: {informer['resource']}", f"{informer['objects']}, {age}"
    if cluster["pendingStatuses"]:
        yield "network-status", f"[yellow]{cluster['pendingStatuses']} wait for the API server[/]"
    for name, key in (("requests", "requests"), ("plugin processes", "processes")):
        load = found[key]
        if load["limit"]:
            yield name, f"{load['running']} running, {load['waiting']} waiting, at most {load['limit']}"
    yield "containers", str(found["containers"])
    if found["spooled"]:
        yield "spool", f"[yellow]{found['spooled']} DELs wait to be replayed[/]"
    if found["leftovers"]:
        yield "left over", f"[yellow]{found['leftovers']}[/]; `multusctl attachments --leaks` names them"
    # A daemon of an earlier version does not compare.
    if broken := found.get("broken"):
        yield "broken", f"[yellow]{broken} attachments differ from their record[/]; `multusctl drift` names them"


# --- attachments ---


def attachments(found: Mapping[str, Any], rows: Listing) -> None:
    """Print a row for each interface; on standard error the problems of each container."""
    containers = found["containers"]
    headers = ["pod", "interface", "network", "addresses, MAC", "plugins", "since"]
    headers += ["check"] if any(item["check"] is not None for item in containers) else []
    rows.rows(
        headers,
        (cells for item in containers for cells in _cells(item, len(headers))),
        wide=("container", "on the host"),
        key=2,
        texts=("check",),
        least=("since", "plugins", "addresses, MAC"),
    )
    notes = [] if containers else ["nothing is attached"]
    for item in containers:
        if item["problem"]:
            notes.append(f"[yellow]{_owner(item)}: {literal(item['problem'])}[/]")
            notes += [f"  [green]->[/] {literal(item['advice'])}"] if item["advice"] else []
    rows.note(*notes)


def leaks(found: Mapping[str, Any], rows: Listing) -> None:
    """Print a row for each container that nothing will delete."""
    terminal.leaks(rows, found["containers"])
    rows.note(*([] if found["containers"] else ["nothing is left over"]))


def _cells(item: Mapping[str, Any], columns: int) -> Iterator[tuple[str, ...]]:
    container = literal(item["container"])
    check = "" if item["check"] is None else f"[red]{literal(item['check'])}[/]" if item["check"] else "[green]ok[/]"
    for attachment in item["attachments"]:
        network = literal(attachment["network"])
        state = "" if attachment["attached"] else " [yellow]begun[/]"
        plugins = (
            literal(plugin["type"]) + (" [dim]built-in[/]" if plugin["servedBy"] == "built-in" else "")
            for plugin in attachment["plugins"]
        )
        cells = (
            _owner(item),
            f"[bold]{literal(attachment['interface'])}[/]{state}",
            f"[green]{network}[/]" if attachment["clusterNetwork"] else network,
            "\n".join([*attachment["addresses"], attachment["mac"]]).strip(),
            "\n".join(plugins),
            moment(item["since"]),
            check,
        )
        yield *cells[:columns], container, literal(", ".join(attachment["hostInterfaces"]))
    if not item["attachments"]:
        yield _owner(item), *[""] * (columns - 1), container, ""


def drift(found: Mapping[str, Any], rows: Listing) -> None:
    """Print a row for each difference; on standard error what was not compared."""
    cells = (
        (
            literal(item["pod"]),
            f"[bold]{literal(item['interface'])}[/]",
            literal(item["network"]),
            literal(item["difference"]),
            "yes" if item["repairable"] else "no",
            item["keep"],
            literal(item["container"]),
        )
        for item in found["differences"]
    )
    headers = ("pod", "interface", "network", "difference", "repairable", "keep")
    rows.rows(headers, cells, wide=("container",), key=4, texts=("difference",), least=("repairable", "keep"))
    notes = [f"[yellow]{_owner(item)} is not compared: {literal(item['problem'])}[/]" for item in found["passedOver"]]
    if not found["differences"]:
        notes.append(f"nothing differs; containers compared: {found['compared']}")
    rows.note(*notes)


def repair(found: Mapping[str, Any]) -> None:
    """Print a line for each difference, and what became of it."""
    left = [(item["interface"], item["difference"]) for item in found["left"]]
    if not found["found"]:
        say(f"[green]nothing differs[/] in pod {literal(found['pod'])}")
    for item in found["found"]:
        if found["dryRun"]:
            state = "would be repaired" if item["repairable"] else "[yellow]can't be repaired: make the pod anew[/]"
        else:
            state = "[red]still so[/]" if (item["interface"], item["difference"]) in left else "[green]repaired[/]"
        where = f"[bold]{literal(item['interface'])}[/] ({literal(item['network'])})"
        say(f"{where}: {literal(item['difference'])}: {state}")
    for error in found["errors"]:
        say(f"  [red]{literal(error)}[/]")


def forgotten(found: Mapping[str, Any]) -> None:
    """Print a line for the container, and one for each network whose plugins may still hold something."""
    pod = f" of pod {literal(found['pod'])}" if found["pod"] else ""
    say(f"[bold]container {literal(found['container'])}{pod} is forgotten[/]")
    for item in found["attachments"]:
        held = ", ".join([item["interface"], *item["addresses"]])
        plugins = ", ".join(plugin["type"] for plugin in item["plugins"])
        say(f"  {literal(item['network'])} ({literal(held)}), by {literal(plugins)}")


# --- explain, trace, plugins, doctor ---


def explain(found: Mapping[str, Any]) -> None:
    """Print the verdict, the steps, each network with its plugins' configuration, and the last errors."""
    failed = [item["text"] for item in found["errors"] if item["verb"] == "ADD"]
    cause = found["problem"] or ("" if found["attached"] or not failed else failed[-1])
    said = Said(cause)
    say(*_verdict(found, cause))
    for step in found["steps"]:
        text = f"{literal(step['what'])}: {said.new(step['problem']) if step['problem'] else literal(step['result'])}"
        say(f"  {'[red]no[/]' if step['problem'] else '[green]ok[/]'} {text}")
    trees = terminal.console(width=terminal.LONGEST)
    for network in found["networks"]:
        trees.print(_network(network, said), soft_wrap=True)
    if found["errors"]:
        say("[bold]what the daemon has answered to the runtime before[/]")
    lines = [
        (moment(item["began"]), f"{item['verb']}: [red]{said.new(item['text'])}[/]", 1) for item in found["errors"]
    ]
    say(*counted(lines))


def _verdict(found: Mapping[str, Any], cause: str) -> Iterator[str]:
    """Yield lines: what is wrong and what to do, or what the plan is for."""
    pod = f"[bold]{literal(found['pod'])}[/]"
    if cause:
        what, remedy = map(literal, parted(cause))
        when = f"an ADD would fail: {what}" if found["problem"] else f"its last ADD failed: {what}"
        code = f" [dim](code {found['code']})[/]" if found["problem"] else ""
        yield f"{pod}: [red]{when}[/]{code}"
        if remedy:
            yield f"  [green]->[/] {remedy}"
        if not found["problem"]:
            yield "the next one would do this"
    elif found["attached"]:
        container = literal(found["container"][:13])
        yield f"{pod}: is attached [dim](container {container})[/]; an ADD of a new container would do this"
    elif not found["running"]:
        yield f"{pod}: no ADD since the daemon's start at {moment(found['since'])}; one would do this"
    for item in found["running"]:
        yield f"{pod}: {literal(item['verb'])} has run for {item['seconds']:.0f} s{_ids(item)}"
        for doing in item["doing"]:
            yield f"  in {literal(doing['what'])} for {doing['seconds']:.0f} s, up to {doing['limit']:.0f} s"
            yield f"  [green]->[/] {HANGS}"


def _network(network: Mapping[str, Any], said: Said) -> Tree:
    tree = Tree(
        f"[bold]{literal(network['interface'])}[/] {literal(network['network'])} [dim]by {literal(network['why'])}[/]"
    )
    for key, value in network["requests"].items():
        tree.add(f"asked for: {literal(key)} {literal(json.dumps(value))}")
    for text in network["unsupported"]:
        tree.add(f"[yellow]{said.new(text)}[/]")
    for plugin in network["plugins"]:
        branch = tree.add(f"plugin [bold]{literal(plugin['type'])}[/] {literal(plugin['servedBy'] or 'nothing')}")
        branch.add("\n".join(map(literal, json.dumps(plugin["config"], indent=2).splitlines())))
    for plugin in network["calls"]:
        tree.add(f"calls [bold]{literal(plugin['type'])}[/] {literal(plugin['servedBy'] or 'nothing')}")
    if network["problem"]:
        tree.add(f"[red]{said.new(network['problem'])}[/]")
    return tree


def trace(found: Mapping[str, Any]) -> None:
    """Print a headline and a table of steps for each request."""
    if not found["requests"]:
        pod = f" for pod {found['pod']}" if found["pod"] else ""
        say(f"no requests{pod} among those that the daemon remembers: since its start, the last 1,000 at most")
    for item in found["requests"]:
        say(_headline(item))
        if error := item["error"]:
            say(f"  [red]{literal(error['text'])}[/] [dim](code {error['code']})[/]")
        table = Table(box=None, show_header=False, padding=(0, 2))
        for _ in range(2):
            table.add_column(justify="right", style="dim")
        table.add_column(overflow="fold")
        for step in item["steps"]:
            took = f"{step['seconds'] * 1000:.1f} ms" if step["seconds"] else ""
            table.add_row(f"+{step['at'] * 1000:.1f}", took, literal(step["what"]))
        if item["stepsNotKept"]:
            table.add_row("", "", f"and {item['stepsNotKept']} more, which were not kept")
        say(table)


def _headline(item: Mapping[str, Any]) -> str:
    when = datetime.fromtimestamp(item["began"]).astimezone().isoformat(sep=" ", timespec="milliseconds")
    took = "is running" if item["seconds"] is None else f"{item['seconds'] * 1000:.1f} ms"
    state = "[red]failed[/]" if item["error"] else "[green]done[/]" if item["seconds"] is not None else ""
    names = " ".join(filter(None, (item["pod"], item["network"], item["ifname"], item["container"][:13])))
    return f"[bold]{literal(item['verb'])}[/] {literal(names)}  {when}  {took} {state}{_ids(item)}"


def _ids(item: Mapping[str, Any]) -> str:
    """Return the ids by which the log has the request; empty for a daemon of an earlier version."""
    ids = [f"{name} {literal(value)}" for name, key in _IDS if (value := item.get(key))]
    return f" [dim]({', '.join(ids)})[/]" if ids else ""


def plugins(found: Mapping[str, Any], rows: Listing) -> None:
    """Print a row for each plugin."""
    cells = (
        (literal(item["type"]), literal(item["servedBy"]), f"[red]{literal(item['problem'])}[/]")
        for item in found["plugins"]
    )
    rows.rows(("plugin", "served by", "problem"), cells, texts=("problem",))


def doctor(found: Mapping[str, Any]) -> None:
    """Print three lines for each finding: the problem, the evidence, the advice."""
    shown: set[str] = set()
    if not found["findings"]:
        say("[green]nothing is wrong[/]")
    for item in found["findings"]:
        colour = _COLOURS[item["severity"]]
        safe = " [dim](--fix does it)[/]" if item["fix"] else ""
        evidence, advice = (SAME if item[key] in shown else literal(item[key]) for key in ("evidence", "advice"))
        say(
            f"[bold {colour}]{item['severity']}[/] {literal(item['check'])}: [bold]{literal(item['subject'])}[/]",
            f"  {evidence}",
            f"  [green]->[/] {advice}{safe}",
        )
        shown |= {item["evidence"], item["advice"]}


VIEWS: Final[Mapping[str, Callable[..., None]]] = {
    view.__name__: view
    for view in (status, attachments, drift, repair, leaks, forgotten, explain, trace, plugins, doctor)
}
"""The views of answers by name; those of tables take a Listing, too."""
