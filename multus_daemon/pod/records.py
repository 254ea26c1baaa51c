"""The records of containers: reading and writing them, and what the daemon remembers of them."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Final

from multus_daemon import deadlines
from multus_daemon.pod.view import Entry, View
from multus_daemon.runtime.threads import Reads
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Pod
from multus_daemon.spec.cni.errors import IoFailureError
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.ports import CorruptRecordError, DelegateStore

log = logging.getLogger(__name__)

_FAILED_DELETES_MAX: Final = 1024


def by_hand(container_id: ContainerId) -> str:
    """Return the advice for a container whose resources the daemon does not free."""
    return f"free by hand what it holds, then: multusctl attachments forget {container_id}"


class Records:
    """The records in a store, and what the daemon remembers of them."""

    def __init__(self, store: DelegateStore) -> None:
        self.store = store
        self.view = View()
        self.reads = Reads(deadlines.RECORD_READ_SECONDS)
        self._guard = threading.Lock()
        self._failed_deletes: collections.OrderedDict[ContainerId, int] = collections.OrderedDict()
        self._failed_orphans: collections.OrderedDict[ContainerId, tuple[int, float]] = collections.OrderedDict()
        self._unwritten: dict[ContainerId, frozenset[tuple[str, str]]] = {}
        """The marks of attachments that leave, if the disk has refused them."""

    def find(self, container_id: ContainerId, *, search: bool) -> ContainerRecord | None:
        """Return the container's record; with `search`, look for what another daemon left in the result cache too.

        Raises IoFailureError (5) if a record is there and cannot be read: nothing may be lost then.
        """
        try:
            damage: CorruptRecordError | None = None
            record: ContainerRecord | None = None
            try:
                # An ADD will write there, and waits for the disk as long as it may. A DEL may have nothing to write, so
                # it reads in a thread beside its own if the disk is needed: that thread is 0.5 ms.
                if search:
                    record = self.store.load_at_once(container_id)
                    record = record or self.reads.of(container_id, self.store.load, container_id)
                else:
                    record = self.store.load(container_id)
            except CorruptRecordError as error:
                damage = error
            if damage or (record.foreign if record else search):
                record = self.reads.of(container_id, self.store.recover, container_id) or record
            if damage and record is None:
                raise damage
        except CorruptRecordError as error:
            raise IoFailureError(
                f"record of container {container_id} is damaged: {error}",
                by_hand(container_id),
            ) from error
        except OSError as error:
            raise IoFailureError(f"record of container {container_id} can't be read: {error}") from error
        if damage:
            log.warning("record of container %s is taken from elsewhere: %s", container_id, damage)
        return record and record.with_leaving(self._unwritten.get(container_id, ()))

    def save(self, record: ContainerRecord, *, durable: bool = True) -> None:
        """Write the record of an ADD. Raises IoFailureError (5)."""
        try:
            self.store.save(record, durable=durable)
            self.view.enter(record)
        except OSError as error:
            raise IoFailureError(
                f"record of container {record.sandbox.container_id} can't be written: {error} (pod {record.pod})",
                "check free space and permissions of the daemon's cniDir",
            ) from error

    def begin_delete(
        self, record: ContainerRecord, leaving: Sequence[Attachment]
    ) -> tuple[ContainerRecord, list[Attachment]]:
        """Mark attachments of the record as leaving, before the first plugin runs DEL; return both as marked.

        A DEL goes on if the disk fails: the mark is in memory then, and on record with the next one that is written.
        """
        given = set(map(id, leaving))
        keys = frozenset(item.key for item in leaving if not item.leaving)
        marked = record.with_leaving(keys)
        try:
            if keys:
                self._write_mark(marked, keys)
        except OSError as error:
            container_id = record.sandbox.container_id
            log.warning("record of container %s can't be written, its DEL goes on: %s", container_id, error)
            self._unwritten[container_id] = keys | self._unwritten.get(container_id, frozenset())
        pairs = zip(record.attachments, marked.attachments, strict=True)
        return marked, [now for before, now in pairs if id(before) in given]

    def _write_mark(self, record: ContainerRecord, keys: Collection[tuple[str, str]]) -> None:
        if not record.foreign:
            with contextlib.suppress(FileNotFoundError):
                self.store.mark(record.sandbox.container_id, keys)
                return
        # Only another daemon's files know the container.
        self.store.save(record)
        self.view.enter(record)

    def save_without(
        self, record: ContainerRecord, done: Collection[Attachment], left: Sequence[Attachment] = (), **changes: Any
    ) -> ContainerRecord | None:
        """Write the record with `changes` and without those `done`, or remove it with the last one.

        `left` go on record too: see `Attachment.detached`. Raises IoFailureError (5).
        """
        # The same objects: to compare what they hold, each with each, takes minutes for a pod that has many.
        gone = {id(item) for item in done}
        stay = tuple([item for item in record.attachments if id(item) not in gone])
        try:
            if not (stay or left):
                self.remove(record.sandbox.container_id)
                rest = None
            else:
                rest = replace(record, attachments=(*stay, *left), **changes)
                self.store.save(rest)
                self.view.enter(rest)
            self._unwritten.pop(record.sandbox.container_id, None)
            return rest
        except OSError as error:
            raise IoFailureError(
                f"record of container {record.sandbox.container_id} can't be "
                f"{'written' if stay else 'removed'}: {error}"
            ) from error

    def remove(self, container_id: ContainerId) -> None:
        """Remove the container's record. Raises OSError."""
        self.store.remove(container_id)
        self.view.leave([container_id])

    def set_aside(self, record: ContainerRecord, *, since: float, why: str) -> None:
        """Move the record to quarantine (`DelegateStore.set_aside`). Raises OSError."""
        self.store.set_aside(record, since=since, why=why)
        self.view.leave([record.sandbox.container_id])

    def forget(self, container_id: ContainerId) -> bool:
        """Forget the container (`DelegateStore.forget`). Raises OSError."""
        known = self.store.forget(container_id)
        self.view.leave([container_id])
        return known

    def read(self, container_ids: Sequence[ContainerId]) -> dict[ContainerId, ContainerRecord | None]:
        """Return our own records of the containers; for a damaged one what is known from elsewhere, or None. Blocks.

        Raises OSError.
        """
        found: dict[ContainerId, ContainerRecord | None] = {}
        for container_id in container_ids:
            try:
                record = self.store.load(container_id)
            except CorruptRecordError as damage:
                log.debug("%s", damage)
                found[container_id] = None
                with contextlib.suppress(CorruptRecordError):
                    found[container_id] = self.store.recover(container_id)
            else:
                if record is not None and not record.foreign:
                    found[container_id] = record.with_leaving(self._unwritten.get(container_id, ()))
        return found

    def containers(self) -> list[ContainerId]:
        """Return every container with a record of ours, readable or not, sorted. Blocks. Raises OSError."""
        self.refresh()
        return sorted({*self.view.unreadable, *(entry.container_id for entry in self.view)})

    def refresh(self) -> None:
        """Enter the records that the view lacks, and drop those that are gone. Blocks.

        Raises OSError if the records cannot be listed.
        """
        unreadable = set()
        with self.view.reading() as known:
            present = self.store.containers(foreign=False)
            self.view.leave(known.difference(present))
            for container_id in present:
                if container_id not in known:
                    try:
                        found = self.read([container_id])
                    except OSError as error:
                        log.warning("record of container %s can't be read now: %s", container_id, error)
                        found = {container_id: None}
                    for record in found.values():
                        if record is None:
                            unreadable.add(container_id)
                        else:
                            self.view.enter_read(record)
        self.view.unreadable = frozenset(unreadable)

    def _complete(self) -> None:
        """Enter what a predecessor may have written. Raises OSError."""
        if not self.view.is_complete:
            self.reads.of(("records",), self.refresh)

    def claims_of_others(self, record: ContainerRecord) -> set[str]:
        """Return the UIDs of the ResourceClaims of which other containers of the pod have devices. Blocks."""
        with contextlib.suppress(OSError):
            self._complete()
        others = [
            entry.claims
            for entry in self.view.of_pod(record.pod)
            if entry.pod_uid == record.pod_uid and entry.container_id != record.sandbox.container_id
        ]
        return set().union(*others)

    def is_followed(self, record: ContainerRecord, path: str) -> bool:
        """Return True if a newer container uses the namespace at the path: a DEL there would strip that.

        Raises IoFailureError (5).
        """
        own = Entry.of(record.in_netns(path))
        try:
            self._complete()
            names = [entry.container_id for entry in self.view.at(path) if own.is_followed_by(entry)]
            # Another daemon, or a person, may have removed a record.
            return bool(names) and any(self.reads.of(("records",), self.read, names).values())
        except OSError as error:
            raise IoFailureError(f"records of containers can't be read: {error}") from error

    def count_failed_delete(self, container_id: ContainerId, on_record: int = 0) -> int:
        """Count one more failed DEL of the container; return how many there are.

        Counted in memory too, beside the count `on_record`: the record may be what cannot be written.
        """
        with self._guard:
            failed = max(self._failed_deletes.pop(container_id, 0), on_record) + 1
            self._failed_deletes[container_id] = failed
            if len(self._failed_deletes) > _FAILED_DELETES_MAX:
                self._failed_deletes.popitem(last=False)
            return failed

    def count_failed_orphan(self, container_id: ContainerId) -> tuple[int, float]:
        """Count one more failed DEL of an orphan; return how many there are, and the seconds since the first.

        Since the daemon's start, and by a clock that never jumps.
        """
        now = time.monotonic()
        with self._guard:
            tries, first = self._failed_orphans.pop(container_id, (0, now))
            self._failed_orphans[container_id] = tries + 1, first
            if len(self._failed_orphans) > _FAILED_DELETES_MAX:
                self._failed_orphans.popitem(last=False)
            return tries + 1, now - first

    def forget_failed_deletes(self, container_id: ContainerId) -> None:
        """Remove the count of the container's failed DELs: one has succeeded."""
        with self._guard:
            self._failed_deletes.pop(container_id, None)


def is_of(record: ContainerRecord | Entry, pod: Pod) -> bool:
    """Return True if the record is the pod's. The API has a UID of its own for a static pod."""
    return record.pod == str(pod) and (not record.pod_uid or record.pod_uid == pod.uid or pod.is_static)
