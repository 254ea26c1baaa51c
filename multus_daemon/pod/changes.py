"""What a change of a running pod's annotation asks for: a value. Pure, as `pod.plan` is.

The elements of the annotation are compared with those that the attachments on record were made for. What stays keeps
its interface name. An element that was changed is another one: its attachment leaves, and it comes anew. So does what
was cut off: the ADD or the DEL of an attachment that has no result, or is marked as leaving, did not end. What was not
attached for an element of the annotation never leaves unless its DEL has begun: the cluster network, the networks of
every pod, those of `/delegate`, and those of an earlier version, whose records do not say for which element they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from multus_daemon.spec.attachment import Attachment, ContainerRecord
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError
from multus_daemon.spec.cni.names import IfName
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.selection import NetworkSelection

NAMES_MAX: Final = 256
"""Largest number of an interface that gets a name."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What follows from an annotation."""

    staying: tuple[Attachment, ...]
    leaving: tuple[Attachment, ...] = ()
    new: tuple[NetworkSelection, ...] = ()
    """In the order of the annotation."""


def wanted(annotation: str, namespace: str) -> tuple[str, ...]:
    """Return the elements of an annotation in canonical form, sorted. Raises CniError."""
    return tuple(sorted(item.canonical for item in selection.parse(annotation, pod_namespace=namespace)))


def between(record: ContainerRecord, elements: Sequence[NetworkSelection]) -> Changes:
    """Return what must leave and what must come for the container to have the networks of `elements`.

    The order of the elements is irrelevant for what stays.
    """
    by_selection: dict[str, list[Attachment]] = {}
    unmarked: list[Attachment] = []
    for item in record.attachments:
        if wanted_by := item.attached_for:
            by_selection.setdefault(wanted_by, []).append(item)
        elif not (item.cluster_network or item.auxiliary):
            unmarked.append(item)
    missing = []
    for element in elements:
        if present := by_selection.get(element.canonical):
            present.pop(0)
        else:
            missing.append(element)
    # Those that name an interface choose first: the others take what is left.
    found = {id(element) for element in sorted(missing, key=_is_unnamed) if _is_there(element, unmarked)}
    new = [element for element in missing if id(element) not in found]
    leaving = [item for items in by_selection.values() for item in items]
    gone = set(map(id, leaving))
    staying = tuple(item for item in record.attachments if id(item) not in gone)
    return Changes(staying, tuple(item for item in record.attachments if id(item) in gone), tuple(new))


def _is_unnamed(element: NetworkSelection) -> bool:
    return not element.interface


def _is_there(element: NetworkSelection, unmarked: list[Attachment]) -> bool:
    """Take the first attachment, of unknown origin, that the element may have been for; return whether there is one."""
    for position, item in enumerate(unmarked):
        if item.name == str(element) and element.interface in ("", item.ifname):
            del unmarked[position]
            return True
    return False


def candidates(changes: Changes) -> Iterator[IfName]:
    """Yield the names that `interface_names` may choose."""
    used = {item.ifname for item in changes.staying} | {IfName(item.interface) for item in changes.new}
    for number in range(1, NAMES_MAX + 1):
        if (name := IfName(f"net{number}")) not in used:
            yield name


def interface_names(changes: Changes, taken: Collection[IfName]) -> list[IfName]:
    """Name the interfaces of the new networks: as the element says, else the lowest free `net<N>`.

    `taken`: names of links in the namespace that no attachment has. Raises InvalidNetworkConfigError (7).
    """
    owners = {item.ifname: item.name for item in changes.staying if not item.auxiliary}
    free = (name for name in candidates(changes) if name not in taken)
    names: list[IfName] = []
    for element in changes.new:
        name = IfName(element.interface) if element.interface else next(free, None)
        if name is None:
            raise InvalidNetworkConfigError(f"no interface name is free up to net{NAMES_MAX}", f"network {element}")
        if owner := owners.get(name):
            raise InvalidNetworkConfigError(
                f"interface name {name!r} of network {element} is taken by network {owner}",
                "each network of a pod needs a name of its own",
            )
        if name in taken:
            raise InvalidNetworkConfigError(
                f"interface {name!r} already exists in the pod", f"network {element} needs that name"
            )
        owners[name] = str(element)
        names.append(name)
    return names


def refuse_second_gateway(changes: Changes) -> None:
    """Refuse a new network with a default route beside one that stays. Raises InvalidNetworkConfigError (7)."""
    asking = next((item for item in changes.new if item.default_route), None)
    holding = next((item for item in changes.staying if item.default_route), None)
    if asking and holding:
        raise InvalidNetworkConfigError(
            f"default-route is set twice: for network {holding.name} and for network {asking}",
            "remove it from one of them",
        )
