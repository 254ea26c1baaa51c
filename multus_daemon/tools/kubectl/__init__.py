"""`kubectl multus`: what a person asks about Multus in a whole cluster, with a kubeconfig of their own.

The API server says which pods, networks, nodes and Events there are; what only a node knows is asked of its daemon, by
`multusctl … --json` in the daemon's pod (`cluster.kube.pod_exec`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from multus_daemon.tools.kubectl.commands import COMMANDS, common


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exit status: 0 done, 1 it failed or something is wrong, 2 usage, 3 no daemon answers."""
    arguments = parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
    except common.CommandError as error:
        sys.stderr.write(f"kubectl-multus: {error}\n")
        status = common.FAILED
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        # Whoever reads has read enough; the interpreter must not trip over it at its end.
        sys.stdout = None
        status = common.FAILED
    sys.exit(status)


def parser() -> argparse.ArgumentParser:
    """The whole command line. The flags of all may stand before the command, and after it."""
    made = argparse.ArgumentParser(prog="kubectl-multus", description="Asks about Multus in a cluster.")
    common.flags(made)
    groups = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_to(groups)
    return made
