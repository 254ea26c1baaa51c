"""Answers of all nodes: `status`, `networks` and `leaks`; their formats are in docs/kubectl-multus.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from multus_daemon.cluster.kube.taint import DEGRADED
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.gojson import JsonError
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_tools.command_line import CommandError
from multus_tools.kubectl import causes
from multus_tools.kubectl.cluster import Answered, Cluster, Daemon, NodeReply, replies

_NODE_KEYS: Final = (
    *("because", "version", "ready", "gates", "degraded", "behind"),
    *("containers", "spooled", "leftovers", "broken"),
)

ASKED_MAX: Final = 50
"""Nodes that are asked about a pod that no node takes; those that are not ready come first."""


class _Error(msgspec.Struct):
    verb: str
    code: int
    cause: str
    count: int
    last: float
    pod: str


class _Difference(msgspec.Struct):
    pod: str
    network: str
    interface: str
    difference: str


class _Status(NodeReply):
    """Answer of `answers.status`."""

    SCHEMA = "multusctl.status/v1"
    version: str
    ready: bool
    gates: dict[str, str]
    containers: int
    spooled: int
    leftovers: int
    errors: list[_Error]
    behind: dict[str, str] = msgspec.field(default_factory=dict)
    broken: int = 0
    """This key and the following ones are missing in the answers of older daemons."""
    differences: list[_Difference] = msgspec.field(default_factory=list)
    degraded: dict[str, str] = msgspec.field(default_factory=dict)
    pods_get_networks: str = msgspec.field(default="", name="podsGetNetworks")
    because: str = ""


async def status(cluster: Cluster) -> dict[str, Any]:
    """Return the state of the daemons of all nodes. Raises KubeError."""
    answers = await cluster.ask_all("status", kind=_Status)
    nodes = [
        {
            **daemon.at(),
            "podsGetNetworks": reply.pods_get_networks or ("yes" if reply.ready else "no"),
            **{key: getattr(reply, key) for key in _NODE_KEYS},
            "differences": msgspec.to_builtins(reply.differences),
        }
        for daemon, reply in replies(answers)
    ]
    return cluster.answer("status", answers, nodes=nodes, errors=_errors(answers))


async def without_networks(cluster: Cluster) -> list[tuple[Daemon, str]]:
    """Return the daemons of nodes that give pods no networks, or get no pods, and why.

    Asks at most ASKED_MAX. Raises KubeError.
    """
    daemons = sorted(await cluster.daemons(), key=lambda daemon: daemon.is_ready)
    answers = await cluster.ask([(daemon, ("status",)) for daemon in daemons[:ASKED_MAX]], _Status)
    found: list[tuple[Daemon, str]] = []
    for daemon, reply in replies(answers):
        if because := reply.because if reply.pods_get_networks == "no" else reply.degraded.get(DEGRADED, ""):
            found.append((daemon, because))
    return found


def _errors(answers: Iterable[Answered[_Status]]) -> list[dict[str, Any]]:
    """Return the errors of all nodes by cause, the most frequent first."""
    entries: dict[tuple[str, int, str], dict[str, Any]] = {}
    newest: dict[tuple[str, int, str], float] = {}
    for daemon, reply in replies(answers):
        for error in reply.errors:
            key = (error.verb, error.code, error.cause)
            start = {"verb": error.verb, "code": error.code, "cause": error.cause, "count": 0, "nodes": [], "pod": ""}
            entry = entries.setdefault(key, start)
            entry["count"] += error.count
            entry["nodes"].append(daemon.node)
            if error.last >= newest.get(key, 0.0):
                newest[key], entry["pod"] = error.last, error.pod
    return sorted(entries.values(), key=lambda entry: -entry["count"])


class _Plugin(msgspec.Struct):
    type: str
    problem: str


class _Plugins(NodeReply):
    """Answer of `multusctl plugins`."""

    SCHEMA = "multusctl.plugins/v1"
    plugins: list[_Plugin]


async def networks(cluster: Cluster, *, namespace: str, name: str) -> dict[str, Any]:
    """Return pods and missing plugins of networks; an empty `namespace` or `name` means all. Raises KubeError."""
    definitions = [item for item in await cluster.networks(namespace) if name in ("", item.name)]
    users: dict[str, list[str]] = {}
    for pod in await cluster.pods():
        if not pod.finished and not pod.spec.host_network:
            for network in {str(item) for item in causes.networks_of(pod.metadata.namespace, pod.annotations).wanted}:
                users.setdefault(network, []).append(str(pod))
    if not definitions:
        await cluster.require_namespace(namespace)
        if name:
            what = f"NetworkAttachmentDefinition {namespace}/{name}".replace(" /", " ")
            raise CommandError(f"there is no {what}; `kubectl multus networks -A` names all")
    answers = await cluster.ask_all("plugins", kind=_Plugins) if definitions else []
    found = [_network(item, users.get(str(item), []), answers) for item in definitions]
    return cluster.answer("networks", answers, namespace=namespace, networks=found)


def _network(
    item: NetworkAttachmentDefinition, pods: list[str], answers: Iterable[Answered[_Plugins]]
) -> dict[str, Any]:
    plugins: list[str] = []
    problem = ""
    try:
        plugins = list(dict.fromkeys(_plugins(item)))
    except (CniError, JsonError) as error:
        problem = str(error)
    return {
        "network": str(item),
        "problem": problem,
        "plugins": plugins,
        "onNodes": not item.config.strip(),
        "pods": pods,
        "missing": list(_missing(plugins, answers)),
    }


def _plugins(item: NetworkAttachmentDefinition) -> Iterator[str]:
    """Yield the types of the network's plugins, and of those that these call. Raises CniError, JsonError."""
    network = item.network
    for plugin in network.plugins if network else ():
        yield plugin.type
        for key in ("ipam", "delegate"):
            called = gojson.get(plugin.fields, key)
            kind = gojson.get(called, "type") if isinstance(called, dict) else None
            if isinstance(kind, str) and kind:
                yield kind


def _missing(plugins: Sequence[str], answers: Iterable[Answered[_Plugins]]) -> Iterator[dict[str, str]]:
    for daemon, reply in replies(answers):
        problems = {plugin.type: plugin.problem for plugin in reply.plugins}
        for name in plugins:
            if problem := problems.get(name, "is not on the node"):
                yield {"node": daemon.node, "plugin": name, "problem": problem}


class _Attachments(NodeReply):
    """Answer of `answers.attachments`."""

    SCHEMA = "multusctl.attachments/v1"
    containers: list[causes.Leftover]


async def leaks(cluster: Cluster, *, namespace: str) -> dict[str, Any]:
    """Return the leftovers of pods of `namespace`; empty: of all namespaces. Raises KubeError."""
    answers = await cluster.ask_all("attachments", "--leaks", kind=_Attachments)
    containers = [
        {**daemon.at(), **msgspec.to_builtins(item)}
        for daemon, reply in replies(answers)
        for item in reply.containers
        if not namespace or item.pod.startswith(f"{namespace}/")
    ]
    if not containers:
        await cluster.require_namespace(namespace)
    return cluster.answer("leaks", answers, namespace=namespace, containers=containers)
