"""Networks that a pod's annotation asks for, and that its network-status does not have. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.nad import selection, status
from multus_daemon.spec.nad.selection import NetworkSelection


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


def of(namespace: str, annotations: Mapping[str, str]) -> Networks:
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
