"""`kubectl multus status`: how the daemons of all nodes are."""

from __future__ import annotations

import argparse

from multus_daemon.tools.kubectl.commands import common


def add_to(groups: common.Groups) -> None:
    """Declare it."""
    meaning = "show how the daemon of each node is; exit status 1 where one is not ready or does not answer"
    common.command(groups, "status", meaning, run)


def run(arguments: argparse.Namespace) -> int:
    """Raises CommandError."""
    from multus_daemon.tools.kubectl import show, status

    found = common.ask(arguments, status.look, show.status)
    return common.status_of(found, wrong=any(not node["ready"] for node in found["nodes"]))
