"""`kubectl multus leaks`: what nobody will delete, on all nodes."""

from __future__ import annotations

import argparse
import functools

from multus_daemon.tools.kubectl.commands import common


def add_to(groups: common.Groups) -> None:
    """Declare it."""
    meaning = "show what nobody will delete, on all nodes; exit status 1 where there is any"
    common.command(groups, "leaks", meaning, run)


def run(arguments: argparse.Namespace) -> int:
    """Raises CommandError."""
    from multus_daemon.tools.kubectl import leaks, show

    found = common.ask(arguments, functools.partial(leaks.look, namespace=arguments.namespace), show.leaks)
    return common.status_of(found, wrong=bool(found["containers"]))
