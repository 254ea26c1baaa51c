"""Answers of `multusctl` as tables and lines for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from multus_daemon.spec.cni.errors import HANGS, CniError, as_on_host, parted
from multus_tools.terminal import ANSWERS, SAME, Said, counted, counting, literal, moment, say

if TYPE_CHECKING:
    from rich.table import Table

    from multus_tools.tables import Listing

_COLOURS: Final = {"error": "red", "warning": "yellow", "info": "cyan"}
_IDS: Final = (("request", "request"), ("trace", "traceId"))
"""Ids that also the log has: the name of the log's field, and the key in the answer."""


def _owner(item: Mapping[str, Any]) -> str:
    return literal(item["pod"] or f"container {item['container'][:13]}")


def cni_error(error: CniError) -> None:
    """Print the error on standard error: the cause first, then the details."""
    details = [f"  {literal(error.explanation)}"] if error.explanation else []
    say(f"[bold red]{literal(error.msg)}[/] [dim](CNI error {error.code})[/]", *details, stderr=True)


# --- sandbox ---


def outcome(verb: str, pod: str, found: Mapping[str, Any], notes: str) -> None:
    """Print what a command of `sandbox` did, and standard error of the shim; after `up`, interfaces and routes."""
    words = {"up": "is up", "check": "is as it should be", "down": "is down"}[verb]
    took = f" [dim]({found['milliseconds']:.1f} ms)[/]"
    say(f"[bold]pod {pod} {words}[/]{took}" if found["containerId"] else f"pod {pod} was not up")
    if notes:
        say(f"[yellow]{literal(notes)}[/]")
    if verb == "up":
        say(interfaces(found), routes(found), f"[dim]network namespace {found['netns']}[/]")


def interfaces(found: Mapping[str, Any]) -> Table:
    """Return a row for each interface, within 80 columns. The network's name is from the network-status."""
    from multus_tools.tables import Rows

    table = Rows("interface", "network", "addresses", "mac", "mtu", title="interfaces", least=("mtu", "mac"))
    entries: dict[str, dict[str, Any]] = {item.get("interface", ""): item for item in found["networkStatus"]}
    for item in found["pod"]["interfaces"]:
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


def routes(found: Mapping[str, Any]) -> Table:
    """Return a row for each route in the pod."""
    from multus_tools.tables import Rows

    table = Rows("destination", "gateway", "interface", title="routes")
    for item in found["pod"]["routes"]:
        default = item["dst"] in ("0.0.0.0/0", "::/0")
        table.add_row("[green]default[/]" if default else item["dst"], item["gw"], literal(item["interface"]))
    return table


# --- status ---


def status(found: Mapping[str, Any]) -> None:
    """Print whether pods get their networks, problems, a table of the daemon's parts, and errors of requests."""
    version = f"multus-daemon {literal(found['version'])}"
    since = f"[bold green]ready[/] {version}, since {moment(found['startedAt'])}"
    answer = found["podsGetNetworks"]
    cause, remedy = map(_on_host, parted(found["because"]))
    say(f"pods of this node get their networks: [bold {ANSWERS[answer]}]{answer}[/]" + (f": {cause}" if cause else ""))
    say(*([f"  [green]->[/] {remedy}"] if remedy else []))
    say(since if found["ready"] else f"[bold red]not ready[/] {version}")
    say(*(f"  [red]{literal(gate)}[/]: {_on_host(reason)}" for gate, reason in found["gates"].items()))
    say(*(f"  [yellow]{literal(name)}[/]: {_on_host(reason)}" for name, reason in found["degraded"].items()))
    parts = list(_parts(found))
    width = max(len(name) for name, _ in parts)
    say(*(f"[dim]{name:{width}}[/]  {text}" for name, text in parts))
    if found["errors"]:
        from multus_tools.tables import Rows

        errors = Rows("count", "verb", "cause", "last", title="errors of the last requests", texts=("cause",))
        for item in found["errors"]:
            cause = f"{literal(item['cause'])} [dim]({item['code']})[/]"
            last = f"{moment(item['last'])}\n{literal(item['pod'])}"
            errors.add_row(str(item["count"]), literal(item["verb"]), cause, last)
        say(errors)


def _on_host(text: str) -> str:
    return literal(as_on_host(text))


def _parts(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    primary = found["primary"]
    if primary["wanted"]:
        yield "primary network", _on_host(primary["file"] or "none yet")
        yield "placed", _on_host(primary["placed"] or "nothing yet")
        for item in primary["passedOver"]:
            yield "passed over", _on_host(f"{item['file']}: {item['reason']}")
    cluster = found["cluster"]
    for informer in cluster["informers"]:
        behind = found["behind"].get(informer["resource"])
        # A watch whose connection is dead looks like a quiet one for some minutes.
        heard = f" {informer['heardSeconds']:g} s ago" if informer["heardSeconds"] else ""
        age = f"[red]{literal(behind)}[/]" if behind else f"up to date{heard}"
        yield f"{cluster['kind']}: {informer['resource']}", f"{informer['objects']}, {age}"
    if cluster["pendingStatuses"]:
        yield "network-status", f"[yellow]not yet written: {cluster['pendingStatuses']}[/]"
    for name, key in (("requests", "requests"), ("plugin processes", "processes")):
        load = found[key]
        if load["limit"]:
            yield name, f"{load['running']} running, {load['waiting']} waiting, at most {load['limit']}"
    yield "containers", str(found["containers"])
    if found["spooled"]:
        yield "spool", f"[yellow]{counting(found['spooled'], 'DEL')} to replay[/]"
    if found["leftovers"]:
        left = counting(found["leftovers"], "container")
        yield "left over", f"[yellow]{left}[/]: see `multusctl attachments --leaks`"
    if broken := found["broken"]:
        yield "broken", f"[yellow]{counting(broken, 'attachment')}, not as recorded[/]: see `multusctl drift`"


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
    """Print a row for each leftover container."""
    from multus_tools import tables

    tables.leaks(rows, found["containers"])
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
    """Print a line for each difference, with the outcome of its repair."""
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
    """Print a line for the forgotten container, and one for each network that may have left something on the node."""
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
        text = said.new(step["problem"]) if step["problem"] else literal(step["result"])
        what = literal(step["what"]) + (f": {text}" if text != SAME else "")
        say(f"  {'[red]no[/]' if step['problem'] else '[green]ok[/]'} {what}")
    for network in found["networks"]:
        say(*_network(network, said))
    if found["errors"]:
        say("[bold]what the daemon has answered to the runtime before[/]")
    lines = [
        (moment(item["began"]), f"{item['verb']}: [red]{said.new(item['text'])}[/]", 1) for item in found["errors"]
    ]
    say(*counted(lines))


def _verdict(found: Mapping[str, Any], cause: str) -> Iterator[str]:
    """Yield lines about the first error and its remedy; without an error, about the pod that was planned."""
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
    elif found.get("lacks"):
        what, remedy = map(literal, parted(found["lacks"]))
        yield f"{pod}: [red]{what}[/]"
        yield f"  [green]->[/] {remedy}"
    elif found.get("differences"):
        for item in found["differences"]:
            where = f"network {item['network']}, interface {item['interface']}"
            colour = "red" if item["certain"] and not item["byPod"] else "yellow"
            yield f"{pod}: [{colour}]{literal(where)}: {literal(item['difference'])}[/]"
        repair = f"`multusctl repair {literal(found['pod'])}`"
        yield f"  [green]->[/] {repair} brings back what can be repaired; a new pod has all of it"
    elif found["attached"]:
        container = literal(found["container"][:13])
        yield f"{pod}: is attached [dim](container {container})[/]; an ADD of a new container would do this"
    elif not (found["running"] or found.get("leftovers")):
        yield f"{pod}: no ADD since the daemon's start at {moment(found['since'])}; one would do this"
    for item in found.get("leftovers", ()):
        yield f"{pod}: container {literal(item['container'][:13])}: [red]{literal(item['problem'])}[/]"
        yield f"  [green]->[/] {literal(item['advice'])}"
    for item in found["running"]:
        yield f"{pod}: {literal(item['verb'])} has run for {item['seconds']:.0f} s{_ids(item)}"
        for doing in item["doing"]:
            yield f"  in {literal(doing['what'])} for {doing['seconds']:.0f} s, up to {doing['limit']:.0f} s"
            yield f"  [green]->[/] {HANGS}"


def _network(network: Mapping[str, Any], said: Said) -> Iterator[str]:
    names = f"[bold]{literal(network['interface'])}[/] {literal(network['network'])}"
    yield f"  {names} [dim]by {literal(network['why'])}[/]"
    for key, value in network["requests"].items():
        yield f"    asked for: {literal(key)} {literal(json.dumps(value))}"
    for text in network["unsupported"]:
        yield f"    [yellow]{said.new(text)}[/]"
    for plugin in network["plugins"]:
        yield f"    plugin [bold]{literal(plugin['type'])}[/] {literal(plugin['servedBy'] or 'nothing')}"
        if plugin.get("unknown"):
            text = f"the built-in does not know {literal(plugin['unknown'])}: a typing error?"
            yield f"      [yellow]{text}[/]"
        yield from (f"      {literal(line)}" for line in json.dumps(plugin["config"], indent=2).splitlines())
    for plugin in network["calls"]:
        yield f"    calls [bold]{literal(plugin['type'])}[/] {literal(plugin['servedBy'] or 'nothing')}"
    if network["problem"]:
        yield f"    [red]{said.new(network['problem'])}[/]"


def trace(found: Mapping[str, Any]) -> None:
    """Print a headline and a table of steps for each request."""
    if not found["requests"]:
        pod = f" for pod {found['pod']}" if found["pod"] else ""
        say(f"no requests{pod} among those that the daemon remembers: since its start, the last 1,000 at most")
    for item in found["requests"]:
        say(_headline(item))
        if error := item["error"]:
            say(f"  [red]{literal(error['text'])}[/] [dim](code {error['code']})[/]")
        for step in item["steps"]:
            took = f"{step['seconds'] * 1000:.1f} ms" if step["seconds"] else ""
            say(f"  [dim]{step['at'] * 1000:+9.1f}  {took:>11}[/]  {literal(step['what'])}")
        if item["stepsNotKept"]:
            say(f"{'':26}and {item['stepsNotKept']} more, which were not kept")


def _headline(item: Mapping[str, Any]) -> str:
    when = datetime.fromtimestamp(item["began"]).astimezone().isoformat(sep=" ", timespec="milliseconds")
    took = "is running" if item["seconds"] is None else f"{item['seconds'] * 1000:.1f} ms"
    state = "[red]failed[/]" if item["error"] else "[green]done[/]" if item["seconds"] is not None else ""
    names = " ".join(filter(None, (item["pod"], item["network"], item["ifname"], item["container"][:13])))
    return f"[bold]{literal(item['verb'])}[/] {literal(names)}  {when}  {took} {state}{_ids(item)}"


def _ids(item: Mapping[str, Any]) -> str:
    """Return the ids under which the log has the request; empty from an older daemon."""
    ids = [f"{name} {literal(value)}" for name, key in _IDS if (value := item.get(key))]
    return f" [dim]({', '.join(ids)})[/]" if ids else ""


def plugins(found: Mapping[str, Any], rows: Listing) -> None:
    """Print a row for each plugin."""
    cells = (
        (
            literal(item["type"]),
            literal(item["servedBy"]),
            literal(item["newer"]),
            f"[red]{literal(item['problem'])}[/]",
        )
        for item in found["plugins"]
    )
    rows.rows(("plugin", "served by", "why", "problem"), cells, texts=("why", "problem"))


def doctor(found: Mapping[str, Any]) -> None:
    """Print the findings, grouped by evidence; an advice that several share comes once, after the last of them."""
    if not found["findings"]:
        say("[green]nothing is wrong[/]")
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for item in found["findings"]:
        groups.setdefault(item["evidence"], []).append(item)
    advices = [
        [literal(item["advice"]) + (" [dim](--fix does it)[/]" if item["fix"] else "") for item in items]
        for items in groups.values()
    ]
    for (evidence, items), own, below in zip(groups.items(), advices, [*advices[1:], []], strict=True):
        for item in items:
            severity = f"[bold {_COLOURS[item['severity']]}]{item['severity']}[/]"
            say(f"{severity} {literal(item['check'])}: [bold]{literal(item['subject'])}[/]")
        say(f"  {literal(evidence)}", *(f"  [green]->[/] {text}" for text in dict.fromkeys(own) if text not in below))


VIEWS: Final[Mapping[str, Callable[..., None]]] = {
    view.__name__: view
    for view in (status, attachments, drift, repair, leaks, forgotten, explain, trace, plugins, doctor)
}
"""The views of answers by name; those of tables take a Listing, too."""
