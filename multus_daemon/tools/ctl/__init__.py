"""`multusctl` asks the daemon of a node, and acts on the node."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from multus_daemon.settings import SettingsError
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.tools.command_line import FAILED, NO_DAEMON, CommandError
from multus_daemon.tools.ctl.client import NoDaemonError
from multus_daemon.tools.ctl.commands import parser


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exit status: 0 done, 1 it failed (the reason is on standard error), 2 usage, 3 no daemon answers."""
    arguments = parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
    except CniError as error:
        from multus_daemon.tools.ctl import show

        show.cni_error(error)
        status = FAILED
    except (NoDaemonError, CommandError, SettingsError) as error:
        sys.stderr.write(f"multusctl: {error}\n")
        status = NO_DAEMON if isinstance(error, NoDaemonError) else FAILED
    if status:
        sys.exit(status)
