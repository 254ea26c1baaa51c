"""Containers that ought to be gone: reading their records, and going through them a few at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar

from multus_daemon.cni.names import ContainerId
from multus_daemon.ports import ContainerRecord, CorruptRecordError, DelegateStore

T = TypeVar("T")

log = logging.getLogger(__name__)

AT_ONCE: Final = 4
"""A DEL that hangs must not keep the others waiting; more at once would slow down the ADDs of a starting node."""


def read(store: DelegateStore, container_ids: Sequence[ContainerId]) -> dict[ContainerId, ContainerRecord | None]:
    """Our own records of the containers; of a damaged one, what is known from elsewhere, None if nothing. Blocks.

    Raises OSError.
    """
    found: dict[ContainerId, ContainerRecord | None] = {}
    for container_id in container_ids:
        try:
            record = store.load(container_id)
        except CorruptRecordError as damage:
            log.debug("%s", damage)
            found[container_id] = _recovered(store, container_id)
        else:
            if record is not None and not record.foreign:
                found[container_id] = record
    return found


def read_all(store: DelegateStore) -> dict[ContainerId, ContainerRecord | None]:
    """As `read`, of every container of ours."""
    return read(store, store.containers(foreign=False))


def _recovered(store: DelegateStore, container_id: ContainerId) -> ContainerRecord | None:
    try:
        return store.recover(container_id)
    except CorruptRecordError:
        return None


def without_followed(record: ContainerRecord, records: Iterable[ContainerRecord]) -> ContainerRecord:
    """The record, without its namespace where one of `records` is of a container that has taken its place there.

    Names of namespaces are used again by who chooses them; a DEL in it would strip the newer container. That one has an
    interface of the same name: its ADD would have been refused had the older one still been there.
    """
    own = _ifnames(record)
    for other in records:
        is_other = other.sandbox.container_id != record.sandbox.container_id
        is_newer = other.sandbox.netns == record.sandbox.netns and other.created > record.created
        if is_other and is_newer and own & _ifnames(other):
            return record.in_netns("")
    return record


def _ifnames(record: ContainerRecord) -> set[str]:
    return {attachment.ifname for attachment in record.attachments if not attachment.auxiliary}


async def side_by_side(items: Iterable[T], work: Callable[[T], Awaitable[None]]) -> None:
    """`work` for each of the items, in their order, `AT_ONCE` at a time. What one raises ends the others."""
    rest = iter(items)

    async def some() -> None:
        for item in rest:
            await work(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(some())
