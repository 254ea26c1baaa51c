"""What an ADD of a pod would attach, and why, step by step: the plan of an ADD, made and not carried out.

    {"schema": "multusctl.explain/v1", "pod": "default/web", "container": <of the record, empty without one>,
     "problem": <why nothing would be attached; empty: an ADD would begin>, "code": 7,
     "steps": [{"what": "pod", "result": …, "problem": ""}, …],
     "networks": [{"network": "default/blue", "interface": "net1", "why": …, "problem": "",
                   "plugins": [{"type": "ptp", "servedBy": "built-in" or a path, "config": {…}}],
                   "calls": [{"type": "host-local", "servedBy": …}], "requests": {"ips": […]},
                   "unsupported": [<text>]}],
     "attached": true, "errors": [{"verb": …, "began": …, "code": …, "text": …}]}

`config` is what the plugin gets on standard input, but for the `prevResult`, which only an ADD knows. Nothing is
touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Final

from multus_daemon.pod.engine import INDICATOR_GATE, Engine
from multus_daemon.pod.gather import gather
from multus_daemon.pod.plan import PlannedNetwork, plan_pod
from multus_daemon.pod.request import CniRequest
from multus_daemon.pod.unsupported import KEYS, UnsupportedArgError, undeclared
from multus_daemon.runtime.timeline import Timeline
from multus_daemon.spec.attachment import Pod, Sandbox
from multus_daemon.spec.cni.args import KubernetesArgs
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId, IfName
from multus_daemon.spec.nad import selection
from multus_daemon.spec.netconf.load import load
from multus_daemon.spec.netconf.model import NetConf
from multus_daemon.spec.ports import CorruptRecordError

SCHEMA: Final = "multusctl.explain/v1"
IFNAME: Final = IfName("eth0")
"""What containerd and CRI-O call the cluster network's interface."""
_CONTAINER: Final = ContainerId("not-a-container")


class _Steps:
    """The way to the plan, until the first problem."""

    def __init__(self) -> None:
        self.taken: list[dict[str, str]] = []
        self.error: CniError | None = None

    def take(self, what: str, result: str) -> None:
        """A step that went well."""
        self.taken.append({"what": what, "result": result, "problem": ""})

    def fail(self, what: str, error: CniError) -> None:
        """The first one that failed is what an ADD would tell."""
        self.taken.append({"what": what, "result": "", "problem": str(error)})
        self.error = self.error or error


def of(
    engine: Engine,
    configuration: Callable[[], bytes],
    find: Callable[[], Pod],
    name: str,
    timelines: Iterable[Timeline],
) -> dict[str, Any]:
    """The explanation for the pod `name` (`namespace/name`), which `find` finds, or raises a CniError.

    `configuration`: what the runtime would give the shim on standard input; raises a CniError where it would give none.
    Raises nothing that a pod or a network can
    cause: what is wrong is in the answer. Raises OSError where the records can't be listed.
    """
    steps = _Steps()
    found = _planned(engine, configuration, find, steps)
    record = _on_record(engine, name)
    return {
        "schema": SCHEMA,
        "pod": name,
        "container": record,
        "problem": str(steps.error) if steps.error else "",
        "code": steps.error.code if steps.error else 0,
        "steps": steps.taken,
        "networks": found,
        "attached": bool(record),
        "errors": [
            {
                "verb": item.subject.get("verb", ""),
                "began": round(item.began, 3),
                "code": item.error[0],
                "text": item.error[1],
            }
            for item in timelines
            if item.error and item.subject.get("pod") == name
        ],
    }


def _planned(
    engine: Engine, configuration: Callable[[], bytes], find: Callable[[], Pod], steps: _Steps
) -> list[dict[str, Any]]:
    """Return the networks, as far as planning comes."""
    if reason := engine.gates.closed.get(INDICATOR_GATE):
        steps.fail("readiness indicator", _refusal(reason))
    try:
        stdin = configuration()
        net_conf = load(stdin, engine.policy.overlay)
        steps.take("configuration", f"cluster network {net_conf.cluster_network or _first(net_conf)}")
    except CniError as error:
        steps.fail("configuration", error)
        return []
    try:
        pod = find()
        steps.take("pod", f"found, UID {pod.uid}" if pod.uid else "taken from the file")
    except CniError as error:
        steps.fail("pod", error)
        return []
    for key in (selection.DEFAULT_NETWORK_ANNOTATION, selection.NETWORKS_ANNOTATION):
        if key in pod.annotations:
            steps.take(f"annotation {key}", pod.annotations[key])
    inputs = gather(engine, pod, net_conf)
    if inputs.refusal:
        steps.fail("networks", inputs.refusal.with_context(f"pod {pod}"))
        return []
    steps.take("networks", ", ".join(item.name for item in inputs.networks))
    plan = plan_pod(_request(pod, stdin), inputs, engine.runner, engine.devices.files)
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
    requests = {key: attachment.capability_args.get(key) for key in sorted(network.asked)}
    return {
        "network": attachment.name,
        "interface": attachment.ifname,
        "why": network.why,
        # Without the pod, which the whole answer is about.
        "problem": str(network.refusal.__cause__ or network.refusal) if network.refusal else "",
        "plugins": [
            {"type": plugin_type, "servedBy": attachment.served_by.get(plugin_type, ""), "config": dict(call.fields)}
            for plugin_type, call in calls
        ],
        "calls": [
            {"type": name, "servedBy": where} for name, where in attachment.served_by.items() if name not in types
        ],
        "requests": requests,
        "unsupported": [
            f"{item.problem}; {item.advice}" for item in undeclared(attachment, network.asked & KEYS.keys())
        ],
    }


def _first(net_conf: NetConf) -> str:
    return net_conf.delegates[0].name if net_conf.delegates else "(none)"


def _refusal(reason: str) -> CniError:
    return CniError(reason, "no pod is attached until it is there", code=11)


def _request(pod: Pod, configuration: bytes) -> CniRequest:
    args = KubernetesArgs(pod.namespace, pod.name, pod.uid, _CONTAINER, ())
    return CniRequest("ADD", _CONTAINER, "", IFNAME, args, configuration)


def _on_record(engine: Engine, pod: str) -> str:
    """The container of the pod that is on record as attached; the newest, empty where there is none."""
    newest = (0.0, "")
    for container_id in engine.records.store.containers(foreign=False):
        # What can't be read is told by `attachments`.
        with contextlib.suppress(CorruptRecordError):
            record = engine.records.store.load(container_id)
            if record is not None and record.pod == pod and record.complete:
                newest = max(newest, (record.created, container_id))
    return newest[1]
