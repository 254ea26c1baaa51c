"""Determine which networks a pod lacks, the cause in the daemon's words, and what to do. Pure.

A pod lacks the networks that its annotation asks for and its network-status does not have. The sources of a cause, in
the order of preference: the plan of its ADD now (`multusctl explain`); the daemon's last errors; the daemon's Events;
the kubelet's Events. All use the same words for the same cause.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from multus_daemon.answers import status as about_status
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import HANGS, MORE, CniError, of_plugin, parted
from multus_daemon.spec.nad import network_status, selection
from multus_daemon.spec.nad.selection import NetworkSelection
from multus_tools.kubectl.api_objects import EventObject, PodObject
from multus_tools.kubectl.cluster import Answered, Daemon, NodeReply
from multus_tools.scrub import Scrubber

COMPONENT: Final = "multus"
"""The component of the daemon's Events (`cluster.kube.events`)."""
KUBELET_REASONS: Final = ("FailedCreatePodSandBox", "FailedKillPod")
"""Reasons of the kubelet's Events about networks."""
_OF_PLUGIN: Final = ("failed (add): ", "failed (delete): ")
"""libcni puts these words before a plugin's error."""
_NOTICES: Final = ("UnknownKey", "RequestNotMet", "AddressTaken")
"""Reasons of the daemon's Warnings about a pod that has its networks (`pod.unsupported`, `node.addresses`)."""
_SHIM: Final = re.compile(r'find plugin "multus-shim"|multus-shim.*(?:signal:|exec format|no error message|denied)')
_NO_DAEMON: Final = re.compile(r"multus daemon (?:does not listen|is not available|cannot be called)")
_KEYS: Final = (selection.NETWORKS_ANNOTATION, selection.DEFAULT_NETWORK_ANNOTATION)


@dataclass(frozen=True, slots=True)
class Networks:
    """The networks that a pod asks for, and those that it has."""

    wanted: Sequence[NetworkSelection]
    attached: Sequence[str]
    """`NETWORK@INTERFACE` of each entry of its network-status."""
    lacks: Sequence[str]
    """The missing networks: `NAMESPACE/NAME`, and `@INTERFACE` if the pod asks for one."""
    problem: str = ""
    """Why its annotation can't be read; then it gets no networks."""


class Step(msgspec.Struct):
    """A step of an explanation, or of a request."""

    what: str
    result: str = ""
    problem: str = ""


class _Failed(msgspec.Struct):
    verb: str
    code: int
    text: str


class _Doing(msgspec.Struct):
    what: str
    seconds: float
    limit: float


class _Attachment(msgspec.Struct):
    network: str
    interface: str
    addresses: list[str]


class Leftover(msgspec.Struct, rename="camel"):
    """A container whose networks are left, and that neither runtime nor daemon will delete soon."""

    container: str
    pod: str
    since: float
    problem: str
    failed_deletes: int
    attachments: list[_Attachment]
    advice: str = ""
    """Missing in the answers of older daemons."""


class _PassedOver(msgspec.Struct):
    problem: str


class Difference(msgspec.Struct, rename="camel"):
    """A difference between the kernel and the record of an attachment."""

    network: str
    interface: str
    difference: str
    repairable: bool
    certain: bool
    by_pod: bool

    def __str__(self) -> str:
        return f"network {self.network}, interface {self.interface}: {self.difference}"


class _Running(msgspec.Struct):
    verb: str
    seconds: float
    step: str
    doing: list[_Doing]


class Explanation(NodeReply):
    """Answer of `answers.explain`."""

    SCHEMA = "multusctl.explain/v1"
    problem: str
    code: int
    attached: bool
    steps: list[Step]
    errors: list[_Failed]
    running: list[_Running] = msgspec.field(default_factory=list)
    """This key and the following ones are missing in the answers of older daemons."""
    leftovers: list[Leftover] = msgspec.field(default_factory=list)
    lacks: str = ""
    """Text: which networks of its annotation a running pod lacks, and what to do."""
    compared: int = 0
    """Number of the pod's containers that were compared with the kernel."""
    differences: list[Difference] = msgspec.field(default_factory=list)
    passed_over: list[_PassedOver] = msgspec.field(default_factory=list, name="passedOver")
    requests: list[dict[str, Any]] = msgspec.field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause in one line whose first words name it, and what to do."""

    text: str
    """The whole text: of an error, with its details."""
    source: Literal["explain", "request", "event", "annotation", "pod", "daemon", "drift"]
    advice: str

    @property
    def short(self) -> str:
        """The part that is the same for all pods with this cause, by which `multusctl status` groups."""
        return about_status.cause_of(self.text)

    def to_object(self) -> dict[str, str]:
        """Return the keys `cause`, `text`, `source` and `advice` of an answer."""
        return {"cause": self.short, "text": self.text, "source": self.source, "advice": self.advice}


def networks_of(namespace: str, annotations: Mapping[str, str]) -> Networks:
    """Return the networks of a pod of `namespace`."""
    entries = _entries(annotations.get(network_status.ANNOTATION, ""))
    attached = tuple(f"{name}@{interface}" for name, interface in entries)
    text = annotations.get(selection.NETWORKS_ANNOTATION, "")
    try:
        wanted = selection.parse(text, pod_namespace=namespace)
    except CniError as error:
        shown = Scrubber().text(text)[0]
        return Networks((), attached, (shown if len(shown) <= 80 else f"{shown[:80]}...",), str(error))
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
    advice = parted(problem)[1] or "correct the annotation in the pod's template"
    return Cause(problem, "annotation", f"{advice}; recreate the pod")


def of_key(annotations: Mapping[str, str]) -> Cause | None:
    """Return a cause if a key of the annotations looks like a misspelt one of Multus; else None."""
    for key in annotations.keys() - {*_KEYS, network_status.ANNOTATION}:
        if near := difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.9):
            text = f"annotation {key} has no meaning: is {near[0]} meant?"
            return Cause(text, "annotation", "correct the key in the pod's template; recreate the pod")
    return None


def of_events(events: Sequence[EventObject], pod: PodObject, daemon: Daemon | None = None) -> Cause | None:
    """Return the newest Event of the daemon, else of the kubelet, as a cause. `events`: of the pod, oldest first."""
    warnings = [event for event in events if event.type == "Warning"]
    own = [event for event in warnings if event.component == COMPONENT]
    kubelets = [event for event in warnings if event.reason in KUBELET_REASONS]
    # Only the kubelet reports that the runtime could not ask the daemon.
    newest = words_of_plugin(kubelets[-1].message) if kubelets else ""
    if own and not (_SHIM.search(newest) or _NO_DAEMON.search(newest)):
        newest = own[-1].message
    return _cause(newest, "event", pod, daemon or Daemon(pod.spec.node_name)) if newest else None


def of_notices(events: Sequence[EventObject], pod: PodObject, daemon: Daemon) -> Cause | None:
    """Return the newest Event about a started pod whose request is not met, or whose address two have, as a cause."""
    own = [event for event in events if event.component == COMPONENT and event.reason in _NOTICES]
    return _cause(own[-1].message, "event", pod, daemon) if own else None


def of_broken(broken: Sequence[Difference], pod: PodObject, daemon: Daemon) -> Cause:
    """Return the cause that attachments of the running pod differ from their records."""
    advice = "recreate the pod: only a new one has it again"
    if any(item.repairable for item in broken):
        advice = f"`{daemon.exec} multusctl repair {pod}` brings it back; a new pod has it, too"
    return Cause(", ".join(map(str, broken)), "drift", advice)


def verdict(answered: Answered[Explanation], events: Sequence[EventObject], pod: PodObject, selector: str) -> Cause:
    """Return why the pod lacks networks, from its node's answer and its Events."""
    found, daemon = answered.reply, answered.daemon
    if found and (explained := _of_explanation(found, pod, daemon)):
        return explained
    if reported := of_events(events, pod, daemon):
        return reported
    if found is None:
        networks = networks_of(pod.metadata.namespace, pod.annotations)
        if networks.attached and networks.lacks and not pod.metadata.deletion_timestamp:
            text = f"the pod runs without networks that it asked for: {', '.join(networks.lacks)}"
            return Cause(f"{text}: {network_status.EDITED}", "pod", network_status.NOT_FOLLOWED)
        text = f"the daemon of node {daemon.node} can't be asked: {answered.problem}"
        return Cause(text, "daemon", _look(daemon, selector))
    if found.lacks and not pod.metadata.deletion_timestamp:
        return _cause(found.lacks, "explain", pod, daemon)
    if found.attached:
        text = "attached on the node, but the pod's network-status does not say so"
        return Cause(text, "explain", f"the daemon writes it again; its log names pod {pod} if it can't")
    if pod.metadata.deletion_timestamp:
        return Cause("the pod is being deleted, and no DEL of it has failed or runs", "explain", describe(pod))
    text = "no network has been asked for yet: the kubelet waits for something else, or has only just begun"
    return Cause(text, "explain", describe(pod))


def _of_explanation(found: Explanation, pod: PodObject, daemon: Daemon) -> Cause | None:
    deleting = bool(pod.metadata.deletion_timestamp)
    if deleting and (left := next(iter(found.leftovers), None)):
        return _cause(f"{left.problem}; {left.advice}", "explain", pod, daemon)
    # A running pod is not made anew: what it lacks comes before what an ADD would say.
    if not deleting and (problem := (found.attached and found.lacks) or found.problem):
        return _cause(problem, "explain", pod, daemon, found.code)
    if failed := [item for item in found.errors if (item.verb == "DEL") == deleting]:
        return _cause(failed[-1].text, "request", pod, daemon, failed[-1].code)
    for item in found.running:
        if (item.verb == "DEL") == deleting:
            doing = [f"{it.what} for {it.seconds:.0f} s, up to {it.limit:.0f} s" for it in item.doing]
            where = f"in {doing[0]}" if doing else f"since the step: {item.step or 'none yet'}"
            text = f"{item.verb} has run for {item.seconds:.0f} s, {where}"
            return Cause(text, "request", HANGS)
    return None


def _cause(
    text: str, source: Literal["explain", "request", "event"], pod: PodObject, daemon: Daemon, code: int = 0
) -> Cause:
    """Return an error as a cause; its details become the advice."""
    text = text.partition(MORE)[0]
    if _SHIM.search(text):
        advice = (
            f"the shim on the node is missing or damaged; the daemon's pod installs it when it starts: {_renew(daemon)}"
        )
    elif _NO_DAEMON.search(text):
        advice = f"look why the daemon of node {daemon.node} does not run: {_look(daemon)}"
    else:
        message, details = parted(text)
        steps = f"{daemon.exec} multusctl trace {pod}" if daemon.pod else describe(pod)
        advice = details or of_plugin(code, message) or f"the plugin's own log says more; {steps}"
        if daemon.pod:
            advice = advice.replace("`multusctl ", f"`{daemon.exec} multusctl ")
    return Cause(text, source, advice)


def describe(pod: PodObject) -> str:
    """Return the command that shows the pod."""
    return f"kubectl -n {pod.metadata.namespace} describe pod {pod.metadata.name}"


def _look(daemon: Daemon, selector: str = "app=multus") -> str:
    if daemon.pod:
        log = f"kubectl -n {daemon.namespace} logs {daemon.pod} -c {daemon.container}"
        return f"kubectl -n {daemon.namespace} describe pod {daemon.pod}; {log}"
    return f"kubectl get pods -A -l {selector} -o wide --field-selector spec.nodeName={daemon.node}"


def _renew(daemon: Daemon) -> str:
    if daemon.pod:
        return f"kubectl -n {daemon.namespace} delete pod {daemon.pod}"
    return f"kubectl delete pods -A -l app=multus --field-selector spec.nodeName={daemon.node}"


def words_of_plugin(message: str) -> str:
    """Return the plugin's own words in the kubelet's message."""
    for words in _OF_PLUGIN:
        before, found, text = message.rpartition(words)
        if found and "multus" in before:
            # A program without a message of its own is known by its name only.
            return text if "no error message" not in text else message[before.rfind("plugin type=") :]
    return message
