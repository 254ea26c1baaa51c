"""The annotations of pods and of workloads' templates: which networks they ask for, and what is wrong with that."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon.diagnosis.validate import configs, known
from multus_daemon.diagnosis.validate.report import Report, guessed
from multus_daemon.diagnosis.validate.source import Located, Place, object_at, value_at
from multus_daemon.runtime.jsontext import Path
from multus_daemon.settings import Settings
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.nad import definition, selection, status
from multus_daemon.spec.nad.selection import NetworkSelection

OF_PODS: Final = (selection.NETWORKS_ANNOTATION, selection.DEFAULT_NETWORK_ANNOTATION)
_OLD_STATUS: Final = "k8s.v1.cni.cncf.io/networks-status"
"""What the status was called once; clients still copy it."""
_ANNOTATIONS: Final = (*OF_PODS, status.ANNOTATION, _OLD_STATUS, definition.RESOURCE_NAME_ANNOTATION)
_ALIKE: Final = 0.8
"""From here on an annotation's key, of anybody's, is one of ours that is misspelt."""


@dataclass(frozen=True)
class Element:
    """A network that a pod asks for."""

    subject: str
    namespace: str
    """The pod's."""
    selection: NetworkSelection
    place: Callable[[str], Place]
    """Of a key of the element; of the element itself where it has none of the name."""
    located: Located
    annotation: str
    is_default: bool
    """It takes the place of the cluster network."""


def check(report: Report, located: Located, path: Path, subject: str, namespace: str, found: Settings) -> list[Element]:
    """Check the annotations of the pod at `path` of an object, a template where it is not empty; what the pod asks for.

    `found`: the daemon's settings.
    """
    metadata = object_at(located.value, (*path, "metadata"))
    check_keys(report, located, (*path, "metadata"), subject, OF_PODS)
    if path:
        _misplaced(report, located, path, subject)
    elements: list[Element] = []
    annotations = object_at(metadata, ("annotations",))
    for key in (selection.DEFAULT_NETWORK_ANNOTATION, selection.NETWORKS_ANNOTATION):
        if key in annotations:
            at = (*path, "metadata", "annotations", key)
            elements += _annotation(report, located, at, subject, namespace, found.networks.multus_namespace)
    if elements and object_at(located.value, (*path, "spec")).get("hostNetwork") is True:
        report.add(
            "warning", "annotation", subject, located,
            "the pod is in the host's network (hostNetwork: true): it gets none of the networks that it asks for",
            "remove the annotation, or hostNetwork",
            path=(*path, "metadata", "annotations", elements[-1].annotation),
        )  # fmt: skip
    return elements


def _misplaced(report: Report, located: Located, path: Path, subject: str) -> None:
    for key in object_at(located.value, ("metadata", "annotations")):
        if key in OF_PODS:
            where = ".".join(map(str, (*path, "metadata", "annotations")))
            text = f"annotation {key} is of the {located.value.get('kind')}, not of its pods, which do not get it"
            at = ("metadata", "annotations", key)
            report.add("warning", "annotation", subject, located, text, f"put it into {where}", path=at)


def check_keys(report: Report, located: Located, metadata: Path, subject: str, wanted: tuple[str, ...]) -> None:
    """Warn of annotations whose keys are misspelt: nothing reads those."""
    found = object_at(located.value, (*metadata, "annotations"))
    for key, text in found.items():
        at = (*metadata, "annotations", key)
        if key in _ANNOTATIONS:
            if not isinstance(text, str):
                problem = f"annotation {key}: a string is needed, not {gojson.kind_of(text)}"
                report.add("error", "annotation", subject, located, problem, "put it in quotes", path=at)
            continue
        near = known.near(key, wanted or _ANNOTATIONS, alike=_ALIKE)
        if near:
            text = f"annotation {key!r} means nothing"
            report.add("warning", "annotation-key", subject, located, text, f"is {near} meant?", path=at)


def _annotation(
    report: Report, located: Located, path: Path, subject: str, namespace: str, multus_namespace: str
) -> list[Element]:
    key, text = str(path[-1]), value_at(located.value, path)
    if not isinstance(text, str):
        return []
    default = key == selection.DEFAULT_NETWORK_ANNOTATION
    try:
        if default:
            elements = [selection.parse_default_network(text, default_namespace=multus_namespace)]
        else:
            elements = list(selection.parse(text, pod_namespace=namespace))
    except CniError as error:
        _bad_annotation(report, located, path, subject, error)
        return []
    places = list(_places(located, path, len(elements)))
    for element, place in zip(elements, places, strict=True):
        for problem in element.unknown:
            what, _, meant = problem.partition(", ")
            report.add_at(
                "warning", "annotation", subject, located.source, place(what), f"{what} (network {element})", meant,
                path=path,
            )  # fmt: skip
    return [
        Element(subject, namespace, element, place, located, key, default)
        for element, place in zip(elements, places, strict=True)
    ]


def _bad_annotation(report: Report, located: Located, path: Path, subject: str, error: CniError) -> None:
    if isinstance(fault := _json_error(error), gojson.JsonError) and error.msg.startswith("not JSON"):
        configs.fault(report, "annotation", subject, located, path, fault)
        return
    problem = error.msg.replace(f" (annotation {path[-1]})", "")
    try:
        inner = located.text(*path).json()
        place = inner.place(guessed(inner.value, problem, error.details, base=_element_of(problem, inner.value)))
    except gojson.JsonError:
        element = _element_number(problem)
        items = list(_places(located, path, 0))
        place = items[element]("") if element is not None and element < len(items) else located.place(path)
    report.add_at("error", "annotation", subject, located.source, place, problem, error.details, path=path)


# --- where things are ------------------------------------------------------------------------------------------------


def _json_error(error: BaseException) -> BaseException | None:
    """The innermost cause that is a JsonError."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, gojson.JsonError):
        found = found.__cause__
    return found


def _element_number(problem: str) -> int | None:
    """Of the element that a message about an annotation is about."""
    found = re.search(r"\(element ([0-9]{1,4})\b", problem)
    return int(found[1]) if found else None


def _element_of(problem: str, value: Any) -> Path:
    """The path of that element in a JSON list."""
    number = _element_number(problem)
    return (number,) if number is not None and isinstance(value, list) and number < len(value) else ()


def _places(located: Located, path: Path, count: int) -> Iterator[Callable[[str], Place]]:
    """For each element of the annotation at `path`, which can be read, what finds a key of it."""
    text = located.text(*path)
    try:
        inner = text.json()
    except gojson.JsonError:
        at = 0
        for item in text.text.split(","):
            place = text.place(at + len(item) - len(item.lstrip()))
            yield lambda _, place=place: place  # type: ignore[misc]
            at += len(item) + 1
        return
    for index in range(count):
        yield lambda about, index=index: inner.place(guessed(inner.value, about, base=(index,)))  # type: ignore[misc]
