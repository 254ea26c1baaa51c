"""Why a pod has not got its networks, and what to do.

    {"schema": "kubectl-multus.why/v1", "pod": "default/web", "node": …, "daemon": "kube-system/kube-multus-ds-x",
     "daemons": <1: the node's has answered, else 0>,
     "cause": <short; empty: nothing is wrong with its networks>, "text": <all of it>,
     "source": "explain", "request", "event", "annotation", "pod" or "daemon"; empty: there is no cause,
     "advice": <what to do>, "lacks": ["default/blue", …], "attached": ["default/green@net1", …],
     "leftovers": [<containers of the pod before, whose networks are not free: as `leaks` has them>],
     "steps": [{"what": …, "result": …, "problem": …}],
     "requests": [{"verb": "ADD", "began": <Unix time>, "seconds": <null: it runs>, "error": <empty: none>,
                   "step": <the last one>}],
     "events": [{"when": <as the API writes it>, "type": "Warning", "reason": …, "component": …, "message": …,
                 "count": 3}],
     "unanswered": [{"node": …, "daemon": …, "problem": …}], "notes": [<what could not be looked at>]}

`steps` are those of `multusctl explain`, `requests` the last ones of `multusctl trace`, `events` the pod's, the oldest
first; the daemon's own have the component `multus`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from multus_daemon.cluster.kube.errors import ApiError, ApiUnavailableError
from multus_daemon.tools.kubectl import causes, lacking, leaks
from multus_daemon.tools.kubectl.api_objects import EventObject, PodObject
from multus_daemon.tools.kubectl.causes import Cause, Explanation
from multus_daemon.tools.kubectl.cluster import Cluster, Daemon, NodeReply, unanswered

SCHEMA: Final = "kubectl-multus.why/v1"
_TRACE_SCHEMA: Final = "multusctl.trace/v1"
_REQUESTS: Final = 5
_SCHEDULER_REASON: Final = "FailedScheduling"


class _Error(msgspec.Struct):
    text: str


class _Step(msgspec.Struct):
    what: str


class _Request(msgspec.Struct):
    verb: str
    began: float
    seconds: float | None
    error: _Error | None
    steps: list[_Step]


class _Trace(NodeReply):
    """As `diagnosis.status.trace` has it."""

    requests: list[_Request]


async def look(cluster: Cluster, *, namespace: str, name: str) -> dict[str, Any]:
    """Raises KubeError."""
    try:
        pod = await cluster.pod(namespace, name)
    except ApiError as error:
        if error.status != 404:
            raise
        raise ApiUnavailableError(f"there is no pod {namespace}/{name}") from error
    networks = lacking.of(namespace, pod.annotations)
    events = await cluster.events(namespace, pod=name, uid=pod.metadata.uid)
    answer: dict[str, Any] = {
        "schema": SCHEMA,
        "pod": str(pod),
        "node": pod.spec.node_name,
        "daemon": "",
        "daemons": 0,
        **_of_cause(None),
        "lacks": list(networks.lacks),
        "attached": list(networks.attached),
        "leftovers": [],
        "steps": [],
        "requests": [],
        "events": [_event(event) for event in events],
        "unanswered": [],
        "notes": cluster.notes,
    }
    if cause := _without_node(pod, networks, events):
        return answer | _of_cause(cause)
    if pod.spec.host_network:
        answer["notes"] = [*cluster.notes, "the pod is in the host's network: Multus is not asked"]
        return answer | {"lacks": []}
    if pod.finished:
        answer["notes"] = [*cluster.notes, f"the pod has finished ({pod.state()}): it has no networks any more"]
        return answer | {"lacks": []}
    return answer | await _asked(cluster, pod, networks, events)


def _without_node(pod: PodObject, networks: lacking.Networks, events: Sequence[EventObject]) -> Cause | None:
    """What need not be asked of the node."""
    if pod.spec.host_network or pod.finished:
        return None
    if not pod.spec.node_name:
        told = [event.message for event in events if event.reason == _SCHEDULER_REASON]
        why = f": {told[-1]}" if told else ""
        advice = f"kubectl -n {pod.metadata.namespace} describe pod {pod.metadata.name}"
        return Cause(f"the pod is on no node yet{why}", "pod", advice)
    return causes.of_annotation(networks.problem) if networks.problem else None


async def _asked(
    cluster: Cluster, pod: PodObject, networks: lacking.Networks, events: Sequence[EventObject]
) -> dict[str, Any]:
    """What the node adds to the answer."""
    node = pod.spec.node_name
    daemon = (await cluster.daemons_of([node]))[node]
    (explained,) = await cluster.ask([(daemon, ("explain", str(pod)))], Explanation, causes.SCHEMA)
    reply = explained.reply
    requests, leftovers = await _before(cluster, daemon, str(pod)) if reply else ([], [])
    cause = None
    if _is_wrong(pod, networks, reply):
        cause = causes.verdict(reply, events, pod, daemon) or causes.no_daemon(
            explained.problem, daemon, cluster.selector
        )
    elif reply is not None and reply.problem:
        cluster.notes.append(f"attached, but an ADD of a new container would fail: {reply.problem}")
    return {
        **daemon.at(),
        "daemons": int(reply is not None),
        **_of_cause(cause),
        "leftovers": leftovers,
        "steps": [msgspec.to_builtins(step) for step in reply.steps] if reply else [],
        "requests": requests,
        "unanswered": unanswered([explained]),
        "notes": cluster.notes,
    }


async def _before(cluster: Cluster, daemon: Daemon, pod: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What its node knows of the pod and its predecessors of the name: the last requests, and what is left over."""
    last = ("trace", pod, "--last", str(_REQUESTS))
    (traced,), leftovers = await asyncio.gather(
        cluster.ask([(daemon, last)], _Trace, _TRACE_SCHEMA), leaks.of_pod(cluster, daemon, pod)
    )
    return [_request(item) for item in traced.reply.requests] if traced.reply else [], leftovers


def _is_wrong(pod: PodObject, networks: lacking.Networks, found: Explanation | None) -> bool:
    if networks.lacks or pod.metadata.deletion_timestamp:
        # A pod that is being deleted is asked about because it does not go.
        return True
    if found is not None:
        return not found.attached
    return not pod.status.pod_ip


def _of_cause(cause: Cause | None) -> dict[str, str]:
    if cause is None:
        return {"cause": "", "text": "", "source": "", "advice": ""}
    return {"cause": cause.short, "text": cause.text, "source": cause.source, "advice": cause.advice}


def _event(event: EventObject) -> dict[str, Any]:
    texts = {key: getattr(event, key) for key in ("when", "type", "reason", "component", "message")}
    return {**texts, "count": event.count or 1}


def _request(item: _Request) -> dict[str, Any]:
    return {
        "verb": item.verb,
        "began": item.began,
        "seconds": item.seconds,
        "error": item.error.text if item.error else "",
        "step": item.steps[-1].what if item.steps else "",
    }
