"""What is told about an ADD: the pod's network-status and an Event for each network. Never in the way of the ADD."""

from __future__ import annotations

import asyncio
import logging

from multus_daemon.nad import status
from multus_daemon.ports import ClusterStore, ContainerRecord, Pod, StatusWriteError

log = logging.getLogger(__name__)

STATUS_SECONDS = 2.0
"""How long an ADD waits for the network-status to be written."""


class Reporter:
    """Reports on the cluster store."""

    def __init__(self, cluster: ClusterStore) -> None:
        self._cluster = cluster

    async def attached(self, pod: Pod, record: ContainerRecord) -> None:
        """The networks of `record` are attached: status and events."""
        entries = []
        for attachment in record.attachments:
            result = attachment.result
            if result is None:
                continue
            entries += status.entries_for(attachment.name, result, cluster_network=attachment.cluster_network)
            if result.interfaces or result.ips:
                addresses = " ".join(ip.address for ip in result.ips)
                self._cluster.event(
                    pod, "Normal", "AddedInterface", f"Add {attachment.ifname} [{addresses}] from {attachment.name}"
                )
        if not entries:
            return
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                await self._cluster.write_network_status(pod, status.render(entries), keep_trying=True)
        except (StatusWriteError, TimeoutError) as error:
            reason = str(error) or f"not written within {STATUS_SECONDS} s"
            log.warning("network-status of pod %s: %s", pod, reason)
            self._cluster.event(pod, "Warning", "NetworkStatusNotWritten", f"network-status: {reason}")
