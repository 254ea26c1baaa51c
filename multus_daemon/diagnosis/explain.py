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
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from multus_daemon.pod import networks, plan, unsupported
from multus_daemon.pod.engine import INDICATOR_GATE, Engine
from multus_daemon.pod.networks import Network
from multus_daemon.pod.request import CniRequest
from multus_daemon.runtime.timeline import Timeline
from multus_daemon.spec.attachment import Attachment, Pod, Sandbox
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
    found = list(_planned(engine, configuration, find, steps))
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
) -> Iterator[dict[str, Any]]:
    """The networks, as far as planning comes."""
    if reason := engine.gates.closed.get(INDICATOR_GATE):
        steps.fail("readiness indicator", _refusal(reason))
    try:
        stdin = configuration()
        net_conf = load(stdin, engine.overlay)
        steps.take("configuration", f"cluster network {net_conf.cluster_network or _first(net_conf)}")
    except CniError as error:
        steps.fail("configuration", error)
        return
    try:
        pod = find()
        steps.take("pod", f"found, UID {pod.uid}" if pod.uid else "taken from the file")
    except CniError as error:
        steps.fail("pod", error)
        return
    for key in (selection.DEFAULT_NETWORK_ANNOTATION, selection.NETWORKS_ANNOTATION):
        if key in pod.annotations:
            steps.take(f"annotation {key}", pod.annotations[key])
    try:
        chosen = networks.of_pod(engine, pod, net_conf)
        steps.take("networks", ", ".join(item.name for item in chosen))
    except CniError as error:
        steps.fail("networks", error.with_context(f"pod {pod}"))
        return
    try:
        attachments = plan.attachments(engine, _request(pod, stdin), pod, net_conf)
        steps.take("interfaces and devices", ", ".join(f"{item.ifname}: {item.name}" for item in attachments))
    except CniError as error:
        steps.fail("interfaces and devices", error)
        return
    for number, (network, attachment) in enumerate(zip(chosen, attachments, strict=True)):
        yield _network(engine, pod, network, attachment, _why(pod, network, number, net_conf), steps)


def _network(
    engine: Engine, pod: Pod, network: Network, attachment: Attachment, why: str, steps: _Steps
) -> dict[str, Any]:
    sandbox = Sandbox(_CONTAINER, "")
    problem = ""
    try:
        attachment = engine.runner.plan(sandbox, attachment)
        steps.take(f"plugins of {attachment.name}", ", ".join(plugin.type for plugin in attachment.config.plugins))
    except CniError as error:
        steps.fail(f"plugins of {attachment.name}", error.with_context(f"pod {pod}"))
        problem = str(error)
    calls = engine.runner.invocations(sandbox, attachment)
    types = [plugin_type for plugin_type, _ in calls]
    requests = {key: attachment.capability_args.get(key) for key in sorted(attachment.asked)}
    return {
        "network": attachment.name,
        "interface": attachment.ifname,
        "why": why,
        "problem": problem,
        "plugins": [
            {"type": plugin_type, "servedBy": attachment.served_by.get(plugin_type, ""), "config": dict(call.fields)}
            for plugin_type, call in calls
        ],
        "calls": [
            {"type": name, "servedBy": where} for name, where in attachment.served_by.items() if name not in types
        ],
        "requests": requests,
        "unsupported": [
            f"{item.problem}; {item.advice}"
            for item in unsupported.undeclared(attachment, attachment.asked & unsupported.KEYS.keys())
        ],
    }


def _why(pod: Pod, network: Network, number: int, net_conf: NetConf) -> str:
    if network.auxiliary:
        return "the auxiliary chain, for every pod"
    if number == 0:
        if selection.DEFAULT_NETWORK_ANNOTATION in pod.annotations:
            return f"the pod's annotation {selection.DEFAULT_NETWORK_ANNOTATION}"
        return "the cluster network, for every pod"
    if network.request is not None:
        return f"the pod's annotation {selection.NETWORKS_ANNOTATION}"
    return "delegates, for every pod" if net_conf.delegates else "defaultNetworks, for every pod"


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
    for container_id in engine.store.containers(foreign=False):
        # What can't be read is told by `attachments`.
        with contextlib.suppress(CorruptRecordError):
            record = engine.store.load(container_id)
            if record is not None and record.pod == pod and record.complete:
                newest = max(newest, (record.created, container_id))
    return newest[1]
