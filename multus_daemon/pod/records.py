"""Read and write the records of containers, count their failed DELs, and keep `View` up to date."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Final

from multus_daemon import deadlines
from multus_daemon.plugins.plugin import IN_NETNS
from multus_daemon.pod.store import FileStore
from multus_daemon.pod.view import Entry, View
from multus_daemon.runtime.recent import Recent
from multus_daemon.runtime.threads import Reads
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Pod
from multus_daemon.spec.cni.errors import IoFailureError
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.ports import CorruptRecordError

log = logging.getLogger(__name__)

_FAILED_DELETES_MAX: Final = 1024
_Failures = Recent[ContainerId, tuple[int, float]]
"""By container: the number of failed DELs, and the time of the first on the monotonic clock."""


def by_hand(container_id: ContainerId, record: ContainerRecord | None = None) -> str:
    """Return the advice to free a container's resources by hand, as the daemon can't; `record`: None if unreadable."""
    forget = f"multusctl attachments forget {container_id}"
    held = record.attachments if record else ()
    if held and all(IN_NETNS.issuperset((*item.served_by, *(it.type for it in item.config.plugins))) for item in held):
        return f"it holds nothing outside its network namespace: when that is gone, {forget}"
    return f"free by hand what it holds, then: {forget}"


class Records:
    """The records in a store, with the failed DELs and the `View` in memory."""

    def __init__(self, store: FileStore) -> None:
        self.store = store
        self.view = View()
        self.reads = Reads(deadlines.RECORD_READ_SECONDS)
        self._guard = threading.Lock()
        self._failed_deletes: _Failures = Recent(_FAILED_DELETES_MAX)
        self._failed_orphans: _Failures = Recent(_FAILED_DELETES_MAX)
        self._unwritten: dict[ContainerId, frozenset[tuple[str, str]]] = {}
        """The marks of attachments that leave, if the disk has refused them."""
        self.given_up: set[ContainerId] = set()
        """Containers whose DEL was answered as done, if the disk has refused that mark; and those whose DEL an earlier
        daemon has begun, which may have been answered so."""

    def find(self, container_id: ContainerId, *, search: bool) -> ContainerRecord | None:
        """Return the container's record; `search`: also look for results of upstream's daemon in the result cache.

        Raises IoFailureError (5) if a record exists and cannot be read: it must not be treated as missing.
        """
        try:
            damage: CorruptRecordError | None = None
            record: ContainerRecord | None = None
            try:
                # An ADD will write there, and waits for the disk as long as it may. A DEL may have nothing to write, so
                # it reads in a thread beside its own: 0.1 ms.
                if search:
                    record = self.reads.of(container_id, self.store.load, container_id)
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
                f"record of container {container_id} is damaged: {error}", remedy=by_hand(container_id)
            ) from error
        except OSError as error:
            raise IoFailureError(f"record of container {container_id} can't be read: {error}") from error
        if damage:
            log.warning("record of container %s is made from upstream's files: %s", container_id, damage)
        return record and record.with_leaving(self._unwritten.get(container_id, ()))

    def save(self, record: ContainerRecord, *, durable: bool = True) -> None:
        """Write the record of an ADD. Raises IoFailureError (5)."""
        try:
            self.store.save(record, durable=durable)
            self.view.enter(record)
            self.given_up.discard(record.sandbox.container_id)
        except OSError as error:
            raise IoFailureError(
                f"record of container {record.sandbox.container_id} can't be written: {error} (pod {record.pod})",
                remedy="check free space and permissions of the daemon's cniDir",
            ) from error

    def begin_delete(
        self, record: ContainerRecord, leaving: Sequence[Attachment]
    ) -> tuple[ContainerRecord, list[Attachment]]:
        """Mark attachments of the record as leaving, before the first plugin runs DEL; return both as marked.

        If the disk fails, the DEL continues: the mark is in memory, and on disk with the next write of the record.
        """
        given = set(map(id, leaving))
        keys = frozenset(item.key for item in leaving if not item.leaving)
        marked = record.with_leaving(keys)
        try:
            if keys:
                self._write_mark(marked, keys)
        except OSError as error:
            container_id = record.sandbox.container_id
            log.warning("record of container %s can't be written, its DEL continues: %s", container_id, error)
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
        """Write the record with `changes` and without the attachments `done`; remove it if none is left.

        `left`: attachments of which the record keeps a trace, see `Attachment.detached`. Raises IoFailureError (5).
        """
        # The same objects: to compare what they hold, each with each, takes minutes for a pod that has many.
        gone = {id(item) for item in done}
        stay = [item for item in record.attachments if id(item) not in gone]
        container_id, rest = record.sandbox.container_id, None
        try:
            if stay or left:
                rest = replace(record, attachments=(*stay, *left), **changes)
                self.store.save(rest)
                self.view.enter(rest)
            else:
                self.remove(container_id)
        except OSError as error:
            verb = "written" if stay else "removed"
            raise IoFailureError(f"record of container {container_id} can't be {verb}: {error}") from error
        self._unwritten.pop(container_id, None)
        return rest

    def remove(self, container_id: ContainerId) -> None:
        """Remove the container's record. Raises OSError."""
        self.store.remove(container_id)
        self._left(container_id)

    def set_aside(self, record: ContainerRecord, *, since: float, why: str) -> None:
        """Move the record to `aside/` (`FileStore.set_aside`). Raises OSError."""
        self.store.set_aside(record, since=since, why=why)
        self._left(record.sandbox.container_id)

    def forget(self, container_id: ContainerId) -> bool:
        """Remove all files of the container (`FileStore.forget`); return whether there was one. Raises OSError."""
        known = self.store.forget(container_id)
        self._left(container_id)
        return known

    def _left(self, container_id: ContainerId) -> None:
        self.given_up.discard(container_id)
        self.view.leave([container_id])

    def read(self, container_ids: Sequence[ContainerId]) -> dict[ContainerId, ContainerRecord | None]:
        """Return our own records; for a damaged one what upstream's files say, or None. Blocks. Raises OSError."""
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
        """Add the records that the view lacks, and drop those that no longer exist. Blocks. Raises OSError."""
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
                            continue
                        if record.attachments and all(item.leaving for item in record.attachments):
                            self.given_up.add(container_id)
                        self.view.enter(record, is_read=True)
        self.view.unreadable = frozenset(unreadable)

    def _complete(self) -> None:
        """Add records that an earlier daemon, which may still run, has written. Raises OSError."""
        if not self.view.is_complete:
            self.reads.of(("records",), self.refresh)

    def claims_of_others(self, record: ContainerRecord) -> set[str]:
        """Return the UIDs of ResourceClaims whose devices other containers of the same pod have. Blocks."""
        with contextlib.suppress(OSError):
            self._complete()
        others = [
            entry.claims
            for entry in self.view.of_pod(record.pod)
            if entry.pod_uid == record.pod_uid and entry.container_id != record.sandbox.container_id
        ]
        return set().union(*others)

    def is_followed(self, record: ContainerRecord, path: str) -> bool:
        """Return True if a newer container uses the namespace at the path. Raises IoFailureError (5)."""
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

        The count is in memory, too, besides `on_record`: perhaps the record cannot be written.
        """
        return self._count(self._failed_deletes, container_id, on_record)[0]

    def count_failed_orphan(self, container_id: ContainerId) -> tuple[int, float]:
        """Count one more failed DEL of an orphan; return how many there are, and the seconds since the first."""
        return self._count(self._failed_orphans, container_id)

    def _count(self, failures: _Failures, container_id: ContainerId, at_least: int = 0) -> tuple[int, float]:
        now = time.monotonic()
        with self._guard:
            before, first = failures.get(container_id) or (0, now)
            failed = max(before, at_least) + 1
            failures[container_id] = failed, first
            return failed, now - first

    def forget_failed_deletes(self, container_id: ContainerId) -> None:
        """Reset the count of the container's failed DELs after one has succeeded."""
        with self._guard:
            self._failed_deletes.forget(container_id)


def is_of(record: ContainerRecord | Entry, pod: Pod) -> bool:
    """Return True if the record is the pod's. (A static pod has another UID in the API than on the node.)"""
    return record.pod == str(pod) and (not record.pod_uid or record.pod_uid == pod.uid or pod.is_static)
