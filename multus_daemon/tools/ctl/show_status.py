"""`multusctl status` for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from multus_daemon.runtime import terminal
from multus_daemon.runtime.terminal import literal, moment


def status(found: Mapping[str, Any]) -> None:
    """What is wrong first; then a table of the parts; then the errors of the last requests by cause."""
    console = terminal.console()
    if found["ready"]:
        console.print(
            f"[bold green]ready[/] multus-daemon {literal(found['version'])}, since {moment(found['startedAt'])}"
        )
    else:
        console.print(f"[bold red]not ready[/] multus-daemon {literal(found['version'])}")
    for gate, reason in found["gates"].items():
        console.print(f"  [red]{literal(gate)}[/]: {literal(reason)}", soft_wrap=True)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, text in _parts(found):
        table.add_row(name, text)
    console.print(table)
    if found["errors"]:
        console.print(_errors(found))


def _parts(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    primary = found["primary"]
    if primary["wanted"]:
        yield "primary network", literal(primary["file"] or "none yet")
        yield "placed", literal(primary["placed"] or "nothing yet")
        for item in primary["passedOver"]:
            yield "passed over", literal(f"{item['file']}: {item['reason']}")
    cluster = found["cluster"]
    for informer in cluster["informers"]:
        stale = informer["staleSeconds"]
        age = "never heard of" if stale is None else "up to date" if not stale else f"{stale:g} s old"
        problem = f" [red]{literal(informer['problem'])}[/]" if informer["problem"] else ""
        yield f"{cluster['kind']}: {informer['resource']}", f"{informer['objects']}, {age}{problem}"
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


def _errors(found: Mapping[str, Any]) -> Table:
    table = terminal.table("count", "verb", "cause", "last", title="errors of the last requests")
    for item in found["errors"]:
        last = f"{moment(item['last'])}\n{literal(item['pod'])}"
        table.add_row(
            str(item["count"]), literal(item["verb"]), f"{literal(item['cause'])} [dim]({item['code']})[/]", last
        )
    return table
