"""Pods that lack networks: `pods` by cause, and `why` for one pod; their formats are in docs/kubectl-multus.md.

Only unfinished pods on a node are looked at, and none of the host's network. A pod without an address whose Events name
a failure lacks `(cluster network)`. Usually an Event names the cause; otherwise the node is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from multus_daemon.cluster.kube.errors import ApiError
from multus_tools.kubectl import causes, nodes
from multus_tools.kubectl.api_objects import EventObject, PodObject
from multus_tools.kubectl.causes import Cause, Explanation, Step
from multus_tools.kubectl.cluster import Answered, Cluster, Daemon, NodeReply, replies

CLUSTER_NETWORK: Final = "(cluster network)"
_REQUESTS: Final = "5"
_EVENT_KEYS: Final = ("when", "type", "reason", "component", "message")
_SCHEDULER_REASON: Final = "FailedScheduling"


@dataclass(slots=True)
class _Lacking:
    """A pod with requested networks that are not attached."""

    pod: PodObject
    lacks: Sequence[str]
    events: list[EventObject]
    cause: Cause | None
    """If None, no Event names one."""


async def pods(cluster: Cluster, *, namespace: str) -> dict[str, Any]:
    """Return the pods of `namespace` that lack networks; empty: of all namespaces. Raises KubeError."""
    found = await _all_lacking(cluster, namespace)
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


async def lacking(cluster: Cluster, namespace: str) -> list[tuple[str, str]]:
    """Return namespace and name of each pod of `namespace` that lacks networks, as `pods` does. Raises KubeError."""
    found = await _all_lacking(cluster, namespace)
    return [(item.pod.metadata.namespace, item.pod.metadata.name) for item in found]


async def _all_lacking(cluster: Cluster, namespace: str) -> list[_Lacking]:
    looked_at = await cluster.pods(namespace)
    if not looked_at:
        await cluster.require_namespace(namespace)
    events: dict[str, list[EventObject]] = {}
    for event in await cluster.events(namespace):
        events.setdefault(event.involved_object.uid, []).append(event)
    return [item for pod in looked_at if (item := _lacking(pod, events.get(pod.metadata.uid, [])))]


def _lacking(pod: PodObject, events: list[EventObject]) -> _Lacking | None:
    if not pod.spec.node_name or pod.spec.host_network or pod.finished:
        return None
    networks = causes.networks_of(pod.metadata.namespace, pod.annotations)
    if networks.problem:
        return _Lacking(pod, networks.lacks, events, causes.of_annotation(networks.problem))
    cause = causes.of_events(events, pod)
    if networks.lacks:
        return _Lacking(pod, networks.lacks, events, cause)
    if cause and not pod.status.pod_ip and not networks.attached:
        return _Lacking(pod, (CLUSTER_NETWORK,), events, cause)
    return None


async def _explain(cluster: Cluster, pods: Sequence[PodObject]) -> list[Answered[Explanation]]:
    """Ask the nodes of the pods what an ADD would attach."""
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


class _Error(msgspec.Struct):
    text: str


class _Request(msgspec.Struct):
    verb: str
    began: float
    seconds: float | None
    error: _Error | None
    steps: list[Step]


class _Trace(NodeReply):
    """Answer of `answers.status.trace`."""

    SCHEMA = "multusctl.trace/v1"
    requests: list[_Request]


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
        "leftovers": [],
        "steps": [],
        "requests": [],
        "events": [
            {**{key: getattr(event, key) for key in _EVENT_KEYS}, "count": event.count or 1} for event in events
        ],
    }
    answers: list[Answered[Explanation]] = []
    if pod.spec.host_network:
        cluster.notes.append("the pod is in the host's network: Multus is not asked")
        found["lacks"] = []
    elif pod.finished:
        cluster.notes.append(f"the pod has finished ({pod.state()}): its networks are gone")
        found["lacks"] = []
    elif not pod.spec.node_name:
        found |= _not_scheduled(pod, events).to_object()
    elif networks.problem:
        found |= causes.of_annotation(networks.problem).to_object()
    else:
        answers = await _explain(cluster, [pod])
        found |= await _facts(cluster, pod, networks, events, answers[0])
    return cluster.answer("why", answers, **found)


def _not_scheduled(pod: PodObject, events: Sequence[EventObject]) -> Cause:
    messages = [event.message for event in events if event.reason == _SCHEDULER_REASON]
    why = f": {messages[-1]}" if messages else ""
    advice = f"kubectl -n {pod.metadata.namespace} describe pod {pod.metadata.name}"
    return Cause(f"the pod is on no node yet{why}", "pod", advice)


async def _facts(
    cluster: Cluster,
    pod: PodObject,
    networks: causes.Networks,
    events: Sequence[EventObject],
    answered: Answered[Explanation],
) -> dict[str, Any]:
    """Return the keys of the answer that the pod's node knows."""
    reply = answered.reply
    facts: dict[str, Any] = answered.daemon.at()
    # A pod that is being deleted counts as wrong: users ask because it does not go.
    wrong = networks.lacks or pod.metadata.deletion_timestamp
    if wrong or not (reply.attached if reply else pod.status.pod_ip):
        facts |= causes.verdict(answered, events, pod, cluster.selector).to_object()
    elif noticed := causes.of_key(pod.annotations) or causes.of_notices(events, pod, answered.daemon):
        facts |= noticed.to_object()
    elif reply and (broken := await nodes.broken_of_pod(cluster, answered.daemon, str(pod))):
        facts |= causes.of_broken(broken, pod, answered.daemon).to_object()
    elif reply is not None and reply.problem:
        cluster.notes.append(f"attached, but an ADD of a new container would fail: {reply.problem}")
    if reply is None:
        return facts
    # Leftovers of earlier containers of a pod of this name may keep the pod from starting.
    last = ("trace", str(pod), "--last", _REQUESTS)
    traced, leftovers = await asyncio.gather(
        cluster.ask([(answered.daemon, last)], _Trace), nodes.leaks_of_pod(cluster, answered.daemon, str(pod))
    )
    requests = [
        {
            "verb": item.verb,
            "began": item.began,
            "seconds": item.seconds,
            "error": item.error.text if item.error else "",
            "step": item.steps[-1].what if item.steps else "",
        }
        for _, trace in replies(traced)
        for item in trace.requests
    ]
    return {**facts, "leftovers": leftovers, "steps": msgspec.to_builtins(reply.steps), "requests": requests}
