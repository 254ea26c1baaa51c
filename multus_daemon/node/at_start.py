"""Root tasks of a starting daemon: read the records of earlier daemons, and update their pods' network-statuses."""

from __future__ import annotations

import asyncio
import itertools
import logging
from functools import partial

from multus_daemon import deadlines
from multus_daemon.pod import publish, schedule
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.records import Records
from multus_daemon.pod.view import Entry
from multus_daemon.runtime import portal
from multus_daemon.runtime.deadline import Deadline, backoff
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.runtime.workqueue import WorkQueue
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.ports import StoreUnavailableError

log = logging.getLogger(__name__)


async def load(records: Records) -> None:
    """Read the records of earlier daemons into the view, and later those that a daemon which still stops has written.

    Unreadable records are read again after a pause. Never returns.
    """
    pauses = itertools.chain((0.0, deadlines.PREDECESSOR_SECONDS), backoff(*deadlines.RECONCILE_RETRY_SECONDS))
    for number, pause in enumerate(pauses):
        await asyncio.sleep(pause)
        try:
            await portal.run(Deadline(), records.refresh, name="records")
            if number and not records.view.unreadable:
                break
        except Exception as error:
            # A fault in one record must not stop the daemon.
            text = "pods of an earlier daemon are not kept, tried again: %s"
            log.error(text, error, exc_info=not isinstance(error, OSError))
    await asyncio.Event().wait()


class OutdatedStatuses:
    """Updates the status of each container of an earlier daemon, once the node's pods are known.

    A status that was not written yet is lost when a daemon ends; it is made again from the record. Create this on the
    event loop.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._portal = LoopPortal()
        pause = deadlines.STATUSES_BLIND_SECONDS
        self._queue = WorkQueue[ContainerId](
            self._work, retry=(pause, pause), at_once=schedule.AT_ONCE, name="network-statuses"
        )
        self.run = self._queue.run
        engine.records.view.followers.append(self._follow)

    def _follow(self, container_id: ContainerId, entry: Entry | None, is_read: bool) -> None:
        """Called by the view about a record, in any thread."""
        if is_read and entry is not None and entry.complete:
            self._portal.tell(self._queue.add, container_id)

    async def _work(self, container_id: ContainerId) -> None:
        """Update the status of a container's pod. Raises StoreUnavailableError while the pods are not known."""
        work = partial(publish.bring_up_to_date, self._engine, container_id)
        try:
            await portal.run(Deadline(), work, name="network-statuses")
        except StoreUnavailableError:
            raise
        except Exception as error:
            # A fault in one record must not stop the daemon.
            reason = str(error) or type(error).__name__
            log.warning("network-status of the pod of container %s is not up to date: %s", container_id, reason)
