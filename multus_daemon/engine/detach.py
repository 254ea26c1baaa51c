"""DEL for networks of a container: from the record alone, past every error, as often as it takes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace

from multus_daemon import deadlines
from multus_daemon.base.aio import Reads, on_disk
from multus_daemon.cni.errors import CniError, InternalError, IoFailureError, TryAgainLaterError, from_code
from multus_daemon.cni.names import ContainerId
from multus_daemon.engine import schedule
from multus_daemon.engine.devices import Devices
from multus_daemon.ports import (
    Attachment,
    ContainerRecord,
    CorruptRecordError,
    DelegateRunner,
    DelegateStore,
    LinkOps,
    Sandbox,
)

log = logging.getLogger(__name__)


class Detacher:
    """Detaches networks of one container. The caller holds the container's lock."""

    def __init__(
        self, runner: DelegateRunner, store: DelegateStore, links: LinkOps, devices: Devices, *, at_once: int
    ) -> None:
        """`at_once`: how many networks of one container may be detached side by side."""
        self._runner = runner
        self._store = store
        self._links = links
        self._devices = devices
        self._at_once = at_once
        self._reads = Reads(deadlines.RECORD_READ_SECONDS)

    async def find(self, container_id: ContainerId, *, search: bool) -> ContainerRecord | None:
        """The container's record; `search`: what another daemon left too, where it takes a search through its files.

        Raises IoFailureError (5) where what there is can't be read: nothing may be lost then.
        """
        try:
            damage: CorruptRecordError | None = None
            record: ContainerRecord | None = None
            try:
                record = await self._reads.of(container_id, self._store.load, container_id)
            except CorruptRecordError as error:
                damage = error
            if damage or (record.foreign if record else search):
                record = await self._reads.of(container_id, self._store.recover, container_id) or record
            if damage and record is None:
                raise damage
        except CorruptRecordError as error:
            raise IoFailureError(
                f"record of container {container_id} is damaged: {error}",
                "what it held must be freed by hand; remove the file then",
            ) from error
        except OSError as error:
            raise IoFailureError(f"record of container {container_id} can't be read: {error}") from error
        if damage:
            log.warning("record of container %s is taken from elsewhere: %s", container_id, damage)
        return record

    async def detach(
        self, record: ContainerRecord, netns: str, *, seconds: float = deadlines.DETACH_SECONDS, counts: bool = False
    ) -> None:
        """Run DEL for each attachment, in the namespace `netns` (empty: it is gone), in the reverse order of the ADDs.

        Those that have nothing to do with each other run side by side, as theirs did (`engine.schedule`).

        One failure does not stop the others, nor does one that hangs: each may take its share of `seconds`, what the
        ones before it left included. The record goes when all succeeded; else it keeps what failed, for the next try.
        `counts`: as a try of the runtime's. Raises CniError: the first failure with its code, the others in the
        details.
        """
        torn = replace(record, complete=False, deletes_failed=record.deletes_failed + counts)
        await self.detach_some(torn, record.attachments, netns, seconds=seconds)

    async def detach_some(
        self,
        record: ContainerRecord,
        leaving: Sequence[Attachment],
        netns: str,
        *,
        seconds: float = deadlines.DETACH_SECONDS,
    ) -> ContainerRecord | None:
        """As `detach`, for those that are `leaving`; the record of the others, as stored, None if there are none.

        What has been detached is on record as that also where others failed, or the call is cancelled.
        """
        sandbox = Sandbox(record.sandbox.container_id, netns)
        backwards = leaving[::-1]
        before = schedule.backwards(schedule.predecessors(leaving))
        end = asyncio.get_running_loop().time() + seconds
        begun = 0
        done: list[Attachment] = []
        failed: dict[int, CniError] = {}

        async def delete(number: int) -> None:
            nonlocal begun
            left = end - asyncio.get_running_loop().time()
            share = max(0.0, left) / (len(backwards) - begun)
            begun += 1
            attachment = backwards[number]
            failure = await self._delete(sandbox, record.pod, attachment, share)
            if failure is None:
                done.append(attachment)
            else:
                failed[number] = failure

        try:
            await schedule.in_order(delete, before, at_once=self._at_once)
        except asyncio.CancelledError:
            with contextlib.suppress(CniError):
                await self._without(record, done)
            raise
        failures = [failed[number] for number in sorted(failed)]
        try:
            rest = await self._without(record, done)
        except CniError as error:
            raise joined([*failures, error]) from error
        if failures:
            raise joined(failures)
        return rest

    async def _without(self, record: ContainerRecord, done: Sequence[Attachment]) -> ContainerRecord | None:
        """Write the record without what is `done`, or remove it with the last. Raises IoFailureError (5)."""
        rest = replace(record, attachments=tuple(item for item in record.attachments if item not in done))
        try:
            if rest.attachments:
                await on_disk(self._store.save, rest)
                return rest
            await on_disk(self._store.remove, record.sandbox.container_id)
            return None
        except OSError as error:
            raise IoFailureError(
                f"record of container {record.sandbox.container_id} can't be "
                f"{'written' if rest.attachments else 'removed'}: {error}"
            ) from error

    async def give_up(self, record: ContainerRecord) -> None:
        """Put down that the runtime asks no more for what is still in the record. Raises IoFailureError (5)."""
        await self._without(replace(record, given_up=True), ())

    async def detach_unrecorded(self, sandbox: Sandbox, pod: str, attachment: Attachment) -> None:
        """Run DEL for an attachment that is in no record. Raises CniError."""
        if failure := await self._delete(sandbox, pod, attachment, deadlines.DETACH_SECONDS):
            raise failure

    async def detach_leftover(self, record: ContainerRecord, netns: str) -> tuple[Attachment, ...]:
        """Undo what an ADD that never finished, or lives no more, left behind, in the namespace it was in.

        What has been plugged into the namespace `netns`, for which there will be an ADD now, stays: that is returned.
        Raises CniError.
        """
        log.warning(
            "container %s of pod %s has an unfinished or outdated record: undone first",
            record.sandbox.container_id,
            record.pod,
        )
        lives = record.sandbox.netns == netns and self._links.is_netns(netns)
        leaving = [item for item in record.attachments if not (lives and item.hot_plugged and item.result)]
        rest = await self.detach_some(replace(record, complete=False), leaving, record.sandbox.netns)
        return rest.attachments if rest else ()

    async def _delete(self, sandbox: Sandbox, pod: str, attachment: Attachment, seconds: float) -> CniError | None:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                await self._runner.delete(sandbox, attachment)
                await self._devices.remove(attachment)
        except CniError as error:
            return error.with_context(f"pod {pod}")
        except TimeoutError as error:
            if limit.expired():
                return TryAgainLaterError(
                    f"DEL of network {attachment.name} did not end within {seconds:.3g} s", f"pod {pod}"
                )
            return _fault(error, attachment, pod)
        except Exception as error:
            return _fault(error, attachment, pod)
        return None


def _fault(error: Exception, attachment: Attachment, pod: str) -> CniError:
    log.error("DEL of network %s of pod %s", attachment.name, pod, exc_info=error)
    return InternalError(f"{type(error).__name__}: {error} (network {attachment.name} of pod {pod})")


def joined(failures: Sequence[CniError]) -> CniError:
    """The first of `failures` with its code, the others in its details."""
    first, *others = failures
    if not others:
        return first
    details = " / ".join([*([first.details] if first.details else []), *map(str, others)])
    return from_code(first.code, first.msg, details)
