"""`kubectl multus` asks about Multus in a whole cluster, with the user's kubeconfig.

The API server knows pods, networks, nodes and Events. What only a node knows is asked of its daemon, by
`multusctl … --json` in the daemon's pod (`cluster.kube.pod_exec`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from multus_daemon.tools.command_line import FAILED, CommandError
from multus_daemon.tools.kubectl.commands import parser


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exit status: 0 done, 1 it failed or something is wrong, 2 usage, 3 no daemon answers."""
    arguments = parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
    except CommandError as error:
        sys.stderr.write(f"kubectl-multus: {error}\n")
        status = FAILED
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        # The reader has read enough; the interpreter must not flush standard output at its end.
        sys.stdout = None
        status = FAILED
    sys.exit(status)
