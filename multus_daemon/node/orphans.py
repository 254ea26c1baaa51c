"""Find and delete orphans, containers on record that the runtime will not delete: a root task.

A container is an orphan if

- its network namespace is gone, or another one is at its path, or
- its DEL failed and was reported to the runtime as successful, or an earlier daemon has begun it, or
- only cached results of it are left, or
- its pod is no longer on this node, and no process runs in its namespace.

The last is certain only when two consecutive searches find it: an ADD may know a pod before the watch does, when its
namespace has no process yet. A namespace with processes is never touched. Upstream's records are left to GC.

The time of a run is limited. A container whose DEL fails waits longer each time, except after errors of the disk: when
it works again, the next run deletes all. A failed container stays on record; each attempt is logged, a gauge counts it,
and one Event reports it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from multus_daemon import deadlines
from multus_daemon.pod import schedule
from multus_daemon.pod.delete import quarantine_if_due
from multus_daemon.pod.detach import detach, held_if_free, is_elsewhere
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.records import is_of
from multus_daemon.pod.view import Entry
from multus_daemon.runtime import portal
from multus_daemon.runtime.aio import at_most
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.workqueue import WorkQueue
from multus_daemon.spec.attachment import ContainerRecord, Pod
from multus_daemon.spec.cni.errors import CniError, IoFailureError, fault
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.ports import StoreUnavailableError

log = logging.getLogger(__name__)

DEGRADED: Final = "leftovers"
"""Key in `degraded` of `/readyz` while records can't be compared with the node."""
# A listing of 300,000 files takes seconds, and each batch needs one. A batch takes about 10 MB.
_LEFTOVERS_BATCH: Final = 1000


@dataclass(frozen=True, slots=True)
class Orphan:
    """A container on record that neither the runtime nor a request will delete."""

    entry: Entry
    reason: str
    netns: str = ""
    """Path of its network namespace; empty if plugins must not touch a namespace."""
    is_certain: bool = True


@dataclass(frozen=True, slots=True)
class Findings:
    """What one search for orphaned containers has found."""

    orphans: Mapping[ContainerId, Orphan]
    in_use: frozenset[ContainerId]
    """Containers without a pod that are no orphans, because processes run in their namespaces."""
    unreadable: frozenset[ContainerId]
    aside: int
    """Number of containers that are set aside."""
    unknown_because: str
    """Why the pods of the node are not known; empty if they are."""


class Orphans:
    """Finds and deletes orphans; `run` is a root task."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seconds = engine.settings.deletes.reconcile_seconds
        self._suspected: set[tuple[ContainerId, float]] = set()
        self._orphans: dict[ContainerId, Orphan] = {}
        """Those that the present run deletes."""
        self._end = 0.0
        """Until when it begins deletions, on the event loop's clock."""
        self._queue = WorkQueue[ContainerId](
            self._delete,
            retry=deadlines.RECONCILE_RETRY_SECONDS,
            failed=self._failed,
            pause=_pause,
            at_once=schedule.AT_ONCE,
        )
        self._unknown_because = ""

    @property
    def failed(self) -> dict[str, str]:
        """The last error of each orphan that could not be deleted, by container id."""
        return {str(name): problem for name, problem in self._queue.problems.items()}

    async def run(self, spooled: asyncio.Event) -> None:
        """Reconcile forever, after `spooled`: first the DELs of the spool, which have the paths of their namespaces."""
        await at_most(deadlines.RECONCILE_RUN_SECONDS, spooled.wait())
        while True:
            try:
                await self.delete_orphans()
                self._engine.gates.degraded.open(DEGRADED)
            except Exception as error:
                # A fault in one record must not stop the daemon.
                text = f"what deleted pods left is not removed: records can't be compared with the node: {error}"
                log.error("%s", text, exc_info=not isinstance(error, OSError))
                self._engine.gates.degraded.close(DEGRADED, f"{text}; tried again in {self._seconds:g} s")
            # A starting daemon does not know its pods yet.
            soon = min(self._seconds, deadlines.RECONCILE_BLIND_SECONDS)
            await asyncio.sleep(soon if self._unknown_because else self._seconds)

    async def delete_orphans(self) -> None:
        """Find and delete orphans once. Raises OSError if records or processes can't be listed."""
        found = await portal.run(Deadline(), self._look, name="orphans")
        if found.unknown_because and found.unknown_because != self._unknown_because:
            log.info("containers of deleted pods can't be found now: %s", found.unknown_because)
        self._unknown_because = found.unknown_because
        for name in self._queue.problems.keys() - found.orphans.keys():
            self._queue.forget(name)
        self._orphans = {orphan.entry.container_id: orphan for orphan in self._confirmed(found)}
        self._end = _now() + deadlines.RECONCILE_RUN_SECONDS
        for name in self._orphans:
            self._queue.add_after(name, 0)
        await self._queue.drain_once()
        leftovers = self._engine.metrics.leftovers
        leftovers.labels("orphans").set(len(self._orphans))
        leftovers.labels("inhabited").set(len(found.in_use))
        leftovers.labels("unreadable").set(len(found.unreadable))
        leftovers.labels("aside").set(found.aside)
        if found.unreadable:
            log.warning("records of these containers can't be read: %s", ", ".join(sorted(found.unreadable)[:10]))

    def _look(self) -> Findings:
        try:
            self._engine.records.store.tidy()
        except OSError as error:
            log.error("stale files in cniDir can't be removed: %s", error)
        return look(self._engine)

    def _confirmed(self, found: Findings) -> list[Orphan]:
        """Return the orphans that are certain, or that the previous search found, too."""
        before = self._suspected
        self._suspected = {
            (name, orphan.entry.created) for name, orphan in found.orphans.items() if not orphan.is_certain
        }
        return [
            orphan
            for name, orphan in found.orphans.items()
            if orphan.is_certain or (name, orphan.entry.created) in before
        ]

    async def _delete(self, container_id: ContainerId) -> None:
        orphan = self._orphans[container_id]
        seconds = min(deadlines.RECONCILE_CONTAINER_SECONDS, self._end - _now())
        if seconds <= 0:
            return
        work = functools.partial(delete, self._engine, orphan, seconds)
        deleted = await portal.run(Deadline(), work, name="orphans")
        del self._orphans[container_id]
        if deleted:
            self._engine.metrics.orphans.labels("success").inc(len(orphan.entry.networks))

    def _failed(self, container_id: ContainerId, error: Exception, seconds: float) -> None:
        orphan = self._orphans[container_id]
        self._engine.metrics.orphans.labels("error").inc(len(orphan.entry.networks))
        text = f"container {container_id} of pod {orphan.entry.pod} can't be deleted ({orphan.reason}): {error}"
        if self._queue.failures(container_id) == 1:
            self._engine.cluster.node_event("Warning", "OrphanNotDeleted", text)
        log.warning("%s; tried again in %.0f s", text, seconds, exc_info=fault(error))


def look(engine: Engine) -> Findings:
    """Search for orphans, without a change. Raises OSError if records or processes can't be listed."""
    # Records before pods: a pod that comes in between has no record yet, and the pod of each record is known.
    engine.records.refresh()
    pods: dict[str, Pod] | None = None
    unknown_because = ""
    try:
        pods = {str(pod): pod for pod in engine.cluster.node_pods()}
    except StoreUnavailableError as error:
        unknown_because = str(error)
    suspects = {orphan.entry.container_id: orphan for orphan in _suspects(engine, pods)}
    in_use = engine.namespaces.netns_in_use({orphan.netns for orphan in suspects.values()})
    return Findings(
        {name: orphan for name, orphan in suspects.items() if orphan.netns not in in_use},
        frozenset(name for name, orphan in suspects.items() if orphan.netns in in_use),
        engine.records.view.unreadable,
        len(engine.records.store.aside()),
        unknown_because,
    )


def _suspects(engine: Engine, pods: Mapping[str, Pod] | None) -> Iterator[Orphan]:
    view, at_work = engine.records.view, engine.at_work
    vanished = engine.namespaces.vanished({entry.netns for entry in view})
    for entry in view:
        netns = entry.netns
        if entry.container_id in at_work:
            continue
        if entry.detached:
            yield Orphan(entry, "its cached results could not be removed")
        elif netns in vanished:
            # Another namespace may appear at the path.
            yield Orphan(entry, "its network namespace is gone")
        elif netns and any(entry.is_followed_by(other) for other in view.at(netns)):
            yield Orphan(entry, "its network namespace is another container's now")
        elif netns and is_elsewhere(engine.namespaces, entry.netns_id, netns):
            yield Orphan(entry, "its network namespace is another one now")
        elif entry.given_up:
            yield Orphan(entry, "its DEL was given up", netns)
        elif entry.container_id in engine.records.given_up:
            # A predecessor may still be at work on it.
            yield Orphan(entry, "its DEL has begun, and may have been given up", netns, is_certain=view.is_complete)
        elif pods is not None and not ((pod := pods.get(entry.pod)) and is_of(entry, pod)):
            yield Orphan(entry, "its pod is no longer on this node", netns, is_certain=False)


def delete(engine: Engine, orphan: Orphan, seconds: float) -> bool:
    """Detach the container; return False if it is no longer an orphan, or was set aside. Raises CniError, OSError."""
    container_id, netns = orphan.entry.container_id, orphan.netns
    with held_if_free(engine, container_id) as is_ours:
        if not is_ours:
            return False
        [present] = engine.records.read([container_id]).values() or [None]
        if present is None or present.created != orphan.entry.created:
            return False
        if netns and netns in engine.namespaces.netns_in_use([netns]):
            return False
        log.info("container %s of pod %s is deleted: %s", container_id, present.pod, orphan.reason)
        try:
            detach(engine, present, engine.namespaces.open(netns), seconds=seconds)
        except CniError as error:
            if not quarantine_if_due(engine, container_id, error):
                raise
            return False
        return True


def left_by_others(engine: Engine) -> Iterator[Mapping[ContainerId, ContainerRecord | None]]:
    """Yield upstream's records in batches. Raises OSError."""
    seen: set[ContainerId] = set()
    while batch := engine.records.store.leftovers(seen, _LEFTOVERS_BATCH):
        yield batch
        seen |= batch.keys()


def _pause(error: Exception, seconds: float) -> float:
    """Return the pause after a failure in seconds: 0 after an error of the disk, else `seconds`."""
    return 0.0 if isinstance(error, IoFailureError | OSError) else seconds


def _now() -> float:
    return asyncio.get_running_loop().time()
