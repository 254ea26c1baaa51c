"""Networks that a pod lacks, the cause in the words of its node's daemon, and what to do. Pure.

A pod lacks the networks that its annotation asks for and its network-status does not have. The sources of a cause, in
the order of preference: the plan of its ADD now (`multusctl explain`); the daemon's last errors; the daemon's
Events; the kubelet's Events. All name a cause with the same words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from multus_daemon.diagnosis import status as about_status
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.nad import selection, status
from multus_daemon.spec.nad.selection import NetworkSelection
from multus_daemon.tools.kubectl.api_objects import EventObject, PodObject
from multus_daemon.tools.kubectl.cluster import Answered, Daemon, NodeReply

COMPONENT: Final = "multus"
"""The component of the daemon's Events (`cluster.kube.events`)."""
_KUBELET_REASONS: Final = ("FailedCreatePodSandBox", "FailedKillPod")
_OF_PLUGIN: Final = ("failed (add): ", "failed (delete): ")
"""libcni puts these words before a plugin's error."""
HINT: Final = "; on the node, `multusctl explain "
_TRY_AGAIN: Final = 11
_IO: Final = 5
_ANNOTATION_STEPS: Final = ("networks", "interfaces and devices")


@dataclass(frozen=True, slots=True)
class Networks:
    """The networks that a pod asks for, and those that it has."""

    wanted: Sequence[NetworkSelection]
    attached: Sequence[str]
    """`NETWORK@INTERFACE` of the entries of its network-status."""
    lacks: Sequence[str]
    """`NAMESPACE/NAME`, and `@INTERFACE` if it asks for one."""
    problem: str = ""
    """Why its annotation can't be read; then it gets nothing."""


class Step(msgspec.Struct):
    """A step of an explanation, or of a request."""

    what: str
    result: str = ""
    problem: str = ""


class _Failed(msgspec.Struct):
    verb: str
    code: int
    text: str


class _Network(msgspec.Struct):
    network: str
    problem: str = ""


class Explanation(NodeReply):
    """Answer of `multusctl explain` (`diagnosis.explain`)."""

    SCHEMA = "multusctl.explain/v1"
    problem: str
    attached: bool
    steps: list[Step]
    networks: list[_Network]
    errors: list[_Failed]


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause in one line whose first words name it, and what to do."""

    text: str
    source: Literal["explain", "request", "event", "annotation", "pod", "daemon"]
    advice: str

    @property
    def short(self) -> str:
        """The words that are the same for all pods with this cause, as `multusctl status` counts it."""
        return about_status.cause_of(self.text)

    def to_object(self) -> dict[str, str]:
        """Return the keys `cause`, `text`, `source` and `advice` of an answer."""
        return {"cause": self.short, "text": self.text, "source": self.source, "advice": self.advice}


def networks_of(namespace: str, annotations: Mapping[str, str]) -> Networks:
    """Return the networks of a pod of `namespace`."""
    entries = _entries(annotations.get(status.ANNOTATION, ""))
    attached = tuple(f"{name}@{interface}" for name, interface in entries)
    text = annotations.get(selection.NETWORKS_ANNOTATION, "")
    try:
        wanted = selection.parse(text, pod_namespace=namespace)
    except CniError as error:
        return Networks((), attached, (text if len(text) <= 80 else f"{text[:80]}...",), str(error))
    left = Counter(name for name, _ in entries)
    lacks = []
    for element in wanted:
        name = str(element)
        if element.interface and (name, element.interface) not in entries:
            lacks.append(f"{name}@{element.interface}")
        elif not left[name]:
            lacks.append(name)
        else:
            left[name] -= 1
    return Networks(wanted, attached, tuple(lacks))


def _entries(text: str) -> list[tuple[str, str]]:
    """Return name and interface of each entry of a network-status; nothing if it can't be read."""
    try:
        found = gojson.loads(text) if text else []
    except gojson.JsonError:
        return []
    items = [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
    return [(str(item.get("name", "")), str(item.get("interface", ""))) for item in items]


def of_annotation(problem: str) -> Cause:
    """Return the cause of an annotation that can't be read."""
    return Cause(problem, "annotation", "correct the annotation in the pod's template; the pod has to be made anew")


def of_events(events: Sequence[EventObject], pod: PodObject) -> Cause | None:
    """Return the newest Event of the daemon, else of the kubelet. `events` are the pod's, the oldest first."""
    warnings = [event for event in events if event.type == "Warning"]
    if own := [event for event in warnings if event.component == COMPONENT]:
        text = own[-1].message.partition(HINT)[0]
    elif kubelets := [event for event in warnings if event.reason in _KUBELET_REASONS]:
        text = of_plugin(kubelets[-1].message)
    else:
        return None
    return Cause(text, "event", f"kubectl multus why {pod}")


def verdict(answered: Answered[Explanation], events: Sequence[EventObject], pod: PodObject, selector: str) -> Cause:
    """Return why the pod lacks networks, from its node's answer and its Events."""
    found, daemon = answered.reply, answered.daemon
    if found and (explained := _of_explanation(found, pod, daemon)):
        return explained
    if reported := of_events(events, pod):
        return reported
    if found is None:
        return _no_daemon(answered.problem, daemon, selector)
    if found.attached:
        text = "attached on the node, but the pod's network-status does not say so"
        return Cause(text, "explain", f"the daemon writes it again; its log names pod {pod} if it can't")
    text = "no network has been asked for yet: the kubelet waits for something else, or has only just begun"
    return Cause(text, "explain", f"kubectl -n {pod.metadata.namespace} describe pod {pod.metadata.name}")


def _of_explanation(found: Explanation, pod: PodObject, daemon: Daemon) -> Cause | None:
    deleting = bool(pod.metadata.deletion_timestamp)
    if found.problem and not deleting:
        return Cause(found.problem, "explain", _advice_of_plan(found, pod, daemon))
    if failed := [item for item in found.errors if (item.verb == "DEL") == deleting]:
        last = failed[-1]
        return Cause(last.text, "request", _advice_of_error(last, pod, daemon))
    return None


def _no_daemon(problem: str, daemon: Daemon, selector: str) -> Cause:
    look = f"kubectl get pods -A -l {selector} -o wide --field-selector spec.nodeName={daemon.node}"
    log = (
        f"kubectl -n {daemon.namespace} logs {daemon.pod} -c {daemon.container}" if daemon.pod else "kubectl get ds -A"
    )
    return Cause(f"the daemon of node {daemon.node} can't be asked: {problem}", "daemon", f"{look}; {log}")


def of_plugin(message: str) -> str:
    """Return the plugin's own words in the kubelet's message."""
    for words in _OF_PLUGIN:
        before, found, text = message.rpartition(words)
        if found and "multus" in before:
            return text
    return message


def _advice(text: str, command: str) -> str:
    """Join the details of an error, which usually are advice, and a command."""
    return "; ".join(filter(None, (text.partition("; ")[2], command)))


def _advice_of_plan(found: Explanation, pod: PodObject, daemon: Daemon) -> str:
    """Advise by the first step that fails: an ADD would fail there, too."""
    step = next((step.what for step in found.steps if step.problem), "")
    failing = next((item.network for item in found.networks if item.problem), "")
    namespace, _, network = failing.rpartition("/")
    if step in _ANNOTATION_STEPS:
        command = (
            f"kubectl get network-attachment-definitions -n {pod.metadata.namespace}; define the network that is "
            f"missing or correct it, or correct the annotation in the template of pod {pod.metadata.name}"
        )
    elif namespace:
        command = (
            f"kubectl get network-attachment-definitions -n {namespace} {network} -o yaml; "
            f"kubectl multus networks {failing}: which nodes lack a plugin"
        )
    elif failing:
        # The cluster network's configuration is usually a file of the node.
        command = f"{daemon.exec} multusctl plugins"
    elif step == "pod":
        command = f"kubectl multus status: does the daemon of node {daemon.node} reach the API server?"
    else:
        command = f"{daemon.exec} multusctl doctor"
    return _advice(found.problem, command)


def _advice_of_error(error: _Failed, pod: PodObject, daemon: Daemon) -> str:
    if error.code == _TRY_AGAIN:
        command = f"the runtime tries again by itself; {daemon.exec} multusctl status"
    elif error.code == _IO:
        command = f"{daemon.exec} multusctl doctor"
    else:
        command = f"{daemon.exec} multusctl trace {pod}; where addresses have run out, kubectl multus leaks"
    return _advice(error.text, command)
