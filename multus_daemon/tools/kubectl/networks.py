"""Who uses each network, and which nodes can't serve it.

    {"schema": "kubectl-multus.networks/v1", "daemons": <how many have answered>,
     "networks": [{"network": "default/blue", "problem": <why its configuration can't be used; empty: it can be read>,
                   "plugins": ["bridge", "host-local"], "onNodes": false, "pods": ["default/web", …],
                   "missing": [{"node": …, "plugin": …, "problem": …}]}],
     "unanswered": [{"node": …, "daemon": …, "problem": …}], "notes": [<what could not be looked at>]}

`pods` are those that ask for it, on a node or not yet, and have not finished. `onNodes`: the definition has no
configuration, each node has one in a file of its own. `missing`: a plugin of the network that a node does not have, or
can't run; of nodes that have answered.
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
from multus_daemon.tools.kubectl.cluster import Answered, Cluster, NodeReply, unanswered

SCHEMA: Final = "kubectl-multus.networks/v1"
_NODE_SCHEMA: Final = "multusctl.plugins/v1"


class _Plugin(msgspec.Struct):
    type: str
    problem: str


class _Reply(NodeReply):
    """As `diagnosis.plugins` has it."""

    plugins: list[_Plugin]


async def look(cluster: Cluster, *, namespace: str, name: str) -> dict[str, Any]:
    """`namespace`: of the networks; `name`: of the one alone; empty: all. Raises KubeError."""
    networks = [item for item in await cluster.networks(namespace) if name in ("", item.name)]
    users = _users(await cluster.pods())
    answers = await cluster.ask_all("plugins", kind=_Reply, schema=_NODE_SCHEMA) if networks else []
    return {
        "schema": SCHEMA,
        "daemons": sum(item.reply is not None for item in answers),
        "networks": [_network(item, users.get(str(item), []), answers) for item in networks],
        "unanswered": unanswered(answers),
        "notes": cluster.notes,
    }


def _users(pods: Iterable[PodObject]) -> dict[str, list[str]]:
    """Pods by the network that they ask for."""
    found: dict[str, list[str]] = {}
    for pod in pods:
        if not pod.finished and not pod.spec.host_network:
            for network in {str(item) for item in lacking.of(pod.metadata.namespace, pod.annotations).wanted}:
                found.setdefault(network, []).append(str(pod))
    return found


def _network(
    item: NetworkAttachmentDefinition, pods: Sequence[str], answers: Iterable[Answered[_Reply]]
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
        "pods": list(pods),
        "missing": list(_missing(plugins, answers)),
    }


def _plugins(item: NetworkAttachmentDefinition) -> Iterator[str]:
    """Types of its plugins, and of those that they call. Raises CniError, JsonError."""
    network = item.network
    for plugin in network.plugins if network else ():
        yield plugin.type
        for key in ("ipam", "delegate"):
            called = gojson.get(plugin.fields, key)
            kind = gojson.get(called, "type") if isinstance(called, dict) else None
            if isinstance(kind, str) and kind:
                yield kind


def _missing(plugins: Sequence[str], answers: Iterable[Answered[_Reply]]) -> Iterator[dict[str, str]]:
    for answer in answers:
        if answer.reply is None:
            continue
        problems = {plugin.type: plugin.problem for plugin in answer.reply.plugins}
        for name in plugins:
            if problem := problems.get(name, "is not on the node"):
                yield {"node": answer.daemon.node, "plugin": name, "problem": problem}
