"""State of the daemons of all nodes.

    {"schema": "kubectl-multus.status/v1", "daemons": <number that answered>,
     "nodes": [{"node": …, "daemon": "kube-system/kube-multus-ds-x", "version": …, "ready": true,
                "gates": {<name of a closed gate>: <reason>}, "containers": 12, "spooled": 0, "leftovers": 0}],
     "errors": [{"verb": "ADD", "code": 7, "cause": …, "count": 3, "nodes": [<names>], "pod": <the last one>}],
     "unanswered": [{"node": …, "daemon": …, "problem": …}], "notes": [<what could not be looked at>]}

`nodes` has those that answered. If `multusctl` runs and the daemon does not, the node is not ready, with the gate
`daemon`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from multus_daemon.tools.kubectl.cluster import Answered, Cluster, NodeReply, replies

SCHEMA: Final = "kubectl-multus.status/v1"
_NODE_KEYS: Final = ("version", "ready", "gates", "containers", "spooled", "leftovers")


class _Error(msgspec.Struct):
    verb: str
    code: int
    cause: str
    count: int
    last: float
    pod: str


class _Reply(NodeReply):
    """Answer of `diagnosis.status`."""

    SCHEMA = "multusctl.status/v1"
    version: str
    ready: bool
    gates: dict[str, str]
    containers: int
    spooled: int
    leftovers: int
    errors: list[_Error]


async def look(cluster: Cluster) -> dict[str, Any]:
    """Ask all nodes. Raises KubeError."""
    answers = await cluster.ask_all("status", kind=_Reply)
    nodes = [{**daemon.at(), **{key: getattr(reply, key) for key in _NODE_KEYS}} for daemon, reply in replies(answers)]
    return cluster.answer(SCHEMA, answers, nodes=nodes, errors=_errors(answers))


def _errors(answers: Iterable[Answered[_Reply]]) -> list[dict[str, Any]]:
    """Return the errors of all nodes by cause, the most frequent first."""
    causes: dict[tuple[str, int, str], dict[str, Any]] = {}
    newest: dict[tuple[str, int, str], float] = {}
    for daemon, reply in replies(answers):
        for error in reply.errors:
            key = (error.verb, error.code, error.cause)
            start = {"verb": error.verb, "code": error.code, "cause": error.cause, "count": 0, "nodes": [], "pod": ""}
            entry = causes.setdefault(key, start)
            entry["count"] += error.count
            entry["nodes"].append(daemon.node)
            if error.last >= newest.get(key, 0.0):
                newest[key], entry["pod"] = error.last, error.pod
    return sorted(causes.values(), key=lambda entry: -entry["count"])
