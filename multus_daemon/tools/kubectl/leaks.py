"""What nobody will delete as it is, on all nodes.

{"schema": "kubectl-multus.leaks/v1", "daemons": <how many have answered>,
 "containers": [{"node": …, "daemon": …, "container": …, "pod": "default/web", "since": <Unix time>,
                 "problem": <why nobody will delete it>, "advice": <what to do>, "failedDeletes": 0,
                 "attachments": [{"network": …, "interface": …, "addresses": ["10.1.0.2/24"]}]}],
 "unanswered": [{"node": …, "daemon": …, "problem": …}], "notes": [<what could not be looked at>]}
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from multus_daemon.tools.kubectl.cluster import Answered, Cluster, Daemon, NodeReply, unanswered

SCHEMA: Final = "kubectl-multus.leaks/v1"
_NODE_SCHEMA: Final = "multusctl.attachments/v1"


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
    """Of daemons that give one."""


class _Reply(NodeReply):
    """As `diagnosis.attachments` has it."""

    containers: list[_Container]


async def look(cluster: Cluster, *, namespace: str) -> dict[str, Any]:
    """Ask all nodes about pods of `namespace`; empty: of all namespaces. Raise KubeError."""
    answers = await cluster.ask_all("attachments", "--leaks", kind=_Reply, schema=_NODE_SCHEMA)
    return {
        "schema": SCHEMA,
        "daemons": sum(item.reply is not None for item in answers),
        "containers": [
            item for item in _containers(answers) if not namespace or item["pod"].startswith(f"{namespace}/")
        ],
        "unanswered": unanswered(answers),
        "notes": cluster.notes,
    }


async def of_pod(cluster: Cluster, daemon: Daemon, pod: str) -> list[dict[str, Any]]:
    """Return `containers` of a pod (`namespace/name`) on its node. Add a note if the node does not answer."""
    answers = await cluster.ask([(daemon, ("attachments", pod, "--leaks"))], _Reply, _NODE_SCHEMA)
    cluster.notes += [f"what is left over of the pod is not known: {item.problem}" for item in answers if item.problem]
    return _containers(answers)


def _containers(answers: Iterable[Answered[_Reply]]) -> list[dict[str, Any]]:
    return [
        {**item.daemon.at(), **msgspec.to_builtins(container)}
        for item in answers
        if item.reply is not None
        for container in item.reply.containers
    ]
