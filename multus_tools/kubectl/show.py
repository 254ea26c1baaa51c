"""Answers of `kubectl multus` as tables for people, with nodes that did not answer at the end."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from multus_daemon.spec.cni.errors import MORE, parted
from multus_tools import tables
from multus_tools.kubectl import causes
from multus_tools.tables import Listing
from multus_tools.terminal import ANSWERS, SAME, Said, counted, literal, moment, say

SHOWN: Final = 5
"""Maximum number of names in a cell without `-o wide`."""


def status(found: Mapping[str, Any], rows: Listing) -> None:
    """Print on how many nodes pods get their networks; the nodes, the worst first; then the errors by cause.

    In a terminal, `-o wide` fits on one screen.
    """
    screen = shutil.get_terminal_size().lines if rows.wide and not rows.rows_only and tables.is_seen() else 0
    nodes = []
    worst = list(ANSWERS).index
    for node in sorted(
        found["nodes"], key=lambda item: (worst(item["podsGetNetworks"]), not (item["broken"] or item["leftovers"]))
    ):
        state = [f"[{ANSWERS[node['podsGetNetworks']]}]{node['podsGetNetworks']}[/]"]
        # A gate may have the name of a resource.
        problems = [*({**node["behind"], **node["gates"]}).items(), *node["degraded"].items()]
        state += [
            f"{literal(subject)}: {literal(problem if rows.wide else parted(problem)[0])}"
            for subject, problem in problems
        ]
        if node["because"] and not any(node["because"].endswith(problem) for _, problem in problems):
            state.append(literal(node["because"]))
        if rows.wide:
            state += map(_difference, node["differences"])
            more = node["broken"] - len({(item["pod"], item["interface"]) for item in node["differences"]})
            state += [f"[yellow]{more} more broken attachments[/]"] if more > 0 else []
        numbers = (str(node[key] or "") for key in ("containers", "spooled", "leftovers", "broken"))
        nodes.append(
            (literal(node["node"]), "\n".join(state), literal(node["version"]), *numbers, literal(node["daemon"]))
        )
    unanswered = []
    for item in found["unanswered"]:
        answer = "[red]no answer[/]" + (", its pod is Ready" if item["podReady"] else "")
        problem = f"{answer}\n{literal(item['problem'])}"
        unanswered.append((literal(item["node"]), problem, *[""] * 5, literal(item["daemon"])))
    nodes = unanswered + nodes
    if not rows.rows_only:
        say(_summary(found))
    headers = ("node", "networks", "version", "containers", "spool", "left over", "broken")
    least = ("version", "spool", "daemon", "containers", "left over", "broken")
    # Some lines are for the frame, the errors and the prompt.
    shown = nodes[: max(3, screen - 19 - sum(row[1].count("\n") for row in nodes))] if screen else nodes
    rows.rows(headers, shown, wide=("daemon",), framed=bool(screen), texts=("networks",), least=least)
    if len(shown) < len(nodes):
        say(f"and {len(nodes) - len(shown)} more nodes")
    if found["errors"] and not rows.rows_only:
        title, texts = "errors of the last requests", ("cause", "nodes")
        errors = tables.Rows("count", "verb", *texts, "last pod", title=title, texts=texts, least=("last pod",))
        for item in found["errors"][: 3 if screen else None]:
            cause = f"{literal(item['cause'])} [dim]({item['code']})[/]"
            names = _some(item["nodes"], rows, few=bool(screen))
            errors.add_row(str(item["count"]), literal(item["verb"]), cause, names, literal(item["pod"]))
        say(errors)
    rows.note(*_end({**found, "unanswered": []}))


def _summary(found: Mapping[str, Any]) -> str:
    """Return a line that says on how many nodes pods get their networks now."""
    number = {answer: sum(node["podsGetNetworks"] == answer for node in found["nodes"]) for answer in ANSWERS}
    unanswered, probed = len(found["unanswered"]), sum(item["podReady"] for item in found["unanswered"])
    text = f"pods get their networks on {number['yes']} of {len(found['nodes']) + unanswered} nodes"
    text += f", in part on {number['in part']}" if number["in part"] else ""
    text += f", not on {number['no']}" if number["no"] else ""
    text += f"; {unanswered} did not answer" if unanswered else ""
    return text + (f", and the pods of {probed} are Ready" if probed else "")


def pods(found: Mapping[str, Any], rows: Listing) -> None:
    """Print a table of causes and one of pods."""
    if found["pods"] and not rows.rows_only:
        causes = tables.Rows("pods", "cause", "such as", texts=("cause", "such as"))
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
    tables.leaks(rows, found["containers"])
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


def addresses(found: Mapping[str, Any], rows: Listing) -> None:
    """Print a row for each range; with `-o wide` also one for each address that is held."""
    headers: tuple[str, ...] = ("range", "networks", "held", "free", "by node")
    cells: list[tuple[str, ...]] = []
    lost: dict[str, str] = {}
    for item in found["ranges"]:
        nodes = [f"{each['node'] or '?'}: {each['held']} {each['gone']}".rstrip() for each in item["nodes"]]
        lost |= {each["node"]: each["gone"] for each in item["nodes"] if each["gone"]}
        free = "" if item["free"] is None else f"{item['free']} of {item['size']}"
        networks = _some(item["networks"], rows) or "[dim]none[/]"
        name = literal(" ".join(filter(None, (item["range"], item["networkName"]))))
        free = f"[red]{free}[/]" if item["free"] == 0 else free
        cells.append((f"[bold]{name}[/]", networks, str(item["held"]), free, _some(nodes, rows)))
    if rows.wide:
        if cells and not rows.rows_only:
            ranges = tables.Rows(*headers, texts=("networks", "by node"))
            for row in cells:
                ranges.add_row(*row)
            say(ranges)
        headers = ("address", "pod", "interface", "node", "by", "network", "container")
        cells = [tuple(literal(item[key]) for key in headers) for item in found["addresses"]]
    rows.rows(headers, cells, texts=("networks", "by node"))
    hints = [f"node {node}: {why}; `kubectl multus addresses release --node {node}`" for node, why in lost.items()]
    nothing = [] if found["ranges"] else ["No addresses are shared"]
    rows.note(*nothing, *map(literal, hints), *_end(found))


def released(found: Mapping[str, Any]) -> None:
    """Print the addresses that were released, or would be, and those that were kept."""
    done = "[yellow]would be released[/]" if found["dryRun"] else "[green]released[/]"
    say(*(f"{done} {literal(item['address'])} of pod {literal(item['pod'])}" for item in found["released"]))
    kept = (f"[red]kept[/] {literal(item['address'])}: {literal(item['why'])}" for item in found["kept"])
    say(*kept, *_end(found), stderr=True)
    if found["dryRun"] and found["released"]:
        say("Two pods have an address if its pod still runs: be sure that the node is off. --yes releases", stderr=True)


def why(found: Mapping[str, Any]) -> None:
    """Print cause and advice, then further facts that add to it."""
    cause, _ = parted(found["text"])
    said = Said(cause)
    pod = f"[bold]{literal(found['pod'])}[/]" + (f" [dim]on node {literal(found['node'])}[/]" if found["node"] else "")
    if found["cause"]:
        say(f"{pod}: [red]{literal(cause)}[/]")
        if (advice := said.new(found["advice"])) != SAME:
            say(f"  [green]->[/] {advice}")
    elif found["compared"]:
        say(f"{pod}: [green]has its networks[/]: its interfaces were compared with the kernel just now")
    else:
        say(f"{pod}: [yellow]no fault was found[/]; its interfaces were not compared with the kernel")
    for name in found["lacks"]:
        say(f"  [red]lacks[/] {literal(name)}")
    for name in found["attached"]:
        say(f"  [green]has[/] {literal(name)}")
    for text in found["differences"]:
        if (difference := said.new(text)) != SAME:
            say(f"  [red]differs[/] {difference}")
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
        is_ours = event["component"] == causes.COMPONENT or event["reason"] in causes.KUBELET_REASONS
        if event["type"] == "Warning" and is_ours:
            text = said.new(causes.words_of_plugin(event["message"]).partition(MORE)[0])
            lines.append((literal(event["when"]), f"Event {literal(event['reason'])}: {text}", event["count"]))
    looked_at = [f"annotations, {len(found['events'])} Events"]
    looked_at += [f"plan, {len(found['requests'])} requests, records"] if found["steps"] else []
    looked_at += ["the kernel"] if found["compared"] else []
    say(*counted(lines), f"  [dim]looked at: {', '.join(looked_at)}[/]", *_end(found))


def _nothing(text: str, found: Mapping[str, Any], items: Sequence[Any]) -> list[str]:
    """If there are no `items`, return `text` with the namespace as a line, like kubectl."""
    where = f" in namespace {literal(found['namespace'])}; -A looks in all" if found["namespace"] else ""
    return [] if items else [text + where]


def _end(found: Mapping[str, Any]) -> list[str]:
    """Return lines with the nodes that did not answer, and the notes."""
    unanswered = [f"[red]node {literal(item['node'])}[/]: {literal(item['problem'])}" for item in found["unanswered"]]
    return [*unanswered, *(f"[yellow]{literal(note)}[/]" for note in found["notes"])]


def _difference(item: Mapping[str, str]) -> str:
    where = f"pod {item['pod']}, interface {item['interface']} (network {item['network']})"
    return f"[yellow]{literal(where)}[/]: {literal(item['difference'])}"


def _missing(missing: Iterable[Mapping[str, str]], rows: Listing) -> str:
    """Return a text with the nodes that lack a plugin, by plugin."""
    nodes: dict[str, list[str]] = {}
    for item in missing:
        nodes.setdefault(f"{item['plugin']} {item['problem']}", []).append(item["node"])
    return "\n".join(f"[red]{literal(what)}[/]: {_some(names, rows)}" for what, names in nodes.items())


def _some(names: list[str], rows: Listing, *, few: bool = False) -> str:
    shown = names if rows.wide and not few else names[:SHOWN]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return literal(", ".join(shown)) + more
