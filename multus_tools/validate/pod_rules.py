"""Check the annotations of pods and pod templates: their syntax, and the networks that they request."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from multus_daemon.pod import networks, plan, unsupported
from multus_daemon.runtime import deadline
from multus_daemon.settings import Settings
from multus_daemon.spec.attachment import Attachment
from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import IfName
from multus_daemon.spec.nad import network_status, selection
from multus_daemon.spec.nad.selection import NetworkSelection
from multus_daemon.spec.netconf import NetConf
from multus_tools.validate import configs, known
from multus_tools.validate.configs import Network, Planner
from multus_tools.validate.located import Place, object_at
from multus_tools.validate.positions import Path
from multus_tools.validate.report import Severity, Subject, guessed, innermost
from multus_tools.webhook import device_requests

_NETWORKS: Final = (selection.DEFAULT_NETWORK_ANNOTATION, selection.NETWORKS_ANNOTATION)
_OWN: Final = (selection.KEEP_ANNOTATION, selection.HOTPLUG_ANNOTATION, selection.STICKY_ANNOTATION)
_OF_PODS: Final = (*_NETWORKS, *_OWN, device_requests.ANNOTATION)
_OLD_STATUS: Final = "k8s.v1.cni.cncf.io/networks-status"
"""Former name of the status annotation; clients still copy it."""
_ANNOTATIONS: Final = (*_OF_PODS, network_status.ANNOTATION, _OLD_STATUS, selection.RESOURCE_NAME_ANNOTATION)
_VALUES: Final[Mapping[str, tuple[Sequence[str], str]]] = {
    selection.KEEP_ANNOTATION: (tuple(selection.KEEP_VALUES), "the network's annotation or the node's setting counts"),
    selection.HOTPLUG_ANNOTATION: (selection.HOTPLUG_VALUES, "the pod is left alone"),
    selection.STICKY_ANNOTATION: (("true", "false"), "the addresses do not stay with the pod's ordinal"),
    device_requests.ANNOTATION: (device_requests.VALUES, "no request is added to the pod"),
}
"""Annotations with a few valid values: these values, and what happens with any other."""
_KEYS_MAX: Final = 1000
"""Maximum number of an object's annotations whose keys are compared with those of Multus."""
_ALIKE: Final = 0.8
"""Similarity, from 0 to 1, above which an annotation's key counts as a misspelling of one of Multus."""
_IFNAME: Final = IfName("eth0")
"""Interface of the cluster network, as containerd and CRI-O name it."""


@dataclass(frozen=True)
class Element:
    """A network that a pod requests."""

    subject: Subject
    namespace: str
    """Namespace of the pod."""
    selection: NetworkSelection
    place: Callable[[str], Place]
    """Returns the place of a key of the element; of the element itself if it has no such key."""
    annotation: str
    is_default: bool
    """True if it replaces the cluster network (annotation default-network)."""

    def add(self, severity: Severity, check: str, problem: str, advice: str, about: str = "") -> None:
        """Report a finding at the key of the element that `about` mentions."""
        path: Path = ("metadata", "annotations", self.annotation)
        self.subject.add(severity, check, problem, advice, path=path, place=self.place(about))


def check(subject: Subject, path: Path, namespace: str, settings: Settings) -> list[Element]:
    """Check the annotations of the pod at `path` of an object, and return the networks that it requests.

    `path`: empty for a pod, else that of a pod template. `settings`: those of the daemon.
    """
    value = subject.located.value
    annotations_at = (*path, "metadata", "annotations")
    check_keys(subject, (*path, "metadata"), _OF_PODS)
    for key in object_at(value, ("metadata", "annotations")) if path else ():
        if key in _OF_PODS:
            text = f"annotation {key} is of the {value.get('kind')}, not of its pods, which do not get it"
            advice = f"put it into {'.'.join(map(str, annotations_at))}"
            subject.warn("annotation", text, advice, path=("metadata", "annotations", key))
    elements: list[Element] = []
    for key in _NETWORKS:
        annotation = object_at(value, annotations_at).get(key)
        if isinstance(annotation, str):
            elements += _annotation(subject, (*annotations_at, key), annotation, namespace, settings)
    if elements and object_at(value, (*path, "spec")).get("hostNetwork") is True:
        subject.warn(
            "annotation",
            "the pod is in the host's network (hostNetwork: true): it gets none of the networks that it asks for",
            "remove the annotation, or hostNetwork",
            path=(*annotations_at, elements[-1].annotation),
        )
    return elements


def check_keys(subject: Subject, metadata: Path, wanted: Sequence[str] = _ANNOTATIONS) -> None:
    """Warn of annotations with misspelt keys or invalid values. `metadata`: path of `metadata` in the object."""
    annotations = object_at(subject.located.value, (*metadata, "annotations"))
    for key, text in itertools.islice(annotations.items(), _KEYS_MAX):
        at = (*metadata, "annotations", key)
        if key in _ANNOTATIONS:
            if not isinstance(text, str):
                problem = f"annotation {key}: a string is needed, not {gojson.kind_of(text)}"
                subject.error("annotation", problem, "put it in quotes", path=at)
            elif key in _VALUES and text not in _VALUES[key][0]:
                values, otherwise = _VALUES[key]
                problem = f"annotation {key}: {text[:80]!r} means nothing, and {otherwise}"
                advice = known.meant(text, values) or f"it can be {', '.join(values)}"
                subject.warn("annotation", problem, advice, path=at)
        elif near := known.near(key, wanted, alike=_ALIKE):
            subject.warn("annotation-key", f"annotation {key!r} means nothing", f"is {near} meant?", path=at)


def _annotation(subject: Subject, path: Path, text: str, namespace: str, settings: Settings) -> list[Element]:
    key = str(path[-1])
    is_default = key == selection.DEFAULT_NETWORK_ANNOTATION
    try:
        if is_default:
            own_namespace = settings.networks.multus_namespace
            requested = [selection.parse_default_network(text, default_namespace=own_namespace)]
        else:
            requested = list(selection.parse(text, pod_namespace=namespace))
    except CniError as error:
        _bad_annotation(subject, path, error)
        return []
    elements = []
    for element, place in zip(requested, _places(subject, path, len(requested)), strict=True):
        deadline.check()
        for problem in element.unknown:
            what, _, meant = problem.partition(", ")
            subject.add("warning", "annotation", f"{what} (network {element})", meant, path=path, place=place(what))
        elements.append(Element(subject, namespace, element, place, key, is_default))
    return elements


def _bad_annotation(subject: Subject, path: Path, error: CniError) -> None:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, gojson.JsonError):
        cause = cause.__cause__
    if cause is not None and error.msg.startswith("not JSON"):
        configs.fault(subject, "annotation", path, cause)
        return
    problem = error.msg.replace(f" (annotation {path[-1]})", "")
    match = re.search(r"\(element ([0-9]{1,4})\b", problem)
    number = int(match[1]) if match else -1
    try:
        inner = subject.located.text(*path).json()
        base: Path = (number,) if isinstance(inner.value, list) and 0 <= number < len(inner.value) else ()
        at = guessed(inner.value, problem, error.explanation, base=base)
        place = inner.place(guessed(inner.value, error.explanation, base=base) if at == base else at)
    except gojson.JsonError:
        items = list(_places(subject, path, 0))
        place = items[number]("") if 0 <= number < len(items) else subject.located.place(path)
    subject.add("error", "annotation", problem, error.explanation, path=path, place=place)


def _places(subject: Subject, path: Path, count: int) -> Iterator[Callable[[str], Place]]:
    """Yield `Element.place` for each of the `count` elements of the annotation at `path`."""
    text = subject.located.text(*path)
    try:
        inner = text.json()
    except gojson.JsonError:
        at = 0
        for item in text.text.split(","):
            start = at + len(item) - len(item.lstrip())
            yield lambda _, start=start: text.place(start)  # type: ignore[misc]
            at += len(item) + 1
        return
    replace(subject, located=inner).repeated("warning")
    for index in range(count):
        yield lambda about, index=index: inner.place(guessed(inner.value, about, base=(index,)))  # type: ignore[misc]


def check_interfaces(elements: Sequence[Element]) -> None:
    """Check the names of a pod's interfaces as an ADD does, assuming that settings add only the cluster network."""
    cluster = next((element for element in elements if element.is_default), None)
    rest = [element for element in elements if not element.is_default]
    config = conf.parse(b'{"cniVersion": "1.0.0", "name": "cluster-network", "type": "passthru"}')
    chosen = [networks.Network(str(element.selection), config, element.selection) for element in rest]
    chosen.insert(0, networks.Network("cluster-network", config, cluster.selection if cluster else None))
    try:
        plan.interface_names(_IFNAME, chosen)
    except CniError as error:
        named = [element for element in rest if element.selection.interface] or rest
        guilty = next((one for one in named if f"{one.selection.interface!r}" in error.msg), named[-1])
        guilty.add("error", "interface", error.msg, error.explanation, "interface")


def check_isolation(element: Element, net_conf: NetConf) -> None:
    """Check that the pod may use a network of the element's namespace (`namespaceIsolation`)."""
    wanted = element.selection
    is_replacement = element.is_default and wanted.namespace == net_conf.multus_namespace
    if not is_replacement and not net_conf.allows(element.namespace, wanted.namespace):
        allowed = ", ".join(sorted({element.namespace, *net_conf.global_namespaces}))
        problem = f"network {wanted} must not be used from namespace {element.namespace}"
        advice = f"namespaceIsolation is on; networks of {allowed} may be used"
        element.add("error", "isolation", problem, advice, "namespace")


def report_missing(element: Element, names: set[tuple[str, str]], net_conf: NetConf) -> None:
    """Warn of a network that is not in the files, unless the files have no network at all.

    Networks that the pod may not use are not suggested: a tenant must not learn their names.
    """
    if not names:
        return
    wanted = element.selection
    allowed = [key for key in names if net_conf.allows(element.namespace, key[0])]
    elsewhere = sorted(namespace for namespace, name in allowed if name == wanted.name)
    here = [name for namespace, name in allowed if namespace == wanted.namespace]
    if elsewhere:
        advice = f"is {elsewhere[0]}/{wanted.name} meant?"
    else:
        advice = known.meant(wanted.name, here) or "give its file too, or apply it before the pod"
    problem = f"network {wanted} does not exist: no NetworkAttachmentDefinition that is known here has that name"
    element.add("warning", "reference", problem, advice, "name")


def check_request(plugins: Planner, element: Element, network: Network, *, strict: bool) -> None:
    """Check that the network can take the pod's request. `strict`: the setting `strictRequests`."""
    try:
        attachment = configs.asked_of(network, element.selection, IfName(element.selection.interface or "net1"))
        if network.is_usable:
            plugins.plan(attachment)
    except CniError as error:
        error = innermost(error)
        problem = f"network {network.name} can't take what is asked of it: {error.msg}"
        element.add("error", "request", problem, error.explanation, error.msg)
        return
    wanted = unsupported.KEYS.keys() if strict else unsupported.KEYS.keys() - _taken_from_args(attachment)
    severity: Severity = "error" if strict else "warning"
    for item in unsupported.undeclared(attachment, wanted & attachment.capability_args.keys()):
        element.add(severity, "request", item.msg, item.remedy, item.key)


def _taken_from_args(attachment: Attachment) -> set[str]:
    """Return the requests that a plugin of the network reads from CNI_ARGS."""
    types = {name for plugin in attachment.config.plugins for name in (plugin.type, plugin.ipam_type)}
    taken = {capability for capability, readers in known.READS_ARGS.items() if types & readers}
    if len(attachment.capability_args.get("ips", ())) > 1 and "static" not in types:
        # host-local reads one address only.
        taken.discard("ips")
    return taken
