"""Pods that lack networks: `pods` by cause, and `why` for one pod; their formats are in docs/kubectl-multus.md.

Finished pods, pods without a node and pods with `hostNetwork` are left out. A pod without an address whose Events name
a failure lacks `(cluster network)`. Usually an Event names the cause; otherwise the node's daemon is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from multus_daemon.answers import status
from multus_daemon.cluster.kube.errors import ApiError
from multus_daemon.spec.cni.errors import parted
from multus_tools.kubectl import causes, nodes
from multus_tools.kubectl.api_objects import EventObject, PodObject
from multus_tools.kubectl.causes import Cause, Explanation
from multus_tools.kubectl.cluster import Answered, Cluster, Daemon

CLUSTER_NETWORK: Final = "(cluster network)"
_EVENT_KEYS: Final = ("when", "type", "reason", "component", "message")
_SCHEDULER_REASON: Final = "FailedScheduling"
_TAINTED: Final = "untolerated taint"
"""The kubelet's taints of a node that is not ready, as for lack of a CNI configuration, and those of a new node."""


@dataclass(slots=True)
class Lacking:
    """A pod with requested networks that are not attached."""

    pod: PodObject
    lacks: Sequence[str]
    events: list[EventObject]
    cause: Cause | None
    """The cause in an Event; None if no Event names one."""


async def pods(cluster: Cluster, *, namespace: str) -> dict[str, Any]:
    """Return the pods of `namespace` that lack networks; empty: of all namespaces. Raises KubeError."""
    found = await all_lacking(cluster, namespace)
    silent = [item for item in found if item.cause is None]
    answers = await _explain(cluster, [item.pod for item in silent])
    for item, answer in zip(silent, answers, strict=True):
        item.cause = causes.verdict(answer, item.events, item.pod, cluster.selector)
    entries = []
    by_cause: dict[str, list[str]] = {}
    for item in found:
        assert item.cause is not None
        entry = {"pod": str(item.pod), "node": item.pod.spec.node_name, "lacks": list(item.lacks)}
        entries.append({**entry, "cause": item.cause.short, "text": item.cause.text, "source": item.cause.source})
        by_cause.setdefault(item.cause.short, []).append(str(item.pod))
    counted = [
        {"cause": cause, "count": len(names), "pods": names}
        for cause, names in sorted(by_cause.items(), key=lambda entry: -len(entry[1]))
    ]
    return cluster.answer("pods", answers, namespace=namespace, pods=entries, causes=counted)


async def all_lacking(cluster: Cluster, namespace: str) -> list[Lacking]:
    """Return the pods of `namespace` that lack networks; empty: of all namespaces. Raises KubeError."""
    looked_at = await cluster.pods(namespace)
    if not looked_at:
        await cluster.require_namespace(namespace)
    events: dict[str, list[EventObject]] = {}
    for event in await cluster.events(namespace):
        events.setdefault(event.involved_object.uid, []).append(event)
    return [item for pod in looked_at if (item := _lacking(pod, events.get(pod.metadata.uid, [])))]


def _lacking(pod: PodObject, events: list[EventObject]) -> Lacking | None:
    if not pod.spec.node_name or pod.spec.host_network or pod.finished:
        return None
    networks = causes.networks_of(pod.metadata.namespace, pod.annotations)
    if networks.problem:
        return Lacking(pod, networks.lacks, events, causes.of_annotation(networks.problem))
    cause = causes.of_events(events, pod)
    if networks.lacks:
        return Lacking(pod, networks.lacks, events, cause)
    if cause and not pod.status.pod_ip and not networks.attached:
        return Lacking(pod, (CLUSTER_NETWORK,), events, cause)
    return None


async def _explain(cluster: Cluster, pods: Sequence[PodObject]) -> list[Answered[Explanation]]:
    """Ask the daemons of the pods' nodes for `multusctl explain` of each pod."""
    known: dict[str, Daemon] = {}
    problem = "is not a Linux node of this cluster"
    try:
        known = {daemon.node: daemon for daemon in (await cluster.daemons() if pods else ())}
    except ApiError as error:
        if error.status != 403:
            raise
        problem = f"you may not look for its daemon: {error.message}"
    questions = []
    for pod in pods:
        node = pod.spec.node_name
        daemon = known.get(node, Daemon(node, problem=problem))
        questions.append((daemon, ("explain", str(pod))))
    return await cluster.ask(questions, Explanation)


async def why(cluster: Cluster, *, namespace: str, name: str) -> dict[str, Any]:
    """Return why a pod lacks networks. Raises KubeError."""
    pod = await cluster.pod(namespace, name)
    networks = causes.networks_of(namespace, pod.annotations)
    events = await cluster.events(namespace, pod=name, uid=pod.metadata.uid)
    found: dict[str, Any] = {
        "pod": str(pod),
        "node": pod.spec.node_name,
        "daemon": "",
        **dict.fromkeys(("cause", "text", "source", "advice"), ""),
        "lacks": list(networks.lacks),
        "attached": list(networks.attached),
        "compared": 0,
        **{key: [] for key in ("differences", "leftovers", "steps", "requests")},
        "events": [
            {**{key: getattr(event, key) for key in _EVENT_KEYS}, "count": event.count or 1} for event in events
        ],
    }
    answers: list[Answered[Explanation]] = []
    if pod.spec.host_network and networks.lacks:
        found |= Cause(status.ON_HOST, "pod", status.LEAVE_HOST).to_object()
    elif pod.spec.host_network:
        cluster.notes.append(status.ON_HOST)
    elif pod.finished:
        cluster.notes.append(f"the pod has finished ({pod.state()}): its networks are gone")
        found["lacks"] = []
    elif not pod.spec.node_name:
        found |= (await _unscheduled(cluster, pod, events)).to_object()
    elif networks.problem:
        found |= causes.of_annotation(networks.problem).to_object()
    else:
        answers = await _explain(cluster, [pod])
        found |= _facts(cluster, pod, networks, events, answers[0])
    return cluster.answer("why", answers, **found)


async def _unscheduled(cluster: Cluster, pod: PodObject, events: Sequence[EventObject]) -> Cause:
    """Return why the pod is on no node: in the daemon's words, if the scheduler passes over a node for its sake."""
    messages = [f": {event.message}" for event in events if event.reason == _SCHEDULER_REASON]
    text = f"the pod is on no node yet{''.join(messages[-1:])}"
    for daemon, because in await nodes.without_networks(cluster) if _TAINTED in text else ():
        cause, advice = parted(because)
        return Cause(f"node {daemon.node}: {cause}; {text}", "daemon", advice or causes.describe(pod))
    return Cause(text, "pod", causes.describe(pod))


def _facts(
    cluster: Cluster,
    pod: PodObject,
    networks: causes.Networks,
    events: Sequence[EventObject],
    answered: Answered[Explanation],
) -> dict[str, Any]:
    """Return the keys of the answer of `why` that come from the pod's node."""
    reply, daemon = answered.reply, answered.daemon
    facts: dict[str, Any] = daemon.at()
    differences: list[causes.Difference] = []
    if reply:
        # KubeVirt, for one, renames interfaces; and some plugins' CHECK fails right after their own ADD.
        differences = [item for item in reply.differences if item.certain and not item.by_pod]
        cluster.notes += [str(item) for item in reply.differences if item not in differences]
        cluster.notes += [f"a container was not compared with the kernel: {it.problem}" for it in reply.passed_over]
        facts |= {"compared": reply.compared, "differences": [str(item) for item in differences]}
    # A pod that is being deleted counts as wrong: users ask because it does not go.
    wrong = networks.lacks or pod.metadata.deletion_timestamp
    if wrong or not (pod.status.pod_ip or (reply and reply.attached)):
        facts |= causes.verdict(answered, events, pod, cluster.selector).to_object()
    elif noticed := causes.of_key(pod.annotations) or causes.of_notices(events, pod, daemon):
        facts |= noticed.to_object()
    elif differences:
        facts |= causes.of_broken(differences, pod, daemon).to_object()
    elif reply is not None and not reply.attached:
        cluster.notes.append("nothing of it is on record: it was started without Multus, or by another daemon")
    elif reply is not None and reply.problem:
        cluster.notes.append(f"attached, but an ADD of a new container would fail: {reply.problem}")
    if reply is None:
        return facts
    # Leftovers of earlier containers of a pod of this name may keep the pod from starting.
    leftovers = [{**daemon.at(), **msgspec.to_builtins(item)} for item in reply.leftovers]
    return {**facts, "leftovers": leftovers, "steps": msgspec.to_builtins(reply.steps), "requests": reply.requests}
