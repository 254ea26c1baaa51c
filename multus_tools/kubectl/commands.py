"""The commands of `kubectl multus`: functions, whose docstrings are the help texts, and a table of their options."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from multus_daemon import deadlines
from multus_tools import command_line
from multus_tools.command_line import (
    ALL,
    BUNDLE_FILE,
    DONE,
    FAILED,
    LIST,
    NO_DAEMON,
    Answer,
    Command,
    CommandError,
    option,
)

if TYPE_CHECKING:
    from multus_daemon.cluster.kube.credentials import InCluster, Kubeconfig
    from multus_tools.kubectl.cluster import Cluster

SELECTOR: Final = "app=multus"
"""The label of the daemon's pods in the manifests."""
_SELECTOR_HELP: Final = f"label of the daemons' pods, in any namespace (default: {SELECTOR})"
_NODE_SECONDS: Final = deadlines.KUBECTL_NODE_SECONDS
_TIMEOUT_HELP: Final = f"for the answer of a node (default: {_NODE_SECONDS:g}); late nodes are named"
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m)?")
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. docs/kubectl-multus.md lists the exit statuses."""
    command_line.finish(parser(), argv)


def complete() -> None:
    """Entry point of `kubectl_complete-multus`: print the words that may follow the arguments.

    kubectl calls it as cobra's completion protocol has it: a word each line, then a directive, here "no file names".
    """
    from argcomplete import autocomplete

    asked, line = parser(), " ".join(["kubectl-multus", *sys.argv[1:]])
    os.environ |= {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    with contextlib.suppress(SystemExit):
        autocomplete(asked, exit_method=sys.exit, output_stream=sys.stdout)
    sys.stdout.write("\n:4\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    return command_line.parser("kubectl-multus", "Asks about Multus in a cluster.", COMMANDS, OPTIONS)


def seconds(text: str) -> float:
    """Read a number of seconds, or one with a unit as kubectl takes it (`10s`, `1m`). Raises ArgumentTypeError."""
    match = _DURATION.fullmatch(text)
    number = float(match[1]) * _UNITS[match[2] or "s"] if match else 0.0
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: a number of seconds above 0, or such as 10s, 1m")
    return number


def status(arguments: argparse.Namespace) -> int:
    """Show how the daemon of each node is; exit status 1 if one is not ready or does not answer."""
    from multus_tools.kubectl import nodes, show

    answer = _ask(arguments, nodes.status, show.status, ("nodes", "node"))
    return status_of(answer, wrong=any(not node["ready"] for node in answer["nodes"]))


def pods(arguments: argparse.Namespace) -> int:
    """Show which pods lack networks, by cause; exit status 1 if there are any."""
    from multus_tools.kubectl import pods, show

    answer = _ask(arguments, pods.pods, show.pods, ("pods", "pod"), namespace="")
    return FAILED if answer["pods"] else status_of(answer, wrong=False)


def why(arguments: argparse.Namespace) -> int:
    """Explain why a pod lacks networks, and what to do; exit status 1 if it does."""
    from multus_tools.kubectl import pods, show

    namespace, name = command_line.split_name(arguments.pod, "[NAMESPACE/]POD")
    answer = _ask(arguments, pods.why, show.why, namespace=namespace, name=name)
    return FAILED if answer["cause"] or answer["lacks"] else DONE


def networks(arguments: argparse.Namespace) -> int:
    """Show which pods use each network, and which nodes can't serve it; exit status 1 if there are any."""
    from multus_tools.kubectl import nodes, show

    namespace = name = ""
    if arguments.network:
        namespace, name = command_line.split_name(arguments.network, "[NAMESPACE/]NETWORK")
    names = ("networks", "network")
    answer = _ask(arguments, nodes.networks, show.networks, names, namespace=namespace, name=name)
    return status_of(answer, wrong=any(item["problem"] or item["missing"] for item in answer["networks"]))


def leaks(arguments: argparse.Namespace) -> int:
    """Show the attachments that nothing will delete, on all nodes; exit status 1 if there are any."""
    from multus_tools.kubectl import nodes, show

    answer = _ask(arguments, nodes.leaks, show.leaks, ("containers", "container"), namespace="")
    return status_of(answer, wrong=bool(answer["containers"]))


def bundle(arguments: argparse.Namespace) -> int:
    """Write an archive for a bug report; exit status 1 if a node does not answer or something is missing."""
    from multus_tools.bundle_file import CLUSTER_MAX_BYTES, written

    if arguments.output:
        raise CommandError("bundle writes an archive: -o json and --json have no meaning for it")
    if arguments.nodes and arguments.pod:
        raise CommandError("name --nodes or --pod, not both")
    pod = "/".join(command_line.split_name(arguments.pod, "[NAMESPACE/]POD")) if arguments.pod else ""
    nodes = [name for name in (arguments.nodes or "").split(",") if name]
    with written("kubectl-multus", arguments, most=CLUSTER_MAX_BYTES) as archive:

        async def collect(cluster: Cluster) -> Answer:
            from multus_tools.kubectl.bundle import Bundle

            space = _namespace(arguments)
            named = f"{space or 'default'}{pod}" if pod.startswith("/") else pod
            return await Bundle(cluster, archive).collect(nodes=nodes, pod=named, namespace=space)

        answer = _answer_of(arguments, collect)
        archive.notes += [f"node {item['node']}: {item['problem']}" for item in answer["unanswered"]]
        archive.notes += answer["notes"]
    return status_of(answer, wrong=bool(archive.missing))


def status_of(answer: Answer, *, wrong: bool) -> int:
    """Return the exit status for an answer; `wrong`: it shows something that is wrong."""
    if answer["unanswered"] and not answer["daemons"]:
        return NO_DAEMON
    return FAILED if wrong or answer["unanswered"] else DONE


def _ask(
    arguments: argparse.Namespace,
    look: Callable[..., Coroutine[Any, Any, Answer]],
    show: Callable[..., None],
    names: Sequence[str] = (),
    **query: str,
) -> Answer:
    """Print the answer of `look(Cluster, **query)`, and return it (`command_line.present`). Raises CommandError.

    An empty `namespace` of the query becomes that of the flags, else of the context.
    """

    async def ask(cluster: Cluster) -> Answer:
        if not query.get("namespace", "-"):
            query["namespace"] = _namespace(arguments)
        return await look(cluster, **query)

    return command_line.present(arguments, lambda: _answer_of(arguments, ask), show, names)


def _answer_of(arguments: argparse.Namespace, ask: Callable[[Cluster], Coroutine[Any, Any, Answer]]) -> Answer:
    """Return what `ask` finds in the cluster of the flags, and show the progress. Raises CommandError."""
    import asyncio

    from multus_daemon.cluster.kube.client import ApiClient
    from multus_daemon.cluster.kube.errors import KubeError, NoAnswerError
    from multus_tools.kubectl.cluster import AT_ONCE, Cluster

    async def asked() -> Answer:
        with _bar(seen=sys.stderr.isatty() and not arguments.watch) as bar:
            async with ApiClient(_source(arguments), websockets=AT_ONCE) as client:
                return await ask(Cluster(client, arguments.selector, arguments.timeout, bar))

    try:
        return asyncio.run(asked())
    except NoAnswerError as error:
        raise CommandError(
            f"the API server can't be asked: {error}; bring it back, or name another by --kubeconfig or --context"
        ) from error
    except KubeError as error:
        raise CommandError(str(error)) from error


def _namespace(arguments: argparse.Namespace) -> str:
    """Return the namespace to look in, as kubectl chooses it; empty means all. Raises ConfigurationError."""
    from multus_daemon.cluster.kube.credentials import Kubeconfig

    if arguments.all_namespaces or arguments.namespace:
        return "" if arguments.all_namespaces else str(arguments.namespace)
    source = _source(arguments)
    return (source.namespace() if isinstance(source, Kubeconfig) else "") or "default"


@contextlib.contextmanager
def _bar(*, seen: bool) -> Iterator[Callable[[int, int], None]]:
    """If it is `seen`, show on standard error how many of the asked nodes have answered."""
    if not seen:
        yield lambda answered, asked: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("asking nodes"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", visible=False)
        yield lambda answered, asked: progress.update(task, completed=answered, total=asked, visible=True)


def _source(arguments: argparse.Namespace) -> Kubeconfig | InCluster:
    """Find the cluster like kubectl: `--kubeconfig`, KUBECONFIG, `~/.kube/config`, the pod's own service account."""
    from multus_daemon.cluster.kube.credentials import InCluster, Kubeconfig

    if arguments.kubeconfig:
        return Kubeconfig(arguments.kubeconfig, context=arguments.context)
    named = [Path(name) for name in os.environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    usual = Path("~/.kube/config").expanduser()
    if not named and not usual.exists() and "KUBERNETES_SERVICE_HOST" in os.environ and not arguments.context:
        return InCluster()
    # Like kubectl, pass over missing files if there are several.
    first, *others = [path for path in named if path.exists()] or named[:1] or [usual]
    return Kubeconfig(first, context=arguments.context, others=tuple(others))


OPTIONS: Final = (
    command_line.JSON,
    option("--kubeconfig", metavar="FILE", type=Path, help="default: as kubectl's"),
    option("--context", metavar="NAME", default="", help="of the kubeconfig; default: the current one"),
    option("-n", "--namespace", metavar="NAME", default="", help="default: the context's"),
    option("-l", "--selector", metavar="LABEL", default=SELECTOR, help=_SELECTOR_HELP),
    option("--timeout", metavar="SECONDS", type=seconds, default=_NODE_SECONDS, help=_TIMEOUT_HELP),
)
"""Options of all commands."""

COMMANDS: Final = (
    Command("Show how the daemon of each node is; exit status 1 if one is not ready or does not answer.", status, LIST),
    Command("Show which pods lack networks, by cause; exit status 1 if there are any.", pods, (*LIST, ALL)),
    Command(
        "Explain why a pod lacks networks, and what to do; exit status 1 if it does.",
        why,
        (
            *command_line.ONE,
            option("pod", metavar="[NAMESPACE/]POD", help="default namespace: --namespace, or the context's"),
        ),
    ),
    Command(
        "Show which pods use each network, and which nodes can't serve it; exit status 1 if there are any.",
        networks,
        (
            *LIST,
            ALL,
            option("network", metavar="[NAMESPACE/]NETWORK", nargs="?", help="default: all networks"),
        ),
    ),
    Command(
        "Show the attachments that nothing will delete, on all nodes; exit status 1 if there are any.",
        leaks,
        (*LIST, ALL),
    ),
    Command(
        "Write an archive for a bug report, without secrets; exit status 1 if something is missing in it.",
        bundle,
        (
            *BUNDLE_FILE,
            option("--nodes", metavar="NAME[,NAME…]", help="only these nodes (default: all)"),
            option("--pod", metavar="[NAMESPACE/]POD", help="only the node of this pod, and what concerns the pod"),
        ),
    ),
)
"""In the order of `--help`."""
