"""`multusctl status`: how the daemon of this node is."""

from __future__ import annotations

import argparse
import sys

from multus_daemon.tools.ctl.client import NoDaemonError
from multus_daemon.tools.ctl.commands import common


def add_to(groups: common.Groups) -> None:
    """Declare it."""
    common.command(groups, "status", "show how the daemon of this node is; exit status 1 where it is not ready", run)


def run(arguments: argparse.Namespace) -> int:
    """Raises CniError, CommandError, SettingsError."""
    try:
        found = common.client(arguments).ask("status")
    except NoDaemonError as error:
        from multus_daemon.tools.ctl import offline

        sys.stderr.write(f"multusctl: {error}\n")
        found = offline.status(common.cni_dir(arguments), str(error))
    if arguments.json:
        common.print_json(found)
    else:
        from multus_daemon.tools.ctl import show_status

        show_status.status(found)
    if found["source"] != "daemon":
        return common.NO_DAEMON
    return common.DONE if found["ready"] else common.FAILED
