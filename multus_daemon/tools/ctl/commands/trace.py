"""`multusctl trace`: what the daemon has done for a pod, step by step."""

from __future__ import annotations

import argparse

from multus_daemon.tools.ctl.commands import common


def add_to(groups: common.Groups) -> None:
    """Declare it."""
    parser = common.command(groups, "trace", "show what the daemon did for a pod, with the time of each step", run)
    parser.add_argument("pod", metavar="NAMESPACE/POD", type=common.pod, nargs="?", help="default: all pods")
    parser.add_argument(
        "--last", metavar="N", type=int, default=20, help="so many requests at most (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises NoDaemonError, CniError, SettingsError."""
    found = common.client(arguments).ask("trace", {"pod": arguments.pod or "", "last": str(arguments.last)})
    if arguments.json:
        common.print_json(found)
    else:
        from multus_daemon.tools.ctl import show_trace

        show_trace.requests(found)
    return common.DONE
