"""CHECK for networks of a container, against what ADD made of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from multus_daemon.cni.errors import CniError, InvalidNetnsError, UnknownContainerError
from multus_daemon.ports import Attachment, ContainerRecord, DelegateRunner, LinkOps, Sandbox

log = logging.getLogger(__name__)


class Checker:
    """Checks networks of one container. The caller holds the container's lock."""

    def __init__(self, runner: DelegateRunner, links: LinkOps) -> None:
        self._runner = runner
        self._links = links

    async def check(self, record: ContainerRecord, netns: str) -> None:
        """Run CHECK for each attachment in order; the first failure ends it. Raises CniError."""
        if not record.complete:
            raise UnknownContainerError(
                f"pod {record.pod}: ADD of container {record.sandbox.container_id} never finished",
                "delete the container and add it anew",
            )
        await self.check_some(record, [item for item in record.attachments if not _unfinished(item)], netns)

    async def check_some(self, record: ContainerRecord, attachments: Sequence[Attachment], netns: str) -> None:
        """Run CHECK for these `attachments` of the record. Raises CniError."""
        if problem := self._links.netns_problem(netns):
            raise InvalidNetnsError(f"{netns} {problem}", f"pod {record.pod}: CNI_NETNS must be one")
        sandbox = Sandbox(record.sandbox.container_id, netns)
        for attachment in attachments:
            try:
                await self._runner.check(sandbox, attachment)
            except CniError as error:
                raise error.with_context(f"pod {record.pod}") from error


def _unfinished(attachment: Attachment) -> bool:
    """True for what a crash cut off while it was plugged in: nobody was told that it is there."""
    return attachment.hot_plugged and attachment.result is None
