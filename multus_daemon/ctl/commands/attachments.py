"""`multusctl attachments`: what is attached to the pods of this node."""

from __future__ import annotations

import argparse
import sys

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
    seconds = deadlines.ADMIN_SECONDS if arguments.check else deadlines.CTL_SECONDS
    try:
        found = common.client(arguments).ask("attachments", query, timeout=seconds)
    except NoDaemonError as error:
        if arguments.check:
            raise
        from multus_daemon.ctl import offline

        sys.stderr.write(f"multusctl: {error}; what follows is from the records on this node\n")
        found = offline.attachments(common.cni_dir(arguments), pod=arguments.pod or "", leaks=arguments.leaks)
    if arguments.json:
        common.print_json(found)
    else:
        from multus_daemon.ctl import show_attachments

        show_attachments.containers(found, leaks=arguments.leaks)
    return common.FAILED if any(item["check"] for item in found["containers"]) else common.DONE
