"""`multusctl attachments`: what is attached to the pods of this node."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from multus_daemon import deadlines
from multus_daemon.ctl.client import NoDaemonError
from multus_daemon.ctl.commands import common


def add_to(groups: common.Groups) -> None:
    """Declare it."""
    parser = common.command(groups, "attachments", "show what is attached to the pods of this node", run)
    parser.add_argument("pod", metavar="NAMESPACE/POD", type=common.pod, nargs="?", help="default: all pods")
    parser.add_argument("--check", action="store_true", help="run CHECK too; exit status 1 where it fails")
    parser.add_argument("--leaks", action="store_true", help="only what nobody will delete, and why")


def run(arguments: argparse.Namespace) -> int:
    """Raises CniError, CommandError, SettingsError."""
    query = {
        "pod": arguments.pod or "",
        "check": "true" if arguments.check else "",
        "leaks": "true" if arguments.leaks else "",
    }
    found = ask(arguments, query)
    if arguments.json:
        common.print_json(found)
    else:
        from multus_daemon.ctl import show_attachments

        show_attachments.containers(found, leaks=arguments.leaks)
    return common.FAILED if any(item["check"] for item in found["containers"]) else common.DONE


def ask(arguments: argparse.Namespace, query: Mapping[str, str]) -> dict[str, Any]:
    """The daemon's answer, else what the records on this node say. Raises CniError, CommandError, SettingsError.

    Raises NoDaemonError where only a daemon can do what the query wants: CHECK.
    """
    check = bool(query.get("check"))
    try:
        seconds = deadlines.ADMIN_SECONDS if check else deadlines.CTL_SECONDS
        return common.client(arguments).ask("attachments", query, timeout=seconds)
    except NoDaemonError as error:
        if check:
            raise
        from multus_daemon.ctl import offline

        sys.stderr.write(f"multusctl: {error}; what follows is from the records on this node\n")
        return offline.attachments(common.cni_dir(arguments), pod=query.get("pod", ""), leaks=bool(query.get("leaks")))
