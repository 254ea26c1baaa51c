"""How the daemons of all nodes are.

    {"schema": "kubectl-multus.status/v1", "daemons": <how many have answered>,
     "nodes": [{"node": …, "daemon": "kube-system/kube-multus-ds-x", "version": …, "ready": true,
                "gates": {<name of a closed gate>: <reason>}, "containers": 12, "spooled": 0, "leftovers": 0}],
     "errors": [{"verb": "ADD", "code": 7, "cause": …, "count": 3, "nodes": [<names>], "pod": <the last one>}],
     "unanswered": [{"node": …, "daemon": …, "problem": …}], "notes": [<what could not be looked at>]}

`nodes` has those that have answered; a daemon that does not run while `multusctl` does counts as not ready, with the
gate `daemon`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from multus_daemon.tools.kubectl.cluster import Answered, Cluster, NodeReply, unanswered

SCHEMA: Final = "kubectl-multus.status/v1"
_NODE_SCHEMA: Final = "multusctl.status/v1"


class _Error(msgspec.Struct):
    verb: str
    code: int
    cause: str
    count: int
    last: float
    pod: str


class _Reply(NodeReply):
    """As `diagnosis.status` has it."""

    version: str
    ready: bool
    gates: dict[str, str]
    containers: int
    spooled: int
    leftovers: int
    errors: list[_Error]


async def look(cluster: Cluster) -> dict[str, Any]:
    """Raises KubeError."""
    answers = await cluster.ask_all("status", kind=_Reply, schema=_NODE_SCHEMA)
    nodes = [_node(item) for item in answers if item.reply is not None]
    return {
        "schema": SCHEMA,
        "daemons": len(nodes),
        "nodes": nodes,
        "errors": _errors(answers),
        "unanswered": unanswered(answers),
        "notes": cluster.notes,
    }


def _node(item: Answered[_Reply]) -> dict[str, Any]:
    assert item.reply is not None
    keys = ("version", "ready", "gates", "containers", "spooled", "leftovers")
    return {**item.daemon.at(), **{key: getattr(item.reply, key) for key in keys}}


def _errors(answers: Iterable[Answered[_Reply]]) -> list[dict[str, Any]]:
    """Of all nodes by cause, the most frequent first."""
    found: dict[tuple[str, int, str], dict[str, Any]] = {}
    newest: dict[tuple[str, int, str], float] = {}
    for item in answers:
        for error in item.reply.errors if item.reply else ():
            key = (error.verb, error.code, error.cause)
            start = {"verb": error.verb, "code": error.code, "cause": error.cause, "count": 0, "nodes": [], "pod": ""}
            entry = found.setdefault(key, start)
            entry["count"] += error.count
            entry["nodes"].append(item.daemon.node)
            if error.last >= newest.get(key, 0.0):
                newest[key], entry["pod"] = error.last, error.pod
    return sorted(found.values(), key=lambda entry: -entry["count"])
