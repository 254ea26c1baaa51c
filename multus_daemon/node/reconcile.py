"""Compares what is on record with what lives, at start and every few minutes, and deletes what is left of the dead.

What an orphan is, `node.orphans` says; here is when: those that are certain at once, the others when a second look
finds them too. A run has a budget, a container that fails waits longer each time. What can't be deleted stays on record
and is told of: a gauge, a line in the log for each try, one Event.

The opposite is only told of: a pod that runs without networks that it asked for, as one that was started while the
runtime did not use Multus.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from multus_daemon import deadlines
from multus_daemon.metrics import DeleteMetrics
from multus_daemon.node import orphans
from multus_daemon.node.orphans import Findings, Orphan, Unattached
from multus_daemon.pod import schedule
from multus_daemon.pod.engine import Engine
from multus_daemon.runtime import portal
from multus_daemon.runtime.aio import side_by_side
from multus_daemon.runtime.backoff import backoff
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX, Events

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Failure:
    """Of a container that could not be deleted."""

    due: float
    """On the event loop's clock."""
    delays: Iterator[float] = field(default_factory=lambda: backoff(*deadlines.RECONCILE_RETRY_SECONDS, jitter=0.1))


class Reconcile:
    """A root task."""

    def __init__(
        self,
        engine: Engine,
        events: Events,
        metrics: DeleteMetrics,
        *,
        seconds: float,
        tidy: Callable[[], None] = lambda: None,
    ) -> None:
        """`seconds`: from one run to the next. `tidy`: removes what is left in `cniDir`; may raise OSError."""
        self._engine = engine
        self._tidy = tidy
        self._events = events
        self._metrics = metrics
        self._seconds = seconds
        self._suspected: set[tuple[ContainerId, float]] = set()
        self._failures: dict[ContainerId, _Failure] = {}
        self._lacking: set[str] = set()
        self._told: set[str] = set()
        self._unknown_because = ""
        self.left = 0
        """Containers that the last run could not delete, or not read."""

    async def run(self) -> None:
        """Reconcile for ever."""
        while True:
            try:
                await self.reconcile()
            except Exception as error:
                # Whatever it is that one of the records holds, the daemon serves without this.
                log.error(
                    "records can't be compared with what lives, tried again in %g s: %s",
                    self._seconds, error, exc_info=not isinstance(error, OSError),
                )  # fmt: skip
            # A daemon that starts does not know its pods yet.
            await asyncio.sleep(
                min(self._seconds, deadlines.RECONCILE_BLIND_SECONDS) if self._unknown_because else self._seconds
            )

    async def reconcile(self) -> None:
        """One run. Raises OSError where records or processes can't be listed."""
        found = await portal.run(Deadline(), self._look, name="reconcile")
        if found.unknown_because and found.unknown_because != self._unknown_because:
            log.info(
                "only containers whose network namespace is gone are told to be orphans: %s", found.unknown_because
            )
        self._unknown_because = found.unknown_because
        self._failures = {name: failure for name, failure in self._failures.items() if name in found.orphans}
        end = _now() + deadlines.RECONCILE_RUN_SECONDS
        left: set[ContainerId] = set()
        await side_by_side(self._confirmed(found), functools.partial(self._delete, end, left), at_once=schedule.AT_ONCE)
        # Not certain yet: those count from the second look on.
        leftovers = self._metrics.leftovers
        leftovers.labels("orphans").set(len(left))
        leftovers.labels("inhabited").set(len(found.in_use))
        leftovers.labels("unreadable").set(len(found.unreadable))
        leftovers.labels("aside").set(found.aside)
        self.left = len(left) + len(found.unreadable)
        if found.unreadable:
            log.warning("records of these containers can't be read: %s", ", ".join(found.unreadable[:10]))
        if not found.unknown_because:
            self._tell_of_unattached(found.unattached)

    def _look(self) -> Findings:
        try:
            self._tidy()
        except OSError as error:
            log.error("what was left in cniDir can't be removed: %s", error)
        return orphans.look(self._engine)

    def _confirmed(self, found: Findings) -> list[Orphan]:
        """The orphans that are certain, or were found by the run before too."""
        before = self._suspected
        self._suspected = {
            (container_id, orphan.record.created)
            for container_id, orphan in found.orphans.items()
            if not orphan.is_certain
        }
        return [
            orphan
            for container_id, orphan in found.orphans.items()
            if orphan.is_certain or (container_id, orphan.record.created) in before
        ]

    async def _delete(self, end: float, left: set[ContainerId], orphan: Orphan) -> None:
        record = orphan.record
        container_id = record.sandbox.container_id
        left.add(container_id)
        failure = self._failures.get(container_id)
        seconds = min(deadlines.RECONCILE_CONTAINER_SECONDS, end - _now())
        if seconds <= 0 or (failure and failure.due > _now()):
            return
        try:
            work = functools.partial(orphans.delete, self._engine, orphan, seconds)
            deleted = await portal.run(Deadline(), work, name="reconcile")
        except Exception as error:
            self._failed(orphan, error)
            return
        left.discard(container_id)
        self._failures.pop(container_id, None)
        if deleted:
            self._metrics.orphans.labels("deleted").inc(len(record.attachments))

    def _failed(self, orphan: Orphan, error: Exception) -> None:
        record = orphan.record
        container_id = record.sandbox.container_id
        text = f"container {container_id} of pod {record.pod} can't be deleted ({orphan.reason}): {error}"
        failure = self._failures.get(container_id)
        if failure is None:
            failure = self._failures[container_id] = _Failure(0.0)
            self._events.node_event("Warning", "OrphanNotDeleted", text[:EVENT_MESSAGE_MAX])
        delay = next(failure.delays)
        failure.due = _now() + delay
        log.warning("%s; tried again in %.0f s", text, delay)
        self._metrics.orphans.labels("failed").inc(len(record.attachments))

    def _tell_of_unattached(self, found: tuple[Unattached, ...]) -> None:
        """One Event for each pod, once a second look finds the same: what is plugged in may be under way."""
        lacking = {item.pod.uid for item in found}
        confirmed = [item for item in found if item.pod.uid in self._lacking]
        self._metrics.lacking.set(len(confirmed))
        for item in confirmed:
            if item.pod.uid not in self._told:
                text = f"the pod runs without networks that it asked for: {', '.join(item.networks)}; {_advice(item)}"
                log.warning("pod %s: %s", item.pod, text)
                self._events.event(item.pod, "Warning", "NetworksMissing", text[:EVENT_MESSAGE_MAX])
        self._told = (self._told & lacking) | {item.pod.uid for item in confirmed}
        self._lacking = set(lacking)


def _advice(item: Unattached) -> str:
    """What helps. A pod whose annotation was edited would lose that with its end: it is made again from a template."""
    if item.has_others:
        return (
            "its annotation was changed after its start, when networks are attached: put them into the template that "
            "the pod is made from; a pod that runs gets them only from a hot-plug controller"
        )
    return "was it started while the runtime did not use Multus? delete it, so that it is made again"


def _now() -> float:
    return asyncio.get_running_loop().time()
