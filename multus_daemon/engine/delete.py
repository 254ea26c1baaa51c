"""DEL of a container: as the runtime asks for it, as the spool repeats it, and its end where it never succeeds."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import Final

from multus_daemon import deadlines
from multus_daemon.base.aio import Reads
from multus_daemon.cni.errors import CniError, IoFailureError
from multus_daemon.cni.names import ContainerId
from multus_daemon.engine import stale
from multus_daemon.engine.detach import Detacher
from multus_daemon.engine.request import CniRequest
from multus_daemon.ports import EVENT_MESSAGE_MAX, ClusterStore, ContainerRecord, DelegateStore, LinkOps, Pod

log = logging.getLogger(__name__)

EVENT: Final = "NetworkNotReleased"
_REMEMBERED: Final = 1024


def count_nothing() -> None:
    """For who does not count."""


class Deleter:
    """Serves DEL. The caller holds the container's lock."""

    def __init__(
        self,
        cluster: ClusterStore,
        detacher: Detacher,
        store: DelegateStore,
        links: LinkOps,
        clock: Callable[[], float],
        *,
        tries: int,
        count_given_up: Callable[[], None] = count_nothing,
    ) -> None:
        """`tries`: the failing DEL of this number is answered as done, so that the pod can go; 0: none ever is."""
        self._cluster = cluster
        self._detacher = detacher
        self._store = store
        self._links = links
        self._clock = clock
        self._tries = tries
        self._count_given_up = count_given_up
        # How many have failed, beside the count on record: the record may be what can't be read or written.
        self._failed: collections.OrderedDict[ContainerId, int] = collections.OrderedDict()
        self._reads = Reads(deadlines.RECORD_READ_SECONDS)

    async def delete(self, request: CniRequest) -> None:
        """Detach what the record of the container names; a container without one is done. Raises CniError."""
        container_id = request.container_id
        try:
            record = await self._detacher.find(container_id, search=True)
        except CniError as error:
            self._unreadable_failed(container_id, error)
            return
        if record is None:
            log.info("DEL of container %s: nothing is known of it, so it is done", container_id)
            return
        netns = request.netns
        if request.spooled:
            if await self._is_overtaken(record, request.spooled):
                log.warning(
                    "spooled DEL of container %s is dropped: the container has been added since, and lives",
                    container_id,
                )
                return
            netns = await self._own_netns(record, netns)
        try:
            await self._detacher.detach(record, netns, counts=True)
        except CniError as error:
            if not self._is_last(self._count_failure(container_id, record.deletes_failed)):
                raise
            await self._give_up(container_id, error, is_news=not record.given_up)
        else:
            self._failed.pop(container_id, None)

    async def _is_overtaken(self, record: ContainerRecord, spooled: float) -> bool:
        """True where the container was added anew after the DEL was written down, and lives.

        Clocks jump: what the namespace shows counts more than times. Where it is gone nothing can be harmed; where the
        DEL is of the future, its time says nothing, and a namespace in which processes run is let be. What is dropped
        in error the comparison of records with what lives finds again.
        """
        netns = record.sandbox.netns
        if not self._links.is_netns(netns):
            return False
        if record.created > spooled:
            return True
        return spooled > self._clock() and netns in await self._links.inhabited([netns])

    async def _own_netns(self, record: ContainerRecord, netns: str) -> str:
        """The namespace, empty where a newer container is in it now. Raises IoFailureError (5)."""
        try:
            found = await self._reads.of("records", self._records)
        except OSError as error:
            raise IoFailureError(f"records of containers can't be read: {error}") from error
        return stale.without_followed(record.in_netns(netns), found).sandbox.netns

    def _records(self) -> list[ContainerRecord]:
        return [record for record in stale.read_all(self._store).values() if record]

    # --- what never succeeds -----------------------------------------------------------------------------------------

    def _count_failure(self, container_id: ContainerId, on_record: int = 0) -> int:
        """One more DEL has failed; how many that makes."""
        failed = max(self._failed.pop(container_id, 0), on_record) + 1
        self._failed[container_id] = failed
        if len(self._failed) > _REMEMBERED:
            self._failed.popitem(last=False)
        return failed

    def _is_last(self, failed: int) -> bool:
        return 0 < self._tries <= failed

    async def _give_up(self, container_id: ContainerId, error: CniError, *, is_news: bool) -> None:
        """The runtime is told that it is done; what is left stays on record."""
        text = f"DEL failed {self._tries} times and is answered as done; what is left is deleted later: {error}"
        try:
            rest = await self._detacher.find(container_id, search=False)
            if rest is None:
                return
            await self._detacher.give_up(rest)
        except CniError as damage:
            # The pod must go nevertheless. That its namespace is gone will tell.
            log.error("container %s: %s; %s", container_id, text, damage)
            return
        log.error("container %s of pod %s: %s", container_id, rest.pod, text)
        if is_news:
            self._count_given_up()
            pod = Pod(rest.pod_namespace, rest.pod_name, rest.pod_uid)
            if pod.name:
                self._cluster.event(pod, "Warning", EVENT, text[:EVENT_MESSAGE_MAX])
            else:
                self._cluster.node_event("Warning", EVENT, f"container {container_id}: {text}"[:EVENT_MESSAGE_MAX])

    def _unreadable_failed(self, container_id: ContainerId, error: CniError) -> None:
        """A DEL of a container whose record can't be read has failed. Raises `error`, but for the last try."""
        failed = self._count_failure(container_id)
        if not self._is_last(failed):
            raise error
        text = f"DEL of container {container_id} failed {self._tries} times and is answered as done: {error}"
        log.error("%s", text)
        if failed == self._tries:
            self._count_given_up()
            self._cluster.node_event("Warning", EVENT, text[:EVENT_MESSAGE_MAX])
