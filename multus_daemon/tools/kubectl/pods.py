"""Which pods lack networks, by cause.

    {"schema": "kubectl-multus.pods/v1", "daemons": <how many have answered>,
     "pods": [{"pod": "default/web", "node": …, "lacks": ["default/blue", …], "cause": <short>, "text": <all of it>,
               "source": "explain", "request", "event", "annotation" or "daemon"}],
     "causes": [{"cause": …, "count": 3, "pods": ["default/web", …]}],
     "unanswered": [{"node": …, "daemon": …, "problem": …}], "notes": [<what could not be looked at>]}

Looked at are the pods that are on a node and have not finished, but for those of the host's network. One lacks what its
annotation asks for and its network-status does not have; one without any address, for which an Event tells of a
failure, lacks `(cluster network)`. The cause is in the pod's Events, as a rule; where it is not, the node is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon.tools.kubectl import causes, lacking
from multus_daemon.tools.kubectl.api_objects import EventObject, PodObject
from multus_daemon.tools.kubectl.causes import Cause, Explanation
from multus_daemon.tools.kubectl.cluster import Answered, Cluster, unanswered

SCHEMA: Final = "kubectl-multus.pods/v1"
CLUSTER_NETWORK: Final = "(cluster network)"


async def look(cluster: Cluster, *, namespace: str) -> dict[str, Any]:
    """`namespace`: of the pods; empty: all. Raises KubeError."""
    pods = [pod for pod in await cluster.pods(namespace) if _is_looked_at(pod)]
    events: dict[str, list[EventObject]] = {}
    for event in await cluster.events(namespace):
        events.setdefault(event.involved_object.uid, []).append(event)
    found: list[_Lacking] = []
    for pod in pods:
        networks = lacking.of(pod.metadata.namespace, pod.annotations)
        told = events.get(pod.metadata.uid, [])
        cause = causes.of_events(told, pod)
        if networks.problem:
            found.append(_Lacking(pod, networks.lacks, told, causes.of_annotation(networks.problem)))
        elif networks.lacks:
            found.append(_Lacking(pod, networks.lacks, told, cause))
        elif cause and not pod.status.pod_ip and not networks.attached:
            found.append(_Lacking(pod, (CLUSTER_NETWORK,), told, cause))
    answers = await _ask(cluster, [item for item in found if item.cause is None])
    return {
        "schema": SCHEMA,
        "daemons": len({item.daemon.node for item in answers if item.reply is not None}),
        "pods": [item.to_object() for item in found],
        "causes": _by_cause(found),
        "unanswered": [dict(fields) for fields in {tuple(item.items()): None for item in unanswered(answers)}],
        "notes": cluster.notes,
    }


@dataclass(slots=True)
class _Lacking:
    """A pod that lacks networks."""

    pod: PodObject
    lacks: tuple[str, ...]
    events: list[EventObject]
    cause: Cause | None
    """None: no Event tells of one."""

    def to_object(self) -> dict[str, Any]:
        """As the module's docstring has it."""
        assert self.cause is not None
        return {
            "pod": str(self.pod),
            "node": self.pod.spec.node_name,
            "lacks": list(self.lacks),
            "cause": self.cause.short,
            "text": self.cause.text,
            "source": self.cause.source,
        }


def _is_looked_at(pod: PodObject) -> bool:
    return bool(pod.spec.node_name) and not pod.spec.host_network and not pod.finished


async def _ask(cluster: Cluster, silent: Sequence[_Lacking]) -> list[Answered[Explanation]]:
    """Give each of them the cause that its node knows."""
    daemons = await cluster.daemons_of(item.pod.spec.node_name for item in silent)
    questions = [(daemons[item.pod.spec.node_name], ("explain", str(item.pod))) for item in silent]
    answers = await cluster.ask(questions, Explanation, causes.SCHEMA)
    for item, answer in zip(silent, answers, strict=True):
        item.cause = causes.verdict(answer.reply, item.events, item.pod, answer.daemon) or causes.no_daemon(
            answer.problem, answer.daemon, cluster.selector
        )
    return answers


def _by_cause(found: Sequence[_Lacking]) -> list[dict[str, Any]]:
    """The most frequent first."""
    pods: dict[str, list[str]] = {}
    for item in found:
        assert item.cause is not None
        pods.setdefault(item.cause.short, []).append(str(item.pod))
    return [
        {"cause": cause, "count": len(names), "pods": names}
        for cause, names in sorted(pods.items(), key=lambda entry: -len(entry[1]))
    ]
