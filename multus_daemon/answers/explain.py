"""Explain the networks of a pod, step by step: plan an ADD without carrying it out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from multus_daemon.node.primary.config import RUNTIME_GATE
from multus_daemon.pod.engine import INDICATOR_GATE, Engine
from multus_daemon.pod.gather import gather
from multus_daemon.pod.plan import PlannedNetwork, plan_pod
from multus_daemon.pod.request import CniRequest
from multus_daemon.pod.unsupported import KEYS, UnsupportedArgError, undeclared
from multus_daemon.runtime.timeline import Timeline, Timelines
from multus_daemon.spec.attachment import Pod, Sandbox
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId, IfName, KubernetesArgs
from multus_daemon.spec.cni.remedies import about_pod, parted
from multus_daemon.spec.nad import selection
from multus_daemon.spec.netconf.model import load
from multus_daemon.spec.ports import PodNotFoundError

_IFNAME: Final = IfName("eth0")
"""Interface of the cluster network, as containerd and CRI-O name it."""
_CONTAINER: Final = ContainerId("not-a-container")


class _Steps:
    """The steps of planning, and the first error: the one that an ADD would return."""

    def __init__(self) -> None:
        self.taken: list[dict[str, str]] = []
        self.error: CniError | None = None
        self.exists = True
        """False if there is no such pod."""

    def take(self, what: str, result: str) -> None:
        self.taken.append({"what": what, "result": result, "problem": ""})

    def fail(self, what: str, error: CniError) -> None:
        self.taken.append({"what": what, "result": "", "problem": str(error)})
        self.error = self.error or error


def of(
    engine: Engine,
    configuration: Callable[[], bytes],
    find: Callable[[], Pod],
    name: str,
    timelines: Timelines,
) -> dict[str, Any]:
    """Explain the pod `name` (`namespace/name`); faults of the pod and its networks are part of the answer.

    `configuration` returns the standard input that the shim would get, `find` returns the pod; both raise CniError.
    Raises OSError if the records can't be listed.
    """
    steps = _Steps()
    networks = _planned(engine, configuration, find, steps)
    container = _on_record(engine, name)
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
        "since": round(timelines.since, 3),
    }


def _running(item: Timeline) -> dict[str, Any]:
    """Return what a request does now. `limit`: seconds after which the daemon ends it."""
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
    """Return the networks, as far as they can be planned."""
    if reason := engine.gates.closed.get(INDICATOR_GATE):
        steps.fail("readiness indicator", CniError(reason, "no pod is attached until it is there", code=11))
    if reason := engine.gates.closed.get(RUNTIME_GATE):
        steps.fail("runtime", CniError(*parted(reason), code=11))
    try:
        stdin = configuration()
        net_conf = load(stdin, engine.policy.overlay)
        first = net_conf.delegates[0].name if net_conf.delegates else "(none)"
        steps.take("configuration", f"cluster network {net_conf.cluster_network or first}")
    except CniError as error:
        steps.fail("configuration", error)
        return []
    try:
        pod = find()
    except CniError as error:
        steps.fail("pod", error)
        steps.exists = not isinstance(error.__cause__, PodNotFoundError)
        return []
    steps.take("pod", f"found, UID {pod.uid}" if pod.uid else "taken from the file")
    for key in (selection.DEFAULT_NETWORK_ANNOTATION, selection.NETWORKS_ANNOTATION):
        if key in pod.annotations:
            steps.take(f"annotation {key}", pod.annotations[key])
    inputs = gather(engine, pod, net_conf)
    if inputs.refusal:
        steps.fail("networks", about_pod(inputs.refusal, pod))
        return []
    steps.take("networks", ", ".join(item.name for item in inputs.networks))
    args = KubernetesArgs(pod.namespace, pod.name, pod.uid, _CONTAINER, ())
    request = CniRequest("ADD", _CONTAINER, "", _IFNAME, args, stdin)
    plan = plan_pod(request, inputs, engine.runner, engine.device_files)
    if not plan.networks and plan.refusal:
        steps.fail("interfaces and devices", plan.refusal)
        return []
    steps.take("interfaces and devices", ", ".join(f"{item.ifname}: {item.name}" for item in plan.attachments))
    if isinstance(plan.refusal, UnsupportedArgError):
        steps.fail("requests", plan.refusal)
    for network in plan.networks:
        name = network.attachment.name
        if network.refusal:
            steps.fail(f"plugins of {name}", network.refusal)
        else:
            types = ", ".join(plugin.type for plugin in network.attachment.config.plugins)
            steps.take(f"plugins of {name}", types)
    return [_network(engine, network) for network in plan.networks]


def _network(engine: Engine, network: PlannedNetwork) -> dict[str, Any]:
    attachment = network.attachment
    calls = engine.runner.invocations(Sandbox(_CONTAINER, ""), attachment)
    types = [plugin_type for plugin_type, _ in calls]
    plugins = [
        {
            "type": plugin_type,
            "servedBy": attachment.served_by.get(plugin_type, ""),
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
        "unsupported": [
            f"{item.problem}; {item.advice}" for item in undeclared(attachment, network.asked & KEYS.keys())
        ],
    }


def _on_record(engine: Engine, pod: str) -> str:
    """Return the newest container of the pod that is attached; empty if there is none."""
    engine.records.refresh()
    attached = [entry for entry in engine.records.view.of_pod(pod) if entry.complete]
    return max(attached, key=lambda entry: entry.created).container_id if attached else ""
