"""Brings the network-statuses of this node's pods up to date, once, when the daemon starts and knows its pods.

What is out of date, and why it can be, `pod.statuses` says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from multus_daemon import deadlines
from multus_daemon.pod import schedule
from multus_daemon.runtime.aio import side_by_side
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.ports import StoreUnavailableError

log = logging.getLogger(__name__)


class NetworkStatuses(Protocol):
    """What compares and writes; see `pod.statuses`."""

    async def outdated(self) -> Sequence[ContainerId]:
        """The containers whose pods' status is not what is on record."""
        ...

    async def bring_up_to_date(self, container_id: ContainerId) -> bool:
        """Write one anew, if it still has to be."""
        ...


class StatusesAtStart:
    """A root task."""

    def __init__(self, statuses: NetworkStatuses) -> None:
        self._statuses = statuses

    async def run(self) -> None:
        """Look once, and write; then wait for the daemon's end, since a root task that ends is that."""
        try:
            await self.bring_up_to_date()
        except Exception as error:
            # Whatever it is that one of the records holds, the daemon serves without this.
            log.error(
                "network-statuses can't be compared with the records: %s",
                error,
                exc_info=not isinstance(error, OSError),
            )
        await asyncio.Event().wait()

    async def bring_up_to_date(self) -> None:
        """Wait until the pods of the node are known, compare all of them, write what is out of date.

        Raises OSError where the records can't be listed.
        """
        outdated: Sequence[ContainerId] | None = None
        while outdated is None:
            try:
                outdated = await self._statuses.outdated()
            except StoreUnavailableError as error:
                log.debug("network-statuses are compared with the records later: %s", error)
                await asyncio.sleep(deadlines.STATUSES_BLIND_SECONDS)
        await side_by_side(outdated, self._bring_up_to_date, at_once=schedule.AT_ONCE)

    async def _bring_up_to_date(self, container_id: ContainerId) -> None:
        try:
            await self._statuses.bring_up_to_date(container_id)
        except Exception as error:
            log.warning(
                "network-status of the pod of container %s is not up to date: %s",
                container_id, str(error) or type(error).__name__,
            )  # fmt: skip
