"""Compare the records with the node and the API server: root tasks that repair differences.

`Reconcile` runs at start and periodically. It deletes orphans (`node.orphans`) and reports pods without their networks.
A run has a budget, and a container that fails waits longer each time. Its record is kept, each try is logged, a gauge
counts it, and one Event reports it.

`StatusesAtStart` updates outdated network-statuses (`pod.statuses`) once, when the node's pods are known.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from multus_daemon import deadlines
from multus_daemon.metrics import DeleteMetrics
from multus_daemon.node import orphans
from multus_daemon.node.orphans import Findings, Orphan, Unattached
from multus_daemon.pod import schedule
from multus_daemon.pod.engine import Engine
from multus_daemon.runtime import portal
from multus_daemon.runtime.aio import side_by_side
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.workqueue import WorkQueue
from multus_daemon.spec.cni.errors import fault
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX, Events, StoreUnavailableError

log = logging.getLogger(__name__)

DEGRADED: Final = "leftovers"
"""Name of the degradation while records can't be compared with the node."""


class Reconcile:
    """A root task that deletes orphans, and detaches what a failed DEL has left."""

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
        self._orphans: dict[ContainerId, Orphan] = {}
        """Those that the present run deletes."""
        self._end = 0.0
        """Until when it begins deletions, on the event loop's clock."""
        self._queue = WorkQueue[ContainerId](
            self._delete, retry=deadlines.RECONCILE_RETRY_SECONDS, failed=self._failed, at_once=schedule.AT_ONCE
        )
        self._lacking: set[str] = set()
        self._reported: set[str] = set()
        self._unknown_because = ""
        self.left = 0
        """Containers that the last run could not delete, or not read."""

    @property
    def failed(self) -> dict[str, str]:
        """The errors of the containers that could not be deleted."""
        return {str(name): problem for name, problem in self._queue.problems.items()}

    async def run(self, spooled: asyncio.Event) -> None:
        """Reconcile forever, after `spooled`: the DELs of the spool know the path of a namespace that is gone."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(spooled.wait(), deadlines.RECONCILE_RUN_SECONDS)
        while True:
            try:
                await self.reconcile()
                self._engine.gates.degraded.open(DEGRADED)
            except Exception as error:
                # A fault in one record must not stop the daemon.
                text = f"what deleted pods left is not removed: records can't be compared with the node: {error}"
                log.error("%s", text, exc_info=not isinstance(error, OSError))
                self._engine.gates.degraded.close(DEGRADED, f"{text}; tried again in {self._seconds:g} s")
            # A starting daemon does not know its pods yet.
            soon = min(self._seconds, deadlines.RECONCILE_BLIND_SECONDS)
            await asyncio.sleep(soon if self._unknown_because else self._seconds)

    async def reconcile(self) -> None:
        """Run once. Raises OSError if records or processes can't be listed."""
        found = await portal.run(Deadline(), self._look, name="reconcile")
        if found.unknown_because and found.unknown_because != self._unknown_because:
            log.info("containers of deleted pods are not detected: %s", found.unknown_because)
        self._unknown_because = found.unknown_because
        for name in self._queue.problems.keys() - found.orphans.keys():
            self._queue.forget(name)
        self._orphans = {orphan.record.sandbox.container_id: orphan for orphan in self._confirmed(found)}
        self._end = _now() + deadlines.RECONCILE_RUN_SECONDS
        for name in self._orphans:
            self._queue.add_after(name, 0)
        await self._queue.drain_once()
        left = len(self._orphans)
        leftovers = self._metrics.leftovers
        leftovers.labels("orphans").set(left)
        leftovers.labels("inhabited").set(len(found.in_use))
        leftovers.labels("unreadable").set(len(found.unreadable))
        leftovers.labels("aside").set(found.aside)
        self.left = left + len(found.unreadable)
        if found.unreadable:
            log.warning("records of these containers can't be read: %s", ", ".join(found.unreadable[:10]))
        if not found.unknown_because:
            self._report_unattached(found.unattached)

    def _look(self) -> Findings:
        try:
            self._tidy()
        except OSError as error:
            log.error("stale files in cniDir can't be removed: %s", error)
        return orphans.look(self._engine)

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

    async def _delete(self, container_id: ContainerId) -> None:
        orphan = self._orphans[container_id]
        seconds = min(deadlines.RECONCILE_CONTAINER_SECONDS, self._end - _now())
        if seconds <= 0:
            return
        work = functools.partial(orphans.delete, self._engine, orphan, seconds)
        deleted = await portal.run(Deadline(), work, name="reconcile")
        del self._orphans[container_id]
        if deleted:
            self._metrics.orphans.labels("success").inc(len(orphan.record.attachments))

    def _failed(self, container_id: ContainerId, error: Exception, seconds: float) -> None:
        orphan = self._orphans[container_id]
        self._metrics.orphans.labels("error").inc(len(orphan.record.attachments))
        text = f"container {container_id} of pod {orphan.record.pod} can't be deleted ({orphan.reason}): {error}"
        if self._queue.failures(container_id) == 1:
            self._events.node_event("Warning", "OrphanNotDeleted", text[:EVENT_MESSAGE_MAX])
        log.warning("%s; tried again in %.0f s", text, seconds, exc_info=fault(error))

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


class StatusesAtStart:
    """A root task. The functions are those of `pod.statuses`, without blocking the event loop."""

    def __init__(
        self,
        outdated: Callable[[], Awaitable[Sequence[ContainerId]]],
        bring_up_to_date: Callable[[ContainerId], Awaitable[bool]],
    ) -> None:
        self._list_outdated = outdated
        self._write = bring_up_to_date

    async def run(self) -> None:
        """Update the statuses, then wait forever: the daemon stops when a root task ends."""
        try:
            await self.bring_up_to_date()
        except Exception as error:
            # A fault in one record must not stop the daemon.
            problem = "network-statuses can't be compared with the records: %s"
            log.error(problem, error, exc_info=not isinstance(error, OSError))
        await asyncio.Event().wait()

    async def bring_up_to_date(self) -> None:
        """Wait until the node's pods are known, then update. Raises OSError if the records can't be listed."""
        outdated: Sequence[ContainerId] | None = None
        while outdated is None:
            try:
                outdated = await self._list_outdated()
            except StoreUnavailableError as error:
                log.debug("network-statuses are compared with the records later: %s", error)
                await asyncio.sleep(deadlines.STATUSES_BLIND_SECONDS)
        await side_by_side(outdated, self._bring_up_to_date, at_once=schedule.AT_ONCE)

    async def _bring_up_to_date(self, container_id: ContainerId) -> None:
        try:
            await self._write(container_id)
        except Exception as error:
            reason = str(error) or type(error).__name__
            log.warning("network-status of the pod of container %s is not up to date: %s", container_id, reason)
