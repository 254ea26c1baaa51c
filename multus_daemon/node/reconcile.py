"""Compare the records with the node, at start and periodically: delete orphans, report pods without their networks.

A container is an orphan if

- its network namespace is gone, or another is at its path, or
- the runtime was told that its DEL succeeded although it failed, or
- its pod is no longer on this node, and no process lives in its namespace.

The last is certain only when two consecutive looks find it: an ADD may know a pod before the watch does, and its
namespace has no process yet. A namespace with processes is never touched. Records of another daemon are left to GC,
which knows the valid ones.

A run has a budget, and a container that fails waits longer each time. Its record is kept, each try is logged, a gauge
counts it, and one Event reports it. Pods that run without networks that they requested are only reported.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from multus_daemon import deadlines
from multus_daemon.metrics import DeleteMetrics
from multus_daemon.pod import aside, detach, schedule
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.records import held_if_free, is_elsewhere, is_of, read, read_all, without_followed
from multus_daemon.runtime import portal
from multus_daemon.runtime.aio import side_by_side
from multus_daemon.runtime.backoff import backoff
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.spec.attachment import ContainerRecord, Pod
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.nad import selection
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX, Events, StoreUnavailableError

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

    orphans: Mapping[ContainerId, Orphan] = field(default_factory=dict)
    in_use: Mapping[ContainerId, ContainerRecord] = field(default_factory=dict)
    """Containers that would be orphans, but processes live in their namespaces."""
    unreadable: tuple[ContainerId, ...] = ()
    aside: int = 0
    """Number of containers that are set aside."""
    unattached: tuple[Unattached, ...] = ()
    unknown_because: str = ""
    """Why the pods of the node are not known; empty if they are."""


@dataclass(slots=True)
class _Failure:
    """Retries of a container that could not be deleted."""

    due: float = 0.0
    """On the event loop's clock."""
    delays: Iterator[float] = field(default_factory=lambda: backoff(*deadlines.RECONCILE_RETRY_SECONDS, jitter=0.1))


class Reconcile:
    """A root task."""

    def __init__(
        self, engine: Engine, events: Events, metrics: DeleteMetrics, *, seconds: float, tidy: Callable[[], None]
    ) -> None:
        """`seconds`: from one run to the next. `tidy` removes stale files in `cniDir`; it may raise OSError."""
        self._engine = engine
        self._tidy = tidy
        self._events = events
        self._metrics = metrics
        self._seconds = seconds
        self._suspected: set[tuple[ContainerId, float]] = set()
        self._failures: dict[ContainerId, _Failure] = {}
        self._lacking: set[str] = set()
        self._reported: set[str] = set()
        self._unknown_because = ""
        self.left = 0
        """Containers that the last run could not delete, or not read."""

    async def run(self) -> None:
        """Reconcile forever."""
        while True:
            try:
                await self.reconcile()
            except Exception as error:
                # A fault in one record must not stop the daemon.
                log.error(
                    "records can't be compared with what lives, tried again in %g s: %s",
                    self._seconds, error, exc_info=not isinstance(error, OSError),
                )  # fmt: skip
            # A starting daemon does not know its pods yet.
            soon = min(self._seconds, deadlines.RECONCILE_BLIND_SECONDS)
            await asyncio.sleep(soon if self._unknown_because else self._seconds)

    async def reconcile(self) -> None:
        """Run once. Raises OSError if records or processes can't be listed."""
        found = await portal.run(Deadline(), self._look, name="reconcile")
        if found.unknown_because and found.unknown_because != self._unknown_because:
            log.info("only containers whose network namespace is gone are deleted: %s", found.unknown_because)
        self._unknown_because = found.unknown_because
        self._failures = {name: failure for name, failure in self._failures.items() if name in found.orphans}
        end = _now() + deadlines.RECONCILE_RUN_SECONDS
        left: set[ContainerId] = set()
        await side_by_side(self._confirmed(found), functools.partial(self._delete, end, left), at_once=schedule.AT_ONCE)
        leftovers = self._metrics.leftovers
        leftovers.labels("orphans").set(len(left))
        leftovers.labels("inhabited").set(len(found.in_use))
        leftovers.labels("unreadable").set(len(found.unreadable))
        leftovers.labels("aside").set(found.aside)
        self.left = len(left) + len(found.unreadable)
        if found.unreadable:
            log.warning("records of these containers can't be read: %s", ", ".join(found.unreadable[:10]))
        if not found.unknown_because:
            self._report_unattached(found.unattached)

    def _look(self) -> Findings:
        try:
            self._tidy()
        except OSError as error:
            log.error("what was left in cniDir can't be removed: %s", error)
        return look(self._engine)

    def _confirmed(self, found: Findings) -> list[Orphan]:
        """Return the orphans that are certain, or that the previous run found too."""
        before = self._suspected
        self._suspected = {
            (name, orphan.record.created) for name, orphan in found.orphans.items() if not orphan.is_certain
        }
        return [
            orphan
            for name, orphan in found.orphans.items()
            if orphan.is_certain or (name, orphan.record.created) in before
        ]

    async def _delete(self, end: float, left: set[ContainerId], orphan: Orphan) -> None:
        container_id = orphan.record.sandbox.container_id
        left.add(container_id)
        failure = self._failures.get(container_id)
        seconds = min(deadlines.RECONCILE_CONTAINER_SECONDS, end - _now())
        if seconds <= 0 or (failure and failure.due > _now()):
            return
        count = len(orphan.record.attachments)
        try:
            work = functools.partial(delete, self._engine, orphan, seconds)
            deleted = await portal.run(Deadline(), work, name="reconcile")
        except Exception as error:
            self._failed(orphan, error)
            self._metrics.orphans.labels("failed").inc(count)
            return
        left.discard(container_id)
        self._failures.pop(container_id, None)
        if deleted:
            self._metrics.orphans.labels("deleted").inc(count)

    def _failed(self, orphan: Orphan, error: Exception) -> None:
        container_id = orphan.record.sandbox.container_id
        text = f"container {container_id} of pod {orphan.record.pod} can't be deleted ({orphan.reason}): {error}"
        failure = self._failures.get(container_id)
        if failure is None:
            failure = self._failures[container_id] = _Failure()
            self._events.node_event("Warning", "OrphanNotDeleted", text[:EVENT_MESSAGE_MAX])
        delay = next(failure.delays)
        failure.due = _now() + delay
        log.warning("%s; tried again in %.0f s", text, delay)

    def _report_unattached(self, found: tuple[Unattached, ...]) -> None:
        """Report each pod once, when a second look confirms it: a hot-plug may be under way."""
        lacking = {item.pod.uid for item in found}
        confirmed = [item for item in found if item.pod.uid in self._lacking]
        self._metrics.lacking.set(len(confirmed))
        for item in confirmed:
            if item.pod.uid not in self._reported:
                text = f"the pod runs without networks that it asked for: {', '.join(item.networks)}; {_advice(item)}"
                log.warning("pod %s: %s", item.pod, text)
                self._events.event(item.pod, "Warning", "NetworksMissing", text[:EVENT_MESSAGE_MAX])
        self._reported = (self._reported & lacking) | {item.pod.uid for item in confirmed}
        self._lacking = set(lacking)


def _advice(item: Unattached) -> str:
    # A new pod is made from the template, so it would lack an edited annotation.
    if item.has_others:
        return (
            "its annotation was changed after its start, when networks are attached: put them into the template that "
            "the pod is made from; a pod that runs gets them only from a hot-plug controller"
        )
    return "was it started while the runtime did not use Multus? delete it, so that it is made again"


def _now() -> float:
    return asyncio.get_running_loop().time()


# --- orphans ---------------------------------------------------------------------------------------------------------


def look(engine: Engine) -> Findings:
    """Compare the records with the node; nothing is changed. Raises OSError if records or processes can't be listed."""
    # Records before pods: a pod that comes in between has no record yet, and the pod of each record is known.
    records = read_all(engine)
    pods: dict[str, Pod] | None = None
    unknown_because = ""
    try:
        pods = {str(pod): pod for pod in engine.cluster.node_pods()}
    except StoreUnavailableError as error:
        unknown_because = str(error)
    readable = [record for record in records.values() if record is not None]
    suspects = {orphan.record.sandbox.container_id: orphan for orphan in _suspects(engine, readable, pods)}
    in_use = engine.links.netns_in_use({orphan.record.sandbox.netns for orphan in suspects.values()})
    return Findings(
        {name: orphan for name, orphan in suspects.items() if orphan.record.sandbox.netns not in in_use},
        {name: orphan.record for name, orphan in suspects.items() if orphan.record.sandbox.netns in in_use},
        tuple(container_id for container_id, record in records.items() if record is None),
        len(engine.store.aside()),
        _unattached(engine, pods.values(), readable) if pods else (),
        unknown_because,
    )


def _suspects(engine: Engine, records: Collection[ContainerRecord], pods: Mapping[str, Pod] | None) -> Iterator[Orphan]:
    vanished = engine.links.vanished({record.sandbox.netns for record in records})
    by_netns = _grouped(records, lambda record: record.sandbox.netns)
    for record in records:
        netns = record.sandbox.netns
        if record.sandbox.container_id in engine.locks.keys:
            continue
        if netns in vanished:
            # Another namespace may appear at the path.
            yield Orphan(record.in_netns(""), "its network namespace is gone", is_certain=True)
        elif netns and not (placed := without_followed(record, by_netns[netns])).sandbox.netns:
            yield Orphan(placed, "its network namespace is another container's now", is_certain=True)
        elif netns and is_elsewhere(engine, record, netns):
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
        [present] = read(engine, [container_id]).values() or [None]
        if present is None or present.created != orphan.record.created:
            return False
        if netns and netns in engine.links.netns_in_use([netns]):
            return False
        log.info("container %s of pod %s is deleted: %s", container_id, present.pod, orphan.reason)
        try:
            detach.detach(engine, present, netns, seconds=seconds)
        except CniError as error:
            if not aside.set_aside_if_due(engine, container_id, error):
                raise
            return False
        return True


def left_by_others(engine: Engine) -> Iterator[Mapping[ContainerId, ContainerRecord | None]]:
    """Yield the records of another daemon in batches. Raises OSError."""
    seen: set[ContainerId] = set()
    while batch := engine.store.leftovers(seen, _LEFTOVERS_BATCH):
        yield batch
        seen |= batch.keys()


# --- pods without their networks -------------------------------------------------------------------------------------


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
            own = Counter(item.name for item in record.attachments if not item.hot_plugged)
            hot_plugged = sum(item.hot_plugged for item in record.attachments)
            missing = tuple((wanted - own).elements())
            missing = missing if len(missing) > hot_plugged else ()
            least = missing if len(missing) < len(least) else least
    return least
