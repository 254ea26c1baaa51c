"""ADD for every network of a container: all of them, or none and the reason."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace

from multus_daemon.cni.errors import (
    CniError,
    InternalError,
    InvalidNetnsError,
    InvalidNetworkConfigError,
    IoFailureError,
)
from multus_daemon.ports import Attachment, ContainerRecord, DelegateRunner, DelegateStore, LinkOps

log = logging.getLogger(__name__)

UNDO_SECONDS = 60.0
"""How long the undoing of one attachment may take, whatever became of the request."""


class Attacher:
    """Attaches the networks of one container. The caller holds the container's lock."""

    def __init__(self, runner: DelegateRunner, store: DelegateStore, links: LinkOps) -> None:
        self._runner = runner
        self._store = store
        self._links = links

    async def attach(self, record: ContainerRecord) -> ContainerRecord:
        """Run ADD for each attachment of `record` in order; the record as stored, with every result.

        The record is on disk before the first plugin runs, so that a DEL after a crash at any point finds what
        there may be to undo. On failure, cancellation included, what was done is undone in reverse, the attachment
        that failed included, and the record is forgotten unless some undoing failed. Raises CniError.
        """
        await self._validate(record)
        self._save(record)
        undo_failed: list[str] = []
        async with contextlib.AsyncExitStack() as undo:
            undo.callback(self._forget, record, undo_failed)
            attached: list[Attachment] = []
            for attachment in record.attachments:
                undo.push_async_callback(self._undo, record, attachment, undo_failed)
                attached.append(await self._add(record, attachment))
            complete = replace(record, attachments=tuple(attached), complete=True)
            self._save(complete)
            undo.pop_all()
        return complete

    async def _validate(self, record: ContainerRecord) -> None:
        """Everything that can be known to fail before anything is touched."""
        netns = record.sandbox.netns
        if not self._links.is_netns(netns):
            raise InvalidNetnsError(f"{netns} is no network namespace", f"pod {record.pod}: CNI_NETNS must be one")
        for attachment in record.attachments:
            try:
                self._runner.validate(attachment)
            except CniError as error:
                raise error.with_context(f"pod {record.pod}") from error
        try:
            taken = await self._links.existing_links(netns, [item.ifname for item in record.attachments])
        except OSError as error:
            raise InvalidNetnsError(f"{netns} can't be entered: {error}", f"pod {record.pod}") from error
        if taken:
            owner = next(item for item in record.attachments if item.ifname == taken[0])
            raise InvalidNetworkConfigError(
                f"interface {taken[0]!r} already exists in {netns}",
                f"network {owner.name} of pod {record.pod} needs that name",
            )

    async def _add(self, record: ContainerRecord, attachment: Attachment) -> Attachment:
        try:
            result = await self._runner.add(record.sandbox, attachment)
        except CniError as error:
            raise error.with_context(f"pod {record.pod}") from error
        except Exception as error:
            raise InternalError(
                f"{type(error).__name__}: {error}", f"{_describe(attachment)} of pod {record.pod}"
            ) from error
        return attachment.with_result(result)

    async def _undo(self, record: ContainerRecord, attachment: Attachment, failed: list[str]) -> None:
        try:
            async with asyncio.timeout(UNDO_SECONDS):
                await self._runner.delete(record.sandbox, attachment)
        except Exception as error:
            failed.append(attachment.name)
            log.error("undoing %s of pod %s failed: %s", _describe(attachment), record.pod, error)

    def _forget(self, record: ContainerRecord, undo_failed: list[str]) -> None:
        if undo_failed:
            return
        try:
            self._store.remove(record.sandbox.container_id)
        except OSError as error:
            log.error("record of container %s can't be removed: %s", record.sandbox.container_id, error)

    def _save(self, record: ContainerRecord) -> None:
        try:
            self._store.save(record)
        except OSError as error:
            raise IoFailureError(
                f"record of container {record.sandbox.container_id} can't be written: {error}",
                f"pod {record.pod}; free space and mode of the daemon's cniDir are worth a look",
            ) from error


def _describe(attachment: Attachment) -> str:
    return f'network {attachment.name}, interface "{attachment.ifname}"'
