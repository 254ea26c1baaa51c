"""`kubectl multus why`: why a pod has not got its networks, and what to do."""

from __future__ import annotations

import argparse
import functools

from multus_daemon.tools.kubectl.commands import common


def add_to(groups: common.Groups) -> None:
    """Declare it."""
    meaning = "say why a pod has not got its networks, and what to do; exit status 1 where it has not"
    parser = common.command(groups, "why", meaning, run)
    parser.add_argument("pod", metavar="[NAMESPACE/]POD", help="default namespace: --namespace, else the context's")


def run(arguments: argparse.Namespace) -> int:
    """Raises CommandError."""
    from multus_daemon.tools.kubectl import show, why

    namespace, slash, name = arguments.pod.rpartition("/")
    if not name or "/" in namespace or (slash and not namespace):
        raise common.CommandError(f"{arguments.pod!r} is not of the form [NAMESPACE/]POD")
    namespace = namespace or arguments.namespace or _of_context(arguments)
    found = common.ask(arguments, functools.partial(why.look, namespace=namespace, name=name), show.why)
    return common.FAILED if found["cause"] or found["lacks"] else common.DONE


def _of_context(arguments: argparse.Namespace) -> str:
    """The namespace that the kubeconfig's context names. Raises CommandError."""
    from multus_daemon.cluster.kube.credentials import Kubeconfig
    from multus_daemon.cluster.kube.errors import ConfigurationError

    source = common.source(arguments)
    try:
        return (source.namespace() if isinstance(source, Kubeconfig) else "") or "default"
    except ConfigurationError as error:
        raise common.CommandError(str(error)) from error
