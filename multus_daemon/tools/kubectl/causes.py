"""Why a pod lacks networks, in the words of its node's daemon, and what to do about it.

The best source there is: what planning its ADD says now (`multusctl explain`); what the daemon has answered to the
runtime; the pod's Events, the daemon's own before the kubelet's. They name the same cause, with the same words; the
Event about a definition that is not there has upstream's before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from multus_daemon.diagnosis import status
from multus_daemon.tools.kubectl.api_objects import EventObject, PodObject
from multus_daemon.tools.kubectl.cluster import Daemon, NodeReply

SCHEMA: Final = "multusctl.explain/v1"
COMPONENT: Final = "multus"
"""Of the daemon's Events: `cluster.kube.events`."""
Source = Literal["explain", "request", "event", "annotation", "pod", "daemon"]

_KUBELET_REASONS: Final = ("FailedCreatePodSandBox", "FailedKillPod")
_OF_PLUGIN: Final = ("failed (add): ", "failed (delete): ")
"""What libcni puts before a plugin's error, which the runtime passes on."""
_HINT: Final = "; on the node, `multusctl explain "
_TRY_AGAIN: Final = 11
_IO: Final = 5
_ANNOTATION_STEPS: Final = ("networks", "interfaces and devices")


class Step(msgspec.Struct):
    """A step of an explanation."""

    what: str
    result: str = ""
    problem: str = ""


class Failed(msgspec.Struct):
    """A request that failed."""

    verb: str
    began: float
    code: int
    text: str


class Planned(msgspec.Struct):
    """A network of an explanation."""

    network: str
    interface: str
    problem: str = ""


class Explanation(NodeReply):
    """What `multusctl explain` says (`diagnosis.explain`)."""

    problem: str
    code: int
    attached: bool
    steps: list[Step]
    networks: list[Planned]
    errors: list[Failed]
    container: str = ""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why, as one line whose first words name it."""

    text: str
    source: Source
    advice: str
    """What to do."""

    @property
    def short(self) -> str:
        """Without what it was for: the same for all pods that have it, and as `multusctl status` counts it."""
        return status.cause_of(self.text)


def of_annotation(problem: str) -> Cause:
    """The annotation can't be read."""
    return Cause(problem, "annotation", "correct the annotation in the pod's template; the pod has to be made anew")


def of_explanation(found: Explanation, pod: PodObject, daemon: Daemon) -> Cause | None:
    """What the node's daemon says; None where it knows of nothing that is wrong."""
    deleting = bool(pod.metadata.deletion_timestamp)
    if found.problem and not deleting:
        return Cause(found.problem, "explain", _advice_of_plan(found, pod, daemon))
    verbs = [item for item in found.errors if (item.verb == "DEL") == deleting]
    if verbs:
        last = verbs[-1]
        return Cause(last.text, "request", _advice_of_error(last.code, last.text, pod, daemon))
    return None


def of_events(events: Iterable[EventObject], pod: PodObject) -> Cause | None:
    """What the newest Event says: of the daemon's, else of the kubelet's. `events` are the pod's, the oldest first."""
    told = [event for event in events if event.type == "Warning"]
    own = [event for event in told if event.component == COMPONENT]
    kubelets = [event for event in told if event.reason in _KUBELET_REASONS]
    if not own and not kubelets:
        return None
    text = own[-1].message.partition(_HINT)[0] if own else _of_plugin(kubelets[-1].message)
    return Cause(text, "event", f"kubectl multus why {pod}")


def none_yet(pod: PodObject) -> Cause:
    """The runtime has not asked for the pod's networks."""
    text = "no network has been asked for yet: the kubelet waits for something else, or has only just begun"
    return Cause(text, "explain", f"kubectl -n {pod.metadata.namespace} describe pod {pod.metadata.name}")


def not_told(pod: PodObject) -> Cause:
    """All is attached, and the pod's network-status does not say so."""
    text = "attached on the node, but the pod's network-status does not say so"
    return Cause(text, "explain", f"the daemon writes it again; its log names pod {pod} where it can't")


def no_daemon(problem: str, daemon: Daemon, selector: str) -> Cause:
    """The node's daemon can't be asked, and nobody else has told anything."""
    look = f"kubectl get pods -A -l {selector} -o wide --field-selector spec.nodeName={daemon.node}"
    log = (
        f"kubectl -n {daemon.namespace} logs {daemon.pod} -c {daemon.container}" if daemon.pod else "kubectl get ds -A"
    )
    return Cause(f"the daemon of node {daemon.node} can't be asked: {problem}", "daemon", f"{look}; {log}")


def verdict(found: Explanation | None, events: Sequence[EventObject], pod: PodObject, daemon: Daemon) -> Cause | None:
    """The cause where the pod lacks networks; None where nobody who was asked has told one."""
    if found is not None:
        explained = of_explanation(found, pod, daemon)
        if explained is not None:
            return explained
        return of_events(events, pod) or (not_told(pod) if found.attached else none_yet(pod))
    return of_events(events, pod)


def _of_plugin(message: str) -> str:
    """The plugin's own words in what the runtime has told the kubelet."""
    for words in _OF_PLUGIN:
        before, found, text = message.rpartition(words)
        if found and "multus" in before:
            return text
    return message


def _details(text: str) -> str:
    """What an error says beside its cause: it is advice, as a rule."""
    return text.partition("; ")[2]


def _advice_of_plan(found: Explanation, pod: PodObject, daemon: Daemon) -> str:
    """By the first step that failed: an ADD would fail there, too."""
    step = next((step.what for step in found.steps if step.problem), "")
    namespace, name = pod.metadata.namespace, pod.metadata.name
    failing = next((item.network for item in found.networks if item.problem), "")
    if step in _ANNOTATION_STEPS:
        command = (
            f"kubectl get network-attachment-definitions -n {namespace}; define the network that is missing or correct "
            f"it, or correct the annotation in the template of pod {name}"
        )
    elif failing:
        of, _, network = failing.rpartition("/")
        command = (
            f"kubectl get network-attachment-definitions -n {of} {network} -o yaml; "
            f"kubectl multus networks {failing}: which nodes lack a plugin"
            if of
            # The cluster network's configuration is a file of the node, as a rule.
            else f"{daemon.exec} multusctl plugins"
        )
    elif step == "pod":
        command = f"kubectl multus status: does the daemon of node {daemon.node} reach the API server?"
    else:
        command = f"{daemon.exec} multusctl doctor"
    return "; ".join(filter(None, (_details(found.problem), command)))


def _advice_of_error(code: int, text: str, pod: PodObject, daemon: Daemon) -> str:
    if code == _TRY_AGAIN:
        command = f"the runtime tries again by itself; {daemon.exec} multusctl status"
    elif code == _IO:
        command = f"{daemon.exec} multusctl doctor"
    else:
        command = f"{daemon.exec} multusctl trace {pod}; where addresses have run out, kubectl multus leaks"
    return "; ".join(filter(None, (_details(text), command)))
