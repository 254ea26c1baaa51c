"""`kubectl multus pods`: which pods lack networks, by cause."""

from __future__ import annotations

import argparse
import functools

from multus_daemon.tools.kubectl.commands import common


def add_to(groups: common.Groups) -> None:
    """Declare it."""
    common.command(groups, "pods", "show which pods lack networks, by cause; exit status 1 where there are any", run)


def run(arguments: argparse.Namespace) -> int:
    """Raises CommandError."""
    from multus_daemon.tools.kubectl import pods, show

    found = common.ask(arguments, functools.partial(pods.look, namespace=arguments.namespace), show.pods)
    return common.FAILED if found["pods"] else common.status_of(found, wrong=False)
