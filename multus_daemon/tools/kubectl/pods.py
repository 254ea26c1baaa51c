"""Pods that lack networks, by cause.

    {"schema": "kubectl-multus.pods/v1", "daemons": <number that answered>,
     "pods": [{"pod": "default/web", "node": …, "lacks": ["default/blue", …], "cause": <short>, "text": <all of it>,
               "source": "explain", "request", "event", "annotation" or "daemon"}],
     "causes": [{"cause": …, "count": 3, "pods": ["default/web", …]}],
     "unanswered": [{"node": …, "daemon": …, "problem": …}], "notes": [<what could not be looked at>]}

Only unfinished pods on a node are looked at, and none of the host's network. A pod lacks the networks that its
annotation asks for and its network-status does not have. A pod without an address whose Events name a failure lacks
`(cluster network)`. Usually an Event names the cause; otherwise the node is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon.tools.kubectl import causes, lacking
from multus_daemon.tools.kubectl.api_objects import EventObject, PodObject
from multus_daemon.tools.kubectl.causes import Cause, Explanation
from multus_daemon.tools.kubectl.cluster import Answered, Cluster

SCHEMA: Final = "kubectl-multus.pods/v1"
CLUSTER_NETWORK: Final = "(cluster network)"


@dataclass(slots=True)
class _Lacking:
    """A pod that lacks networks."""

    pod: PodObject
    lacks: Sequence[str]
    events: list[EventObject]
    cause: Cause | None
    """None: no Event names one."""


async def look(cluster: Cluster, *, namespace: str) -> dict[str, Any]:
    """Look at the pods of `namespace`; empty: at all. Raises KubeError."""
    pods = await cluster.pods(namespace)
    events: dict[str, list[EventObject]] = {}
    for event in await cluster.events(namespace):
        events.setdefault(event.involved_object.uid, []).append(event)
    found = [item for pod in pods if (item := _lacking(pod, events.get(pod.metadata.uid, [])))]
    answers = await _ask(cluster, [item for item in found if item.cause is None])
    entries = []
    pods_by_cause: dict[str, list[str]] = {}
    for item in found:
        assert item.cause is not None
        name, cause = str(item.pod), item.cause.short
        entries.append(
            {
                "pod": name,
                "node": item.pod.spec.node_name,
                "lacks": list(item.lacks),
                "cause": cause,
                "text": item.cause.text,
                "source": item.cause.source,
            }
        )
        pods_by_cause.setdefault(cause, []).append(name)
    by_cause = [
        {"cause": cause, "count": len(names), "pods": names}
        for cause, names in sorted(pods_by_cause.items(), key=lambda entry: -len(entry[1]))
    ]
    return cluster.answer(SCHEMA, answers, pods=entries, causes=by_cause)


def _lacking(pod: PodObject, events: list[EventObject]) -> _Lacking | None:
    if not pod.spec.node_name or pod.spec.host_network or pod.finished:
        return None
    networks = lacking.of(pod.metadata.namespace, pod.annotations)
    if networks.problem:
        return _Lacking(pod, networks.lacks, events, causes.of_annotation(networks.problem))
    cause = causes.of_events(events, pod)
    if networks.lacks:
        return _Lacking(pod, networks.lacks, events, cause)
    if cause and not pod.status.pod_ip and not networks.attached:
        return _Lacking(pod, (CLUSTER_NETWORK,), events, cause)
    return None


async def _ask(cluster: Cluster, silent: Sequence[_Lacking]) -> list[Answered[Explanation]]:
    """Ask the nodes of these pods for the cause, and set it."""
    daemons = await cluster.daemons_of(item.pod.spec.node_name for item in silent)
    questions = [(daemons[item.pod.spec.node_name], ("explain", str(item.pod))) for item in silent]
    answers = await cluster.ask(questions, Explanation)
    for item, answer in zip(silent, answers, strict=True):
        item.cause = causes.verdict(answer, item.events, item.pod, cluster.selector)
    return answers
