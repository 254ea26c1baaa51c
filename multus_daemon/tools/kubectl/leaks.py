"""Networks that nobody will delete, on all nodes.

{"schema": "kubectl-multus.leaks/v1", "daemons": <number that answered>,
 "containers": [{"node": …, "daemon": …, "container": …, "pod": "default/web", "since": <Unix time>,
                 "problem": <why nobody will delete it>, "advice": <what to do>, "failedDeletes": 0,
                 "attachments": [{"network": …, "interface": …, "addresses": ["10.1.0.2/24"]}]}],
 "unanswered": [{"node": …, "daemon": …, "problem": …}], "notes": [<what could not be looked at>]}
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from multus_daemon.tools.kubectl.cluster import Answered, Cluster, Daemon, NodeReply, replies

SCHEMA: Final = "kubectl-multus.leaks/v1"


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


class _Reply(NodeReply):
    """Answer of `diagnosis.attachments`."""

    SCHEMA = "multusctl.attachments/v1"
    containers: list[_Container]


async def look(cluster: Cluster, *, namespace: str) -> dict[str, Any]:
    """Ask all nodes about pods of `namespace`; empty: of all namespaces. Raises KubeError."""
    answers = await cluster.ask_all("attachments", "--leaks", kind=_Reply)
    of_namespace = [item for item in _containers(answers) if not namespace or item["pod"].startswith(f"{namespace}/")]
    return cluster.answer(SCHEMA, answers, containers=of_namespace)


async def of_pod(cluster: Cluster, daemon: Daemon, pod: str) -> list[dict[str, Any]]:
    """Return `containers` of a pod (`namespace/name`) on its node. Add a note if the node does not answer."""
    answers = await cluster.ask([(daemon, ("attachments", pod, "--leaks"))], _Reply)
    cluster.notes += [f"what is left over of the pod is not known: {item.problem}" for item in answers if item.problem]
    return _containers(answers)


def _containers(answers: Iterable[Answered[_Reply]]) -> list[dict[str, Any]]:
    return [
        {**daemon.at(), **msgspec.to_builtins(container)}
        for daemon, reply in replies(answers)
        for container in reply.containers
    ]
