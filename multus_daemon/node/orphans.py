"""Find and delete orphans: containers on record that the runtime will not delete. Find pods without their networks.

A container is an orphan if

- its network namespace is gone, or another is at its path, or
- its DEL failed and was reported to the runtime as successful, or
- only cached results of it are left, or
- its pod is no longer on this node, and no process lives in its namespace.

The last is certain only when two consecutive looks find it: an ADD may know a pod before the watch does, and its
namespace has no process yet. A namespace with processes is never touched. Records of another daemon are left to GC,
which knows the valid ones.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from multus_daemon.pod import quarantine
from multus_daemon.pod.detach import detach, held_if_free, is_elsewhere
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.records import is_of, without_followed
from multus_daemon.spec.attachment import ContainerRecord, Pod
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.nad import selection
from multus_daemon.spec.ports import StoreUnavailableError

log = logging.getLogger(__name__)

# A listing of 300,000 files takes seconds, and each batch needs one. A batch takes about 10 MB.
_LEFTOVERS_BATCH: Final = 1000


@dataclass(frozen=True, slots=True)
class Orphan:
    """A container that nothing else will delete."""

    record: ContainerRecord
    """Its path of the namespace is empty if nothing may be touched there."""
    reason: str
    is_certain: bool


@dataclass(frozen=True, slots=True)
class Unattached:
    """A pod that runs and lacks networks that it requested."""

    pod: Pod
    networks: tuple[str, ...]
    has_others: bool
    """It has other networks, so its annotation was changed after its start."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of one look."""

    orphans: Mapping[ContainerId, Orphan]
    in_use: Mapping[ContainerId, ContainerRecord]
    """Containers that would be orphans, but processes live in their namespaces."""
    unreadable: tuple[ContainerId, ...]
    aside: int
    """Number of containers that are set aside."""
    unattached: tuple[Unattached, ...]
    unknown_because: str
    """Why the pods of the node are not known; empty if they are."""


def look(engine: Engine) -> Findings:
    """Compare the records with the node; nothing is changed. Raises OSError if records or processes can't be listed."""
    # Records before pods: a pod that comes in between has no record yet, and the pod of each record is known.
    records = engine.records.read_all()
    pods: dict[str, Pod] | None = None
    unknown_because = ""
    try:
        pods = {str(pod): pod for pod in engine.cluster.node_pods()}
    except StoreUnavailableError as error:
        unknown_because = str(error)
    readable = [record for record in records.values() if record is not None]
    suspects = {orphan.record.sandbox.container_id: orphan for orphan in _suspects(engine, readable, pods)}
    in_use = engine.namespaces.netns_in_use({orphan.record.sandbox.netns for orphan in suspects.values()})
    return Findings(
        {name: orphan for name, orphan in suspects.items() if orphan.record.sandbox.netns not in in_use},
        {name: orphan.record for name, orphan in suspects.items() if orphan.record.sandbox.netns in in_use},
        tuple(container_id for container_id, record in records.items() if record is None),
        len(engine.records.store.aside()),
        _unattached(engine, pods.values(), readable) if pods else (),
        unknown_because,
    )


def _suspects(engine: Engine, records: Collection[ContainerRecord], pods: Mapping[str, Pod] | None) -> Iterator[Orphan]:
    vanished = engine.namespaces.vanished({record.sandbox.netns for record in records})
    by_netns = _grouped(records, lambda record: record.sandbox.netns)
    for record in records:
        netns = record.sandbox.netns
        if record.sandbox.container_id in engine.locks.keys:
            continue
        if record.attachments and all(item.detached for item in record.attachments):
            yield Orphan(record.in_netns(""), "its cached results could not be removed", is_certain=True)
        elif netns in vanished:
            # Another namespace may appear at the path.
            yield Orphan(record.in_netns(""), "its network namespace is gone", is_certain=True)
        elif netns and not (placed := without_followed(record, by_netns[netns])).sandbox.netns:
            yield Orphan(placed, "its network namespace is another container's now", is_certain=True)
        elif netns and is_elsewhere(engine.namespaces, record, netns):
            yield Orphan(record.in_netns(""), "its network namespace is another one now", is_certain=True)
        elif record.given_up:
            yield Orphan(record, "its DEL was given up", is_certain=True)
        elif pods is not None and not ((pod := pods.get(record.pod)) and is_of(record, pod)):
            yield Orphan(record, "its pod is no longer on this node", is_certain=False)


def delete(engine: Engine, orphan: Orphan, seconds: float) -> bool:
    """Detach the container; False if it is no orphan any more, or was set aside. Raises CniError, OSError."""
    container_id = orphan.record.sandbox.container_id
    netns = orphan.record.sandbox.netns
    with held_if_free(engine, container_id) as is_ours:
        if not is_ours:
            return False
        [present] = engine.records.read([container_id]).values() or [None]
        if present is None or present.created != orphan.record.created:
            return False
        if netns and netns in engine.namespaces.netns_in_use([netns]):
            return False
        log.info("container %s of pod %s is deleted: %s", container_id, present.pod, orphan.reason)
        try:
            detach(engine, present, engine.namespaces.open(netns), seconds=seconds)
        except CniError as error:
            if not quarantine.quarantine_if_due(engine, container_id, error):
                raise
            return False
        return True


def left_by_others(engine: Engine) -> Iterator[Mapping[ContainerId, ContainerRecord | None]]:
    """Yield the records of another daemon in batches. Raises OSError."""
    seen: set[ContainerId] = set()
    while batch := engine.records.store.leftovers(seen, _LEFTOVERS_BATCH):
        yield batch
        seen |= batch.keys()


def _unattached(engine: Engine, pods: Iterable[Pod], records: Collection[ContainerRecord]) -> tuple[Unattached, ...]:
    """Return the running pods that lack networks. Raises OSError."""
    own = _grouped(records, lambda record: record.pod)
    running = (pod for pod in pods if pod.phase == "Running" and not pod.host_network)
    lacking = [pod for pod in running if _wanted(pod) and _missing(pod, own)]
    if not lacking:
        return ()
    left = [record for batch in left_by_others(engine) for record in batch.values() if record is not None]
    everything = _grouped([*records, *left], lambda record: record.pod)
    found = []
    for pod in lacking:
        if missing := _missing(pod, everything):
            records = [record for record in everything.get(str(pod), ()) if is_of(record, pod)]
            # An ADD attaches all networks that the annotation has, or fails.
            has_others = any(not item.hot_plugged for record in records for item in record.attachments)
            found.append(Unattached(pod, missing, has_others))
    return tuple(found)


def _wanted(pod: Pod) -> Counter[str]:
    """Return the networks of the pod's annotation; none if it is malformed, because its ADD has failed then."""
    annotation = pod.annotations.get(selection.NETWORKS_ANNOTATION, "")
    try:
        return Counter(str(element) for element in selection.parse(annotation, pod_namespace=pod.namespace))
    except CniError:
        return Counter()


def _grouped(
    records: Iterable[ContainerRecord], key: Callable[[ContainerRecord], str]
) -> dict[str, list[ContainerRecord]]:
    groups: dict[str, list[ContainerRecord]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def _missing(pod: Pod, records: Mapping[str, Collection[ContainerRecord]]) -> tuple[str, ...]:
    """Return the requested networks that none of the pod's containers has. Names of hot-plugged ones may differ."""
    wanted = _wanted(pod)
    least = tuple(wanted.elements())
    for record in records.get(str(pod), ()):
        if is_of(record, pod):
            own = Counter(item.name for item in record.attachments if not (item.hot_plugged or item.leaving))
            hot_plugged = sum(item.hot_plugged for item in record.attachments)
            missing = tuple((wanted - own).elements())
            missing = missing if len(missing) > hot_plugged else ()
            least = missing if len(missing) < len(least) else least
    return least
