"""`multusctl`: what a person asks the daemon of a node, or has it do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from multus_daemon.settings import SettingsError
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.tools.ctl.client import NoDaemonError
from multus_daemon.tools.ctl.commands import COMMANDS, common


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exit status: 0 done, 1 it failed (the reason is on standard error), 2 usage, 3 no daemon answers."""
    arguments = parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
    except CniError as error:
        # Here, not at the top: rich takes as long to load as all the rest, and JSON does without.
        from multus_daemon.tools.ctl import show

        show.cni_error(error)
        sys.exit(common.FAILED)
    except NoDaemonError as error:
        sys.stderr.write(f"multusctl: {error}\n")
        sys.exit(common.NO_DAEMON)
    except (common.CommandError, SettingsError) as error:
        sys.stderr.write(f"multusctl: {error}\n")
        sys.exit(common.FAILED)
    if status:
        sys.exit(status)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    made = argparse.ArgumentParser(prog="multusctl", description="Asks the multus daemon of this node.")
    groups = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_to(groups)
    return made
