"""ADD for some networks of a container: all of them, or none and the reason."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace

from multus_daemon import deadlines
from multus_daemon.base.aio import Barriers, on_disk
from multus_daemon.cni.errors import (
    CniError,
    InternalError,
    InvalidNetnsError,
    InvalidNetworkConfigError,
    IoFailureError,
)
from multus_daemon.engine import gateway, schedule
from multus_daemon.engine.devices import Devices
from multus_daemon.ports import Attachment, ContainerRecord, DelegateRunner, DelegateStore, LinkOps, Sandbox

log = logging.getLogger(__name__)


class Attacher:
    """Attaches networks to one container. The caller holds the container's lock."""

    def __init__(
        self,
        runner: DelegateRunner,
        store: DelegateStore,
        links: LinkOps,
        devices: Devices,
        barriers: Barriers,
        *,
        at_once: int,
    ) -> None:
        """`barriers`: closed, by network, while its plugins free what was not on record when that began.

        `at_once`: how many networks of one container may be attached side by side.
        """
        self._runner = runner
        self._store = store
        self._links = links
        self._devices = devices
        self._barriers = barriers
        self._at_once = at_once

    @contextlib.asynccontextmanager
    async def attached(
        self, base: ContainerRecord, new: Sequence[Attachment], netns: str, *, completes: bool
    ) -> AsyncIterator[ContainerRecord]:
        """Run ADD for each of `new`, then the block with the record as it is stored, every result in it.

        Those that have nothing to do with each other run side by side (`engine.schedule`); whatever is told and kept
        has the order of the list.

        `base` is the record without `new`; `completes` says that with them the runtime's ADD is complete. The record
        is on disk before the first plugin runs, so that a DEL after a crash at any point finds what there may be to
        undo. At the end of the runtime's ADD default routes come to where they were asked for.

        Where a plugin or the block fails, cancellation included, what was begun is undone in reverse, the attachment
        that failed included, and the record is `base` again (none if that holds nothing), unless some undoing failed.
        Raises CniError, that of the first in the list that failed, and what the block raises.
        """
        sandbox = Sandbox(base.sandbox.container_id, netns)
        await self._validate(base, new, netns)
        undo_failed: list[str] = []
        async with contextlib.AsyncExitStack() as undo:
            # As it is then: with the default routes moved, results in `base` are others too.
            undo.push_async_callback(lambda: self._put_back(base, undo_failed))
            await self._save(replace(base, attachments=(*base.attachments, *new)))
            # On record before, plugins begin after: so GC of a network sees each attachment, or is over.
            await self._barriers.passed(attachment.config.name for attachment in new)
            begun: set[int] = set()
            undo.push_async_callback(self._undo_all, sandbox, base.pod, new, begun, undo_failed)
            present = (*base.attachments, *await self._add_all(sandbox, base.pod, new, begun))
            if completes:
                before, present = present, await gateway.moved(self._links, sandbox, base.pod, present)
                base = replace(base, attachments=present[: len(base.attachments)])
                await gateway.remembered(self._runner, sandbox, base.pod, before, present)
            done = replace(base, attachments=present, complete=base.complete or completes)
            await self._save(done)
            yield done
            undo.pop_all()

    async def _validate(self, base: ContainerRecord, new: Sequence[Attachment], netns: str) -> None:
        """Everything that can be known to fail before anything is touched."""
        if problem := self._links.netns_problem(netns):
            raise InvalidNetnsError(f"{netns} {problem}", f"pod {base.pod}: CNI_NETNS must be one")
        owners = {item.ifname: item.name for item in base.attachments if not item.auxiliary}
        for attachment in new:
            if owner := owners.get(attachment.ifname):
                raise InvalidNetworkConfigError(
                    f"interface {attachment.ifname!r} belongs to network {owner}",
                    f"network {attachment.name} of pod {base.pod} needs that name",
                )
            try:
                self._runner.validate(base.sandbox, attachment)
            except CniError as error:
                raise error.with_context(f"pod {base.pod}") from error
        try:
            taken = await self._links.existing_links(netns, [item.ifname for item in new if not item.auxiliary])
        except OSError as error:
            raise InvalidNetnsError(f"{netns} can't be entered: {error}", f"pod {base.pod}") from error
        if taken:
            wanting = next(item for item in new if item.ifname == taken[0])
            raise InvalidNetworkConfigError(
                f"interface {taken[0]!r} already exists in {netns}",
                f"network {wanting.name} of pod {base.pod} needs that name",
            )

    async def _add_all(
        self, sandbox: Sandbox, pod: str, new: Sequence[Attachment], begun: set[int]
    ) -> tuple[Attachment, ...]:
        """`new` with their results; in `begun` are the numbers of those whose ADD has begun. Raises CniError."""
        made = list(new)

        async def add(number: int) -> None:
            begun.add(number)
            made[number] = await self._add(sandbox, pod, new[number])

        before = schedule.predecessors(new)
        failures = await schedule.in_order(add, before, at_once=self._at_once, patience=deadlines.SETTLE_SECONDS)
        errors = list(failures.values())
        for error in errors[1:]:
            log.error("another network of pod %s has failed too: %s", pod, error)
        if errors:
            raise errors[0]
        return tuple(made)

    async def _add(self, sandbox: Sandbox, pod: str, attachment: Attachment) -> Attachment:
        try:
            await self._devices.prepare(attachment)
            result = await self._runner.add(sandbox, attachment)
            device_info = await self._devices.info(attachment)
        except CniError as error:
            raise error.with_context(f"pod {pod}") from error
        except Exception as error:
            raise InternalError(f"{type(error).__name__}: {error}", f"{_describe(attachment)} of pod {pod}") from error
        return replace(attachment, result=result, device_info=device_info)

    async def _undo_all(
        self, sandbox: Sandbox, pod: str, new: Sequence[Attachment], begun: set[int], failed: list[str]
    ) -> None:
        """Run DEL for those of `new` that are `begun`, in reverse; one that is cancelled stops no other."""
        async with contextlib.AsyncExitStack() as undo:
            for number in sorted(begun):
                undo.push_async_callback(self._undo, sandbox, pod, new[number], failed)

    async def _undo(self, sandbox: Sandbox, pod: str, attachment: Attachment, failed: list[str]) -> None:
        try:
            async with asyncio.timeout(deadlines.UNDO_SECONDS):
                await self._runner.delete(sandbox, attachment)
                await self._devices.remove(attachment)
        except asyncio.CancelledError:
            failed.append(attachment.name)
            raise
        except Exception as error:
            failed.append(attachment.name)
            log.error("undoing %s of pod %s failed: %s", _describe(attachment), pod, error)

    async def _put_back(self, base: ContainerRecord, undo_failed: list[str]) -> None:
        if undo_failed:
            return
        try:
            if base.attachments:
                await on_disk(self._store.save, base)
            else:
                await on_disk(self._store.remove, base.sandbox.container_id)
        except OSError as error:
            log.error("record of container %s can't be put back: %s", base.sandbox.container_id, error)

    async def _save(self, record: ContainerRecord) -> None:
        try:
            await on_disk(self._store.save, record)
        except OSError as error:
            raise IoFailureError(
                f"record of container {record.sandbox.container_id} can't be written: {error}",
                f"pod {record.pod}; free space and mode of the daemon's cniDir are worth a look",
            ) from error


async def interfaces_live(links: LinkOps, netns: str, attachments: Iterable[Attachment]) -> bool:
    """True where the namespace has every interface that the ADDs of `attachments` have reported to be in it.

    Raises InvalidNetnsError if the namespace can't be entered.
    """
    made = [
        attachment.ifname
        for attachment in attachments
        if attachment.result
        and not attachment.auxiliary
        and any(item.name == attachment.ifname and item.sandbox for item in attachment.result.interfaces)
    ]
    try:
        return await links.existing_links(netns, made) == made
    except OSError as error:
        raise InvalidNetnsError(f"{netns} can't be entered: {error}") from error


def _describe(attachment: Attachment) -> str:
    return f'network {attachment.name}, interface "{attachment.ifname}"'
