"""Pods that use each network, and nodes that can't serve it.

    {"schema": "kubectl-multus.networks/v1", "daemons": <number that answered>,
     "networks": [{"network": "default/blue", "problem": <why its configuration can't be used; empty: it can be read>,
                   "plugins": ["bridge", "host-local"], "onNodes": false, "pods": ["default/web", …],
                   "missing": [{"node": …, "plugin": …, "problem": …}]}],
     "unanswered": [{"node": …, "daemon": …, "problem": …}], "notes": [<what could not be looked at>]}

`pods` are the unfinished pods that ask for the network, scheduled or not. `onNodes`: the definition has no
configuration, each node has one in a file of its own. `missing`: plugins of the network that a node does not have or
can't run, of the nodes that answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.gojson import JsonError
from multus_daemon.spec.nad.definition import NetworkAttachmentDefinition
from multus_daemon.tools.kubectl import lacking
from multus_daemon.tools.kubectl.api_objects import PodObject
from multus_daemon.tools.kubectl.cluster import Answered, Cluster, NodeReply, replies

SCHEMA: Final = "kubectl-multus.networks/v1"


class _Plugin(msgspec.Struct):
    type: str
    problem: str


class _Reply(NodeReply):
    """Answer of `diagnosis.plugins`."""

    SCHEMA = "multusctl.plugins/v1"
    plugins: list[_Plugin]


async def look(cluster: Cluster, *, namespace: str, name: str) -> dict[str, Any]:
    """Look at the networks of `namespace`, or at one of the name `name`; empty: all. Raises KubeError."""
    networks = [item for item in await cluster.networks(namespace) if name in ("", item.name)]
    users = _users(await cluster.pods())
    answers = await cluster.ask_all("plugins", kind=_Reply) if networks else []
    found = [_network(item, users.get(str(item), []), answers) for item in networks]
    return cluster.answer(SCHEMA, answers, networks=found)


def _users(pods: Iterable[PodObject]) -> dict[str, list[str]]:
    """Return the pods by the network that they ask for."""
    users: dict[str, list[str]] = {}
    for pod in pods:
        if not pod.finished and not pod.spec.host_network:
            for network in {str(item) for item in lacking.of(pod.metadata.namespace, pod.annotations).wanted}:
                users.setdefault(network, []).append(str(pod))
    return users


def _network(item: NetworkAttachmentDefinition, pods: list[str], answers: Iterable[Answered[_Reply]]) -> dict[str, Any]:
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


def _missing(plugins: Sequence[str], answers: Iterable[Answered[_Reply]]) -> Iterator[dict[str, str]]:
    for daemon, reply in replies(answers):
        problems = {plugin.type: plugin.problem for plugin in reply.plugins}
        for name in plugins:
            if problem := problems.get(name, "is not on the node"):
                yield {"node": daemon.node, "plugin": name, "problem": problem}
