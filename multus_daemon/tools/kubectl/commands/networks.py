"""`kubectl multus networks`: who uses each network, and which nodes can't serve it."""

from __future__ import annotations

import argparse
import functools

from multus_daemon.tools.kubectl.commands import common


def add_to(groups: common.Groups) -> None:
    """Declare it."""
    meaning = "show who uses each network, and which nodes can't serve it; exit status 1 where there are any"
    parser = common.command(groups, "networks", meaning, run)
    parser.add_argument("network", metavar="[NAMESPACE/]NETWORK", nargs="?", help="default: all networks")


def run(arguments: argparse.Namespace) -> int:
    """Raises CommandError."""
    from multus_daemon.tools.kubectl import networks, show

    namespace, name = arguments.namespace, ""
    if arguments.network:
        before, slash, name = arguments.network.rpartition("/")
        if not name or "/" in before or (slash and not before):
            raise common.CommandError(f"{arguments.network!r} is not of the form [NAMESPACE/]NETWORK")
        namespace = before or namespace
    found = common.ask(arguments, functools.partial(networks.look, namespace=namespace, name=name), show.networks)
    if arguments.network and not found["networks"]:
        raise common.CommandError(
            f"there is no NetworkAttachmentDefinition {arguments.network!r}; `kubectl multus networks` names all"
        )
    wrong = any(item["problem"] or item["missing"] for item in found["networks"])
    return common.status_of(found, wrong=wrong)
