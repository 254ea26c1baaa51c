"""Answers of all nodes: `status`, `networks` and `leaks`; their formats are in docs/kubectl-multus.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.gojson import JsonError
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_tools.command_line import CommandError
from multus_tools.kubectl import causes
from multus_tools.kubectl.cluster import Answered, Cluster, Daemon, NodeReply, replies

_NODE_KEYS: Final = ("version", "ready", "gates", "degraded", "behind", "containers", "spooled", "leftovers", "broken")


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
    """Missing, as the next ones, in the answers of older daemons."""
    differences: list[_Difference] = msgspec.field(default_factory=list)
    degraded: dict[str, str] = msgspec.field(default_factory=dict)


async def status(cluster: Cluster) -> dict[str, Any]:
    """Return the state of the daemons of all nodes. Raises KubeError."""
    answers = await cluster.ask_all("status", kind=_Status)
    nodes = [
        {
            **daemon.at(),
            **{key: getattr(reply, key) for key in _NODE_KEYS},
            "differences": msgspec.to_builtins(reply.differences),
        }
        for daemon, reply in replies(answers)
    ]
    return cluster.answer("status", answers, nodes=nodes, errors=_errors(answers))


async def broken_of_pod(cluster: Cluster, daemon: Daemon, pod: str) -> list[str]:
    """Return the attachments of a pod that differ from their record. Add a note if the node does not answer."""
    answers = await cluster.ask([(daemon, ("status",))], _Status)
    cluster.notes += [
        f"cannot determine the pod's broken attachments: {item.problem}" for item in answers if item.problem
    ]
    return [
        f"network {item.network}, interface {item.interface}: {item.difference}"
        for _, reply in replies(answers)
        for item in reply.differences
        if item.pod == pod
    ]


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
    """Return users and missing plugins of networks; an empty `namespace` or `name` means all. Raises KubeError."""
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
    """Yield the types of its plugins and of the plugins that they call. Raises CniError, JsonError."""
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


class _Attachment(msgspec.Struct):
    network: str
    interface: str
    addresses: list[str]


class _Container(msgspec.Struct, rename="camel"):
    container: str
    pod: str
    since: float
    problem: str
    failed_deletes: int
    attachments: list[_Attachment]
    advice: str = ""
    """Missing in the answers of older daemons."""


class _Attachments(NodeReply):
    """Answer of `answers.attachments`."""

    SCHEMA = "multusctl.attachments/v1"
    containers: list[_Container]


async def leaks(cluster: Cluster, *, namespace: str) -> dict[str, Any]:
    """Return the leftovers of pods of `namespace`; empty: of all namespaces. Raises KubeError."""
    answers = await cluster.ask_all("attachments", "--leaks", kind=_Attachments)
    containers = [item for item in _containers(answers) if not namespace or item["pod"].startswith(f"{namespace}/")]
    if not containers:
        await cluster.require_namespace(namespace)
    return cluster.answer("leaks", answers, namespace=namespace, containers=containers)


async def leaks_of_pod(cluster: Cluster, daemon: Daemon, pod: str) -> list[dict[str, Any]]:
    """Return `containers` of a pod (`namespace/name`) on its node. Add a note if the node does not answer."""
    answers = await cluster.ask([(daemon, ("attachments", pod, "--leaks"))], _Attachments)
    cluster.notes += [f"cannot determine the pod's leftovers: {item.problem}" for item in answers if item.problem]
    return _containers(answers)


def _containers(answers: Iterable[Answered[_Attachments]]) -> list[dict[str, Any]]:
    return [
        {**daemon.at(), **msgspec.to_builtins(container)}
        for daemon, reply in replies(answers)
        for container in reply.containers
    ]
