"""What commands share: flags, the way to the cluster, JSON on standard output, exit statuses."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from multus_daemon import deadlines

if TYPE_CHECKING:
    from multus_daemon.cluster.kube.credentials import InCluster, Kubeconfig
    from multus_daemon.tools.kubectl.cluster import Cluster

Groups = Any
"""What `argparse.ArgumentParser.add_subparsers` gives; its class is private."""

DONE: Final = 0
FAILED: Final = 1
"""It could not be done, or what was looked at is not as it should be."""
NO_DAEMON: Final = 3
"""There are nodes, and no daemon answers."""

SELECTOR: Final = "app=multus"
"""The label that the manifests give the daemon's pods."""
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m)?")
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0}

Answer = dict[str, Any]


class CommandError(Exception):
    """The command can't be done; the message says why and what to do."""


def flags(parser: argparse.ArgumentParser, *, again: bool = False) -> None:
    """Those of all commands. `again`: of a command, where they add to what stood before it."""
    nothing = argparse.SUPPRESS

    def add(*names: str, default: Any, **options: Any) -> None:
        parser.add_argument(*names, default=nothing if again else default, **options)

    add("--json", action="store_true", default=False, help="print one JSON object instead of tables")
    add("--kubeconfig", metavar="FILE", type=Path, default=None, help="default: as kubectl's")
    add("--context", metavar="NAME", default="", help="of the kubeconfig; default: the current one")
    add("-n", "--namespace", metavar="NAME", default="", help="look at pods and networks of this namespace only")
    add(
        *("-l", "--selector"),
        metavar="LABEL",
        default=SELECTOR,
        help=f"label of the daemons' pods, in any namespace (default: {SELECTOR})",
    )
    add(
        "--timeout",
        metavar="SECONDS",
        type=seconds,
        default=deadlines.KUBECTL_NODE_SECONDS,
        help=f"for the answer of one node (default: {deadlines.KUBECTL_NODE_SECONDS:g}); who is late is named",
    )


def command(
    groups: Groups, name: str, meaning: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """A command with the flags of all."""
    parser: argparse.ArgumentParser = groups.add_parser(
        name, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}."
    )
    flags(parser, again=True)
    parser.set_defaults(run=run)
    return parser


def seconds(text: str) -> float:
    """A number of seconds, or one with a unit as kubectl takes it (`10s`, `1m`). Raises ArgumentTypeError."""
    match = _DURATION.fullmatch(text)
    found = float(match[1]) * _UNITS[match[2] or "s"] if match else 0.0
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: a number of seconds above 0, or such as 10s, 1m")
    return found


def ask(
    arguments: argparse.Namespace,
    look: Callable[[Cluster], Coroutine[Any, Any, Answer]],
    show: Callable[[Answer], None],
) -> Answer:
    """What `look` finds, printed: as JSON, or by `show`. Raises CommandError."""
    import asyncio

    from multus_daemon.cluster.kube.errors import KubeError, NoAnswerError

    try:
        found = asyncio.run(_asked(arguments, look))
    except NoAnswerError as error:
        raise CommandError(
            f"the API server can't be asked: {error}; bring it back, or name another by --kubeconfig or --context"
        ) from error
    except KubeError as error:
        raise CommandError(str(error)) from error
    if arguments.json:
        sys.stdout.write(json.dumps(found, indent=4) + "\n")
    else:
        show(found)
    sys.stdout.flush()
    return found


async def _asked(arguments: argparse.Namespace, look: Callable[[Cluster], Coroutine[Any, Any, Answer]]) -> Answer:
    from multus_daemon.cluster.kube.client import ApiClient
    from multus_daemon.tools.kubectl.cluster import AT_ONCE, Cluster
    from multus_daemon.tools.kubectl.progress import Progress

    with Progress() as progress:
        async with ApiClient(source(arguments), websockets=AT_ONCE) as client:
            return await look(
                Cluster(client, selector=arguments.selector, node_seconds=arguments.timeout, progress=progress)
            )


def source(arguments: argparse.Namespace) -> Kubeconfig | InCluster:
    """As kubectl finds it: `--kubeconfig`, the variable KUBECONFIG, `~/.kube/config`, the pod's own service account."""
    from multus_daemon.cluster.kube.credentials import InCluster, Kubeconfig

    if arguments.kubeconfig:
        return Kubeconfig(arguments.kubeconfig, context=arguments.context)
    named = [Path(name) for name in os.environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    usual = Path("~/.kube/config").expanduser()
    if not named and not usual.exists() and "KUBERNETES_SERVICE_HOST" in os.environ and not arguments.context:
        return InCluster()
    # As kubectl does: of several those that are not there are passed over.
    first, *others = [path for path in named if path.exists()] or named[:1] or [usual]
    return Kubeconfig(first, context=arguments.context, others=tuple(others))


def status_of(found: Answer, *, wrong: bool) -> int:
    """The exit status for an answer with `daemons` and `unanswered`; `wrong`: what was looked at is."""
    if found["unanswered"] and not found["daemons"]:
        return NO_DAEMON
    return FAILED if wrong or found["unanswered"] else DONE
