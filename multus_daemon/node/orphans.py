"""Orphans: containers that are on record and that no runtime will delete any more. And pods without their networks.

A container is an orphan where

- its network namespace is gone, or another is at its path now, or
- the runtime was told that its DEL is done though something was left, or
- its pod is no longer on this node, and no process lives in its namespace.

The first two are certain. The last is so only when it is found twice in a row: a pod may be known to the ADD before the
watch tells of it, and its namespace has no process yet. A namespace in which processes live is never touched. Records
that another daemon left are not looked at: GC knows which of them are valid.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from multus_daemon.pod import quarantine
from multus_daemon.pod.delete import detach, held_if_free, is_elsewhere
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.records import is_of, without_followed
from multus_daemon.spec.attachment import ContainerRecord, Pod
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.nad import selection
from multus_daemon.spec.ports import StoreUnavailableError

log = logging.getLogger(__name__)

_LEFTOVERS_BATCH: Final = 1000


@dataclass(frozen=True, slots=True)
class Orphan:
    """A container that ought to be gone."""

    record: ContainerRecord
    """Its namespace is empty where nothing may be touched in it."""
    reason: str
    is_certain: bool


@dataclass(frozen=True, slots=True)
class Unattached:
    """A pod that runs and lacks networks that it asked for."""

    pod: Pod
    networks: tuple[str, ...]
    has_others: bool
    """True where it has been given networks, so that its annotation has been changed since; else it was given none."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What one look has found."""

    orphans: Mapping[ContainerId, Orphan] = field(default_factory=dict)
    in_use: Mapping[ContainerId, ContainerRecord] = field(default_factory=dict)
    """Would be orphans, but processes live in their namespaces."""
    unreadable: tuple[ContainerId, ...] = ()
    aside: int = 0
    """How many containers are set aside."""
    unattached: tuple[Unattached, ...] = ()
    unknown_because: str = ""
    """Why it is not known which pods there are; empty where it is."""


def look(engine: Engine) -> Findings:
    """What there is now; touches nothing. Raises OSError where records or processes can't be listed."""
    # First: a pod that comes later is in neither, one that is on record is known by then.
    records = engine.records.read_all()
    pods: _Pods | None = None
    unknown_because = ""
    try:
        pods = _Pods(engine.cluster.node_pods())
    except StoreUnavailableError as error:
        unknown_because = str(error)
    readable = [record for record in records.values() if record is not None]
    found = _suspects(engine, readable, pods)
    in_use = engine.links.netns_in_use({orphan.record.sandbox.netns for orphan in found})
    return Findings(
        {orphan.record.sandbox.container_id: orphan for orphan in found if orphan.record.sandbox.netns not in in_use},
        {
            orphan.record.sandbox.container_id: orphan.record
            for orphan in found
            if orphan.record.sandbox.netns in in_use
        },
        tuple(container_id for container_id, record in records.items() if record is None),
        len(engine.records.store.aside()),
        _unattached(engine, pods, readable) if pods else (),
        unknown_because,
    )


def _suspects(engine: Engine, records: Collection[ContainerRecord], pods: _Pods | None) -> list[Orphan]:
    vanished = engine.links.vanished({record.sandbox.netns for record in records})
    found: list[Orphan] = []
    by_netns: dict[str, list[ContainerRecord]] = {}
    for record in records:
        by_netns.setdefault(record.sandbox.netns, []).append(record)
    for record in records:
        netns = record.sandbox.netns
        if record.sandbox.container_id in engine.locks.keys:
            continue
        if netns in vanished:
            # Nothing may be done at that path either: it could be there again by then, as another's.
            found.append(Orphan(record.in_netns(""), "its network namespace is gone", is_certain=True))
        elif netns and not (placed := without_followed(record, by_netns[netns])).sandbox.netns:
            found.append(Orphan(placed, "its network namespace is another container's now", is_certain=True))
        elif netns and is_elsewhere(engine.links, record, netns):
            found.append(Orphan(record.in_netns(""), "its network namespace is another one now", is_certain=True))
        elif record.given_up:
            found.append(Orphan(record, "its DEL was given up", is_certain=True))
        elif pods is not None and not pods.has(record):
            found.append(Orphan(record, "its pod is no longer on this node", is_certain=False))
    return found


def delete(engine: Engine, orphan: Orphan, seconds: float) -> bool:
    """Detach it; False where it is none any more. What fails stays on record, for a day. Raises CniError, OSError."""
    container_id = orphan.record.sandbox.container_id
    netns = orphan.record.sandbox.netns
    with held_if_free(engine.locks, container_id) as is_ours:
        if not is_ours:
            return False
        [present] = engine.records.read([container_id]).values() or [None]
        if present is None or present.created != orphan.record.created:
            return False
        if netns and netns in engine.links.netns_in_use([netns]):
            return False
        log.info("container %s of pod %s is deleted: %s", container_id, present.pod, orphan.reason)
        try:
            detach(engine, present, engine.links.open(netns), seconds=seconds)
        except CniError as error:
            if not quarantine.quarantine_if_due(engine, container_id, error):
                raise
            return False
        return True


# --- pods without their networks ---------------------------------------------------------------------------------


def _unattached(engine: Engine, pods: _Pods, records: Collection[ContainerRecord]) -> tuple[Unattached, ...]:
    """Running pods that lack what they asked for. Raises OSError."""
    wanting = [pod for pod in pods.all if pod.phase == "Running" and not pod.host_network and _wanted(pod)]
    own = _by_pod(records)
    lacking = [pod for pod in wanting if _missing(pod, own)]
    if not lacking:
        return ()
    everything = _by_pod([*records, *_left_by_others(engine)])
    return tuple(
        Unattached(pod, missing, _has_networks(pod, everything))
        for pod in lacking
        if (missing := _missing(pod, everything))
    )


def _has_networks(pod: Pod, records: Mapping[str, Collection[ContainerRecord]]) -> bool:
    """Whether the runtime's ADD for the pod is on record: it gives all networks of the annotation, or fails."""
    own = [record for record in records.get(str(pod), ()) if is_of(record, pod)]
    return any(not item.hot_plugged for record in own for item in record.attachments)


def _left_by_others(engine: Engine) -> list[ContainerRecord]:
    """What another daemon has attached. Raises OSError."""
    seen: set[ContainerId] = set()
    records: list[ContainerRecord] = []
    while found := engine.records.store.leftovers(seen, _LEFTOVERS_BATCH):
        records += [record for record in found.values() if record is not None]
        seen |= found.keys()
    return records


class _Pods:
    """The pods of the node."""

    def __init__(self, pods: Collection[Pod]) -> None:
        self.all = pods
        self._by_name = {(pod.namespace, pod.name): pod for pod in pods}

    def has(self, record: ContainerRecord) -> bool:
        pod = self._by_name.get((record.pod_namespace, record.pod_name))
        return pod is not None and is_of(record, pod)


def _wanted(pod: Pod) -> Counter[str]:
    """The networks of the pod's annotation; none where it can't be read, for then its ADD has failed."""
    annotation = pod.annotations.get(selection.NETWORKS_ANNOTATION, "")
    try:
        return Counter(str(element) for element in selection.parse(annotation, pod_namespace=pod.namespace))
    except CniError:
        return Counter()


def _by_pod(records: Collection[ContainerRecord]) -> dict[str, list[ContainerRecord]]:
    found: dict[str, list[ContainerRecord]] = {}
    for record in records:
        found.setdefault(record.pod, []).append(record)
    return found


def _missing(pod: Pod, records: Mapping[str, Collection[ContainerRecord]]) -> tuple[str, ...]:
    """What the pod asked for and none of its containers has: of what is hot-plugged the names may differ."""
    least: tuple[str, ...] | None = None
    for record in records.get(str(pod), ()):
        if is_of(record, pod):
            own = Counter(item.name for item in record.attachments if not item.hot_plugged)
            hot_plugged = sum(item.hot_plugged for item in record.attachments)
            missing = tuple((_wanted(pod) - own).elements())
            missing = missing if len(missing) > hot_plugged else ()
            least = missing if least is None or len(missing) < len(least) else least
    return tuple(_wanted(pod).elements()) if least is None else least
