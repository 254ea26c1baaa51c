"""CHECK for every network of a container, against what ADD made of it."""

from __future__ import annotations

from multus_daemon.cni.errors import CniError, InvalidNetnsError, UnknownContainerError
from multus_daemon.ports import ContainerRecord, DelegateRunner, LinkOps, Sandbox


class Checker:
    """Checks the networks of one container. The caller holds the container's lock."""

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
        if not self._links.is_netns(netns):
            raise InvalidNetnsError(f"{netns} is no network namespace", f"pod {record.pod}: CNI_NETNS must be one")
        sandbox = Sandbox(record.sandbox.container_id, netns)
        for attachment in record.attachments:
            try:
                await self._runner.check(sandbox, attachment)
            except CniError as error:
                raise error.with_context(f"pod {record.pod}") from error
