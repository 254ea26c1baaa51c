"""Update outdated network-statuses of this node's pods once, when the daemon starts and knows its pods.

`pod.statuses` describes when a status is outdated.
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
    """The functions of `pod.statuses`, without blocking the event loop."""

    async def outdated(self) -> Sequence[ContainerId]:
        """Return the containers whose pods have an outdated status."""

    async def bring_up_to_date(self, container_id: ContainerId) -> bool:
        """Write the status if it is still outdated."""


class StatusesAtStart:
    """A root task."""

    def __init__(self, statuses: NetworkStatuses) -> None:
        self._statuses = statuses

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
                outdated = await self._statuses.outdated()
            except StoreUnavailableError as error:
                log.debug("network-statuses are compared with the records later: %s", error)
                await asyncio.sleep(deadlines.STATUSES_BLIND_SECONDS)
        await side_by_side(outdated, self._bring_up_to_date, at_once=schedule.AT_ONCE)

    async def _bring_up_to_date(self, container_id: ContainerId) -> None:
        try:
            await self._statuses.bring_up_to_date(container_id)
        except Exception as error:
            reason = str(error) or type(error).__name__
            log.warning("network-status of the pod of container %s is not up to date: %s", container_id, reason)
