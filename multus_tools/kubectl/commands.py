"""The commands of `kubectl multus`: a function for each, and the table COMMANDS with help texts and options."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from multus_tools import command_line, deadlines
from multus_tools.command_line import ALL, BUNDLE_FILE, DONE, FAILED, LIST, ONE, Answer, Command, CommandError, option

if TYPE_CHECKING:
    from multus_daemon.cluster.kube.credentials import InCluster, Kubeconfig
    from multus_tools.kubectl.cluster import Cluster

SELECTOR: Final = "app=multus"
"""The label of the daemon's pods in the manifests."""
_SELECTOR_HELP: Final = f"label of the daemons' pods, in any namespace (default: {SELECTOR})"
_NODE_SECONDS: Final = deadlines.KUBECTL_NODE_SECONDS
_TIMEOUT_HELP: Final = f"for the answer of a node (default: {_NODE_SECONDS:g}); late nodes are named"
_WAIT_SECONDS: Final = 2.0
"""Seconds between two requests of `status --wait`."""
_READY_SECONDS: Final = 300.0
_WAIT_HELP: Final = f"at most this long (default: {_READY_SECONDS:g})"
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m)?")
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. docs/kubectl-multus.md lists the exit statuses."""
    command_line.finish(parser(), argv)


def complete() -> None:
    """Entry point of `kubectl_complete-multus`: print the words that may follow the arguments.

    Format: cobra's completion protocol, which kubectl uses: a word in each line, then a directive, here "no file
    names".
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
    """Read a number of seconds, or a duration as in kubectl (`10s`, `1m`). Raises ArgumentTypeError."""
    match = _DURATION.fullmatch(text)
    number = float(match[1]) * _UNITS[match[2] or "s"] if match else 0.0
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: a number of seconds above 0, or such as 10s, 1m")
    return number


def status(arguments: argparse.Namespace) -> int:
    """Show on which nodes pods get their networks; exit status 1 if a daemon is not ready or does not answer."""
    import asyncio

    from multus_tools.kubectl import nodes, show

    def exit_status(answer: Answer) -> int:
        return status_of(answer, wrong=any(not node["ready"] for node in answer["nodes"]))

    async def look(cluster: Cluster) -> Answer:
        until = time.monotonic() + (arguments.wait_duration if arguments.wait else 0)
        while exit_status(answer := await nodes.status(cluster)) != DONE and time.monotonic() < until:
            cluster.notes.clear()
            await asyncio.sleep(_WAIT_SECONDS)
        return answer

    return exit_status(_ask(arguments, look, show.status, ("nodes", "node")))


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


def addresses(arguments: argparse.Namespace) -> int:
    """Show who holds shared addresses, or release some; exit status 1: a range is full, a node gone, or one is kept."""
    from multus_tools.kubectl import addresses, show

    of = {"node": arguments.node, "address": arguments.address}
    if arguments.release:
        return _release(arguments, of)
    if any(of.values()):
        arguments.output = arguments.output or "wide"
    answer = _ask(arguments, addresses.addresses, show.addresses, ("ranges", "range"), **of)
    lost = any(node["gone"] for item in answer["ranges"] for node in item["nodes"])
    return status_of(answer, wrong=lost or any(item["free"] == 0 for item in answer["ranges"]))


def _release(arguments: argparse.Namespace, of: dict[str, str]) -> int:
    from multus_tools.kubectl import addresses, show

    if all(of.values()) or not any(of.values()):
        raise CommandError("release: name --node or --address")

    def ask(confirmed: bool) -> Answer:
        return _ask(arguments, partial(addresses.release, confirmed=confirmed), show.released, **of)

    answer = ask(arguments.yes)
    if answer["dryRun"] and answer["released"] and sys.stdin.isatty():
        sys.stderr.write("Release them? [y/N] ")
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            answer = ask(True)
    return FAILED if answer["kept"] or (answer["dryRun"] and answer["released"]) else DONE


def bundle(arguments: argparse.Namespace) -> int:
    """Write an archive for a bug report; exit status 1 if a node does not answer or something is missing."""
    from multus_tools.bundle_file import CLUSTER_MAX_BYTES, written

    if arguments.output:
        raise CommandError("bundle writes an archive: -o json and --json have no effect; leave them out")
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
    """Return the exit status for an answer; `wrong`: True if the answer shows a problem."""
    if answer["unanswered"] and not answer["daemons"]:
        return command_line.NO_DAEMON
    return FAILED if wrong or answer["unanswered"] else DONE


def _ask(
    arguments: argparse.Namespace,
    look: Callable[..., Coroutine[Any, Any, Answer]],
    show: Callable[..., None],
    names: Sequence[str] = (),
    **query: str,
) -> Answer:
    """Print the answer of `look(Cluster, **query)`, and return it (`command_line.present`). Raises CommandError.

    If `namespace` in the query is empty, it becomes that of the flags, else of the context.
    """

    async def ask(cluster: Cluster) -> Answer:
        if not query.get("namespace", "-"):
            query["namespace"] = _namespace(arguments)
        return await look(cluster, **query)

    return command_line.present(arguments, lambda: _answer_of(arguments, ask), show, names)


def _answer_of(arguments: argparse.Namespace, ask: Callable[[Cluster], Coroutine[Any, Any, Answer]]) -> Answer:
    """Return the result of `ask` for the cluster that the flags name; show the progress. Raises CommandError."""
    import asyncio

    from multus_daemon.cluster.kube.client import ApiClient
    from multus_daemon.cluster.kube.errors import KubeError, NoAnswerError
    from multus_tools import terminal
    from multus_tools.kubectl.cluster import Cluster

    # `-w` asks again and again.
    progress = (lambda text: None) if arguments.watch else terminal.progress

    def on_progress(answered: int, asked: int) -> None:
        progress(f"asking nodes: {answered} of {asked} have answered")

    async def asked() -> Answer:
        async with ApiClient(_source(arguments)) as client:
            return await ask(Cluster(client, arguments.selector, arguments.timeout, on_progress))

    try:
        return asyncio.run(asked())
    except NoAnswerError as error:
        raise CommandError(
            f"the API server can't be asked: {error}; bring it back, or name another by --kubeconfig or --context"
        ) from error
    except KubeError as error:
        raise CommandError(str(error)) from error
    finally:
        progress("")


def _namespace(arguments: argparse.Namespace) -> str:
    """Return the namespace of the flags, else of the context; empty for all. Raises ConfigurationError."""
    from multus_daemon.cluster.kube.credentials import Kubeconfig

    if arguments.all_namespaces or arguments.namespace:
        return "" if arguments.all_namespaces else str(arguments.namespace)
    source = _source(arguments)
    return (source.namespace() if isinstance(source, Kubeconfig) else "") or "default"


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
    Command(
        "Show on which nodes pods get their networks; exit status 1 if a daemon is not ready or does not answer.",
        status,
        (
            *LIST,
            option("--wait", action="store_true", help="wait until every daemon is ready"),
            option("--wait-duration", metavar="TIME", type=seconds, default=_READY_SECONDS, help=_WAIT_HELP),
        ),
    ),
    Command("Show which pods lack networks, by cause; exit status 1 if there are any.", pods, (*LIST, ALL)),
    Command(
        "Explain why a pod lacks networks, and what to do; exit status 1 if it does.",
        why,
        (*ONE, option("pod", metavar="[NAMESPACE/]POD", help="default namespace: --namespace, or the context's")),
    ),
    Command(
        "Show which pods use each network, and which nodes can't serve it; exit status 1 if there are any.",
        networks,
        (*LIST, ALL, option("network", metavar="[NAMESPACE/]NETWORK", nargs="?", help="default: all networks")),
    ),
    Command(
        "Show the attachments that nothing will delete, on all nodes; exit status 1 if there are any.",
        leaks,
        (*LIST, ALL),
    ),
    Command(
        "Show who holds the addresses that the cluster shares, or release those of a node that is gone.",
        addresses,
        (
            *LIST,
            option("release", nargs="?", choices=("release",), help="free the addresses of --node, or --address"),
            option("--node", metavar="NAME", default="", help="only what this node holds"),
            option("--address", metavar="ADDRESS", default="", help="only this address"),
            option("--yes", action="store_true", help="release them; without it, only say which"),
        ),
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
"""The commands in the order of `--help`."""
