"""Explain the networks of a pod, step by step: plan an ADD without carrying it out."""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final

from multus_daemon.answers import status
from multus_daemon.node.primary.config import RUNTIME_GATE, UNUSABLE
from multus_daemon.pod.engine import INDICATOR_GATE, Engine
from multus_daemon.pod.gather import gather
from multus_daemon.pod.plan import PlannedNetwork, plan_pod
from multus_daemon.pod.request import CniRequest
from multus_daemon.pod.unsupported import KEYS, UnsupportedArgError, undeclared
from multus_daemon.pod.upstream import DEFAULT_IFNAME
from multus_daemon.runtime.timeline import Timeline, Timelines
from multus_daemon.spec.attachment import Pod, Sandbox
from multus_daemon.spec.cni.errors import CniError, InvalidAnnotationError, Origin, about_pod, as_on_host, parted
from multus_daemon.spec.cni.names import ContainerId, KubernetesArgs
from multus_daemon.spec.nad import selection
from multus_daemon.spec.netconf import load
from multus_daemon.spec.ports import PodNotFoundError

_CONTAINER: Final = ContainerId("not-a-container")
REQUESTS_MAX: Final = 5


class _Steps:
    """The steps of planning an ADD, and the first error, which the ADD would return."""

    def __init__(self) -> None:
        self.taken: list[dict[str, str]] = []
        self.error: CniError | None = None
        self.exists = True
        """False if there is no such pod."""
        self.pod: Pod | None = None

    def take(self, what: str, result: str) -> None:
        self.taken.append({"what": what, "result": result, "problem": ""})

    def fail(self, what: str, error: CniError) -> None:
        error = error.with_advice()
        self.taken.append({"what": what, "result": "", "problem": str(error)})
        self.error = self.error or error


def of(
    engine: Engine,
    configuration: Callable[[], bytes],
    find: Callable[[], Pod],
    name: str,
    timelines: Timelines,
    lacks: Callable[[Pod], str] = lambda _: "",
) -> dict[str, Any]:
    """Return the answer of `multusctl explain` for the pod `name` (`namespace/name`), with errors of pod and networks.

    `configuration` returns the standard input that the shim would get, `find` the pod; both raise CniError. `lacks`
    returns a text about networks that a running pod lacks, or empty. Raises OSError if the records can't be listed.
    """
    steps = _Steps()
    networks = _planned(engine, configuration, find, steps)
    engine.records.refresh()
    attached = [entry for entry in engine.records.view.of_pod(name) if entry.complete]
    container = max(attached, key=attrgetter("created")).container_id if attached else ""
    requests = [item for item in timelines if item.subject.get("pod") == name]
    return {
        "schema": "multusctl.explain/v1",
        "pod": name,
        "exists": steps.exists,
        "container": container,
        "problem": str(steps.error) if steps.error else "",
        "code": steps.error.code if steps.error else 0,
        "steps": steps.taken,
        "networks": networks,
        "attached": bool(container),
        "lacks": lacks(steps.pod) if steps.pod else "",
        "errors": [
            {
                "request": item.id,
                "verb": item.subject.get("verb", ""),
                "began": round(item.began, 3),
                "code": item.error[0],
                "text": item.error[1],
            }
            for item in requests
            if item.error
        ],
        "running": [_running(item) for item in requests if item.ended is None],
        "requests": [_request(item) for item in requests[-REQUESTS_MAX:]],
        "since": round(timelines.since, 3),
    }


def _request(item: Timeline) -> dict[str, Any]:
    return {
        "verb": item.subject.get("verb", ""),
        "began": round(item.began, 3),
        "seconds": None if item.ended is None else round(item.ended, 6),
        "error": item.error[1] if item.error else "",
        "step": item.steps[-1][0] if item.steps else "",
    }


def _running(item: Timeline) -> dict[str, Any]:
    """Return what a running request does now, with a `limit`: seconds after which the daemon ends it."""
    now, steps = time.time(), tuple(item.steps)
    return {
        "request": item.id,
        "verb": item.subject.get("verb", ""),
        "began": round(item.began, 3),
        "seconds": round(now - item.began, 3),
        "step": steps[-1][0] if steps else "",
        "doing": [
            {"what": what, "seconds": round(now - began, 3), "limit": limit}
            for what, (began, limit) in tuple(item.doing.items())
        ],
    }


def _planned(
    engine: Engine, configuration: Callable[[], bytes], find: Callable[[], Pod], steps: _Steps
) -> list[dict[str, Any]]:
    """Return the pod's networks for the answer, as far as they can be planned."""
    closed, unusable = engine.gates.closed, engine.gates.degraded.closed.get(UNUSABLE, "")
    reasons = {"readiness indicator": closed.get(INDICATOR_GATE), "runtime": closed.get(RUNTIME_GATE) or unusable}
    for what, reason in reasons.items():
        if reason:
            cause, remedy = parted(reason)
            steps.fail(what, CniError(cause, remedy=remedy, origin=Origin.NODE, code=11))
    try:
        stdin = configuration()
        net_conf = load(stdin, engine.overlay)
        first = net_conf.delegates[0].name if net_conf.delegates else "(none)"
        steps.take("configuration", as_on_host(f"cluster network {net_conf.cluster_network or first}"))
    except CniError as error:
        steps.fail("configuration", error)
        return []
    try:
        pod = steps.pod = find()
    except CniError as error:
        steps.fail("pod", error)
        steps.exists = not isinstance(error.__cause__, PodNotFoundError)
        return []
    steps.take("pod", f"found, UID {pod.uid}" if pod.uid else "taken from the file")
    if pod.host_network:
        if pod.annotations.get(selection.NETWORKS_ANNOTATION, "").strip():
            steps.fail("runtime", InvalidAnnotationError(status.ON_HOST, remedy=status.LEAVE_HOST))
        else:
            steps.take("runtime", status.ON_HOST)
        return []
    inputs = gather(engine, pod, net_conf)
    for key in (selection.DEFAULT_NETWORK_ANNOTATION, selection.NETWORKS_ANNOTATION):
        # It may be what can't be read: without elements nothing was looked up.
        if key in pod.annotations and (inputs.elements or not inputs.refusal):
            steps.take(f"annotation {key}", pod.annotations[key])
    if inputs.refusal:
        steps.fail("networks", about_pod(inputs.refusal, pod))
        return []
    steps.take("networks", ", ".join(item.name for item in inputs.networks))
    args = KubernetesArgs(pod.namespace, pod.name, pod.uid, _CONTAINER, ())
    request = CniRequest("ADD", _CONTAINER, "", DEFAULT_IFNAME, args, stdin)
    plan = plan_pod(request, inputs, engine.runner, engine.device_files)
    if not plan.networks and plan.refusal:
        steps.fail("interfaces and devices", plan.refusal)
        return []
    steps.take("interfaces and devices", ", ".join(f"{item.ifname}: {item.name}" for item in plan.attachments))
    if isinstance(plan.refusal, UnsupportedArgError):
        steps.fail("requests", plan.refusal)
    for network in plan.networks:
        _take_plugins(engine, network, steps)
    return [_network(engine, network) for network in plan.networks]


def _take_plugins(engine: Engine, network: PlannedNetwork, steps: _Steps) -> None:
    """Take the steps of a network: its plugins, and the addresses that they would choose."""
    name = network.attachment.name
    if network.refusal:
        steps.fail(f"plugins of {name}", network.refusal)
        return
    steps.take(f"plugins of {name}", ", ".join(plugin.type for plugin in network.attachment.config.plugins))
    try:
        if addresses := engine.runner.foresee(Sandbox(_CONTAINER, ""), network.attachment):
            steps.take(f"addresses of {name}", addresses)
    except CniError as error:
        steps.fail(f"addresses of {name}", error)


def _network(engine: Engine, network: PlannedNetwork) -> dict[str, Any]:
    attachment = network.attachment
    calls = engine.runner.invocations(Sandbox(_CONTAINER, ""), attachment)
    types = [plugin_type for plugin_type, _ in calls]
    plugins = [
        {
            "type": plugin_type,
            "servedBy": attachment.served_by.get(plugin_type, ""),
            "unknown": engine.runner.unknown(call),
            "config": dict(call.fields),
        }
        for plugin_type, call in calls
    ]
    return {
        "network": attachment.name,
        "interface": attachment.ifname,
        "why": network.why,
        # Without the name of the pod, which the answer has already.
        "problem": str(network.refusal.__cause__ or network.refusal) if network.refusal else "",
        "plugins": plugins,
        "calls": [
            {"type": name, "servedBy": where} for name, where in attachment.served_by.items() if name not in types
        ],
        "requests": {key: attachment.capability_args.get(key) for key in sorted(network.asked)},
        "unsupported": [str(item) for item in undeclared(attachment, network.asked & KEYS.keys())],
    }
