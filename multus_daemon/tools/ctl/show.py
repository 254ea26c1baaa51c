"""What `multusctl` shows to people."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from multus_daemon.runtime import terminal
from multus_daemon.runtime.terminal import literal
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.tools.ctl.sandbox import Outcome


def cni_error(error: CniError) -> None:
    """On standard error: the cause first, then what else is known."""
    console = terminal.console(stderr=True)
    console.print(f"[bold red]{literal(error.msg)}[/] [dim](CNI error {error.code})[/]", soft_wrap=True)
    if error.details:
        console.print(f"  {literal(error.details)}", soft_wrap=True)


def outcome(verb: str, pod: str, found: Outcome) -> None:
    """The tables, or one line where there is nothing to show."""
    console = terminal.console()
    words = {"up": "is up", "check": "is as it should be", "down": "is down"}[verb]
    if not found.container_id:
        console.print(f"pod {pod} was not up")
    else:
        console.print(f"[bold]pod {pod} {words}[/] [dim]({found.milliseconds:.1f} ms)[/]")
    if found.notes:
        console.print(f"[yellow]{literal(found.notes)}[/]", soft_wrap=True)
    if verb == "up":
        console.print(interfaces(found))
        console.print(routes(found))
        console.print(f"[dim]network namespace {found.netns}[/]", soft_wrap=True)


def interfaces(found: Outcome) -> Table:
    """One row for each interface; the networks' names come from the network-status. 80 columns hold it."""
    table = Table("interface", "network", "addresses", "mac", "mtu", title="interfaces", box=box.ROUNDED)
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
    """One row for each route in the pod."""
    table = Table("destination", "gateway", "interface", title="routes", box=box.ROUNDED)
    for item in found.pod["routes"]:
        default = item["dst"] in ("0.0.0.0/0", "::/0")
        table.add_row("[green]default[/]" if default else item["dst"], item["gw"], literal(item["interface"]))
    return table
