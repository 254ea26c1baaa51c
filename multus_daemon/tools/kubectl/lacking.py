"""Which networks a pod lacks: those that its annotation asks for, and its network-status does not have. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.nad import selection, status
from multus_daemon.spec.nad.selection import NetworkSelection


@dataclass(frozen=True, slots=True)
class Networks:
    """What a pod asks for, and what it has."""

    wanted: tuple[NetworkSelection, ...] = ()
    attached: tuple[str, ...] = ()
    """`NETWORK@INTERFACE` of the entries of its network-status."""
    lacks: tuple[str, ...] = ()
    """`NAMESPACE/NAME`, and `@INTERFACE` where it asks for one."""
    problem: str = ""
    """Why its annotation can't be read; then it gets nothing."""


def of(namespace: str, annotations: Mapping[str, str]) -> Networks:
    """The networks of a pod of `namespace`."""
    entries = _entries(annotations.get(status.ANNOTATION, ""))
    attached = tuple(f"{name}@{interface}" for name, interface in entries)
    text = annotations.get(selection.NETWORKS_ANNOTATION, "")
    try:
        wanted = selection.parse(text, pod_namespace=namespace)
    except CniError as error:
        return Networks((), attached, (text if len(text) <= 80 else f"{text[:80]}...",), str(error))
    return Networks(wanted, attached, tuple(_missing(wanted, entries)))


def _missing(wanted: tuple[NetworkSelection, ...], entries: list[tuple[str, str]]) -> list[str]:
    left = Counter(name for name, _ in entries)
    found = []
    for element in wanted:
        name = str(element)
        if element.interface and (name, element.interface) not in entries:
            found.append(f"{name}@{element.interface}")
        elif not left[name]:
            found.append(name)
        else:
            left[name] -= 1
    return found


def _entries(text: str) -> list[tuple[str, str]]:
    """Name and interface of each entry of a network-status; none of one that is none."""
    try:
        found = gojson.loads(text) if text else []
    except gojson.JsonError:
        return []
    items = [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
    return [(str(item.get("name", "")), str(item.get("interface", ""))) for item in items]
