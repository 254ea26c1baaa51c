"""The records of containers: the format of the file, what is in memory of them, and reading them.

A file holds lines of JSON, `{"format":1,"sha256":"<hex>","record":{...}}`; the sum is over the bytes of `record`, from
`{` to `}`. Configurations are in base64, byte for byte; results in the form of the newest CNI version. Each line is the
whole record as it was at a time, the last one that is whole counts; the first one is always whole (`pod.store`).

A line `{"leaving":[["<network>","<interface>"],...]}` marks attachments of the line before it: their DEL has begun. An
older daemon ignores it.

A newer daemon raises `FORMAT` only if an older one would misread the record; unknown keys are ignored.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from multus_daemon import deadlines
from multus_daemon.kernel.netns import COOKIE_MARK
from multus_daemon.pod.attached import Attached, Occupants
from multus_daemon.runtime.threads import Reads
from multus_daemon.spec.attachment import LEAVING, Attachment, ClaimedDevice, ContainerRecord, Pod, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import CniError, IoFailureError
from multus_daemon.spec.cni.names import ContainerId, IfName
from multus_daemon.spec.cni.result import Result, Route
from multus_daemon.spec.ports import CorruptRecordError, DelegateStore

log = logging.getLogger(__name__)

FORMAT: Final = 1
_FAILED_DELETES_MAX: Final = 1024


def by_hand(container_id: ContainerId) -> str:
    """Return the advice for a container whose resources the daemon does not free."""
    return f"free by hand what it holds, then: multusctl attachments forget {container_id}"


class RecordFormatError(ValueError):
    """The bytes are not a record that this version can read; the message says why."""


class _Envelope(msgspec.Struct, frozen=True):
    format: int
    sha256: str
    record: msgspec.Raw


class _Attachment(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    name: str
    config: bytes
    ifname: IfName
    cni_version: str
    """The version that the plugins were called with; differs from that in the configuration if it was overridden."""
    cluster_network: bool = False
    capability_args: dict[str, Any] = {}
    cni_args: tuple[tuple[str, str], ...] = ()
    result: Result | None = None
    observed: Result | None = None
    hot_plugged: bool = False
    leaving: bool = False
    detached: bool = False
    auxiliary: bool = False
    default_route: tuple[str, ...] | None = None
    selection: str = ""
    replaced_routes: tuple[Route, ...] = ()
    resource_name: str = ""
    device_id: str = ""
    claimed: ClaimedDevice | None = None
    served_by: dict[str, str] = {}


class _Record(msgspec.Struct, frozen=True, rename="camel"):
    container_id: ContainerId
    netns: str
    ifname: IfName
    pod_namespace: str
    pod_name: str
    pod_uid: str
    complete: bool
    created: float
    attachments: list[_Attachment]
    deletes_failed: int = 0
    given_up: bool = False
    failing_since: float = 0.0
    netns_id: str = ""
    netns_cookie: str = ""
    """Not part of `netns_id`: a daemon that knows no cookies compares that as a whole."""


class _Mark(msgspec.Struct, frozen=True):
    leaving: tuple[tuple[str, str], ...]


_MARK: Final = b'{"leaving":'
_SAME: Final = tuple(set(_Attachment.__struct_fields__) - {"config", "cni_version"})
_SAME_OF_RECORD: Final = tuple(
    set(_Record.__struct_fields__) - {"container_id", "netns", "attachments", "netns_id", "netns_cookie"}
)
# Not made where they are used: msgspec lays a type out at its first use, which several threads cannot share.
_decode_envelope: Final = msgspec.json.Decoder(_Envelope).decode
_decode_record: Final = msgspec.json.Decoder(_Record).decode
_decode_mark: Final = msgspec.json.Decoder(_Mark).decode


def encode(record: ContainerRecord) -> bytes:
    """Return one state of the container, as a line without its end."""
    netns_id, _, netns_cookie = record.netns_id.partition(COOKIE_MARK)
    attachments = [
        _Attachment(
            config=item.config.raw, cni_version=item.config.cni_version, **{name: getattr(item, name) for name in _SAME}
        )
        for item in record.attachments
    ]
    body = msgspec.json.encode(
        _Record(
            container_id=record.sandbox.container_id,
            netns=record.sandbox.netns,
            attachments=attachments,
            netns_id=netns_id,
            netns_cookie=netns_cookie,
            **{name: getattr(record, name) for name in _SAME_OF_RECORD},
        )
    )
    return msgspec.json.encode(_Envelope(FORMAT, hashlib.sha256(body).hexdigest(), msgspec.Raw(body)))


def encode_mark(leaving: Collection[tuple[str, str]]) -> bytes:
    """Return the mark of these attachments, as a line without its end."""
    return msgspec.json.encode(_Mark(tuple(leaving)))


def decode(data: bytes) -> ContainerRecord:
    """Return the last whole state in a file's content. Raises RecordFormatError, for the first, if there is none."""
    first, *later = data.removesuffix(b"\n").split(b"\n")
    leaving: set[tuple[str, str]] = set()
    for line in reversed(later):
        # A crash cut the line off, before any client got an answer or any plugin ran DEL, or the container is gone.
        with contextlib.suppress(RecordFormatError, msgspec.MsgspecError, UnicodeDecodeError):
            if line.startswith(_MARK):
                leaving |= set(_decode_mark(line).leaving)
            else:
                return _decode_state(line).with_leaving(leaving)
    return _decode_state(first).with_leaving(leaving)


def _decode_state(data: bytes) -> ContainerRecord:
    try:
        envelope = _decode_envelope(data)
        if envelope.format > FORMAT:
            raise RecordFormatError(
                f"written by a newer version of the daemon: format {envelope.format}, this one reads up to {FORMAT}"
            )
        if envelope.format < 1:
            raise RecordFormatError(f"format {envelope.format} has never been one")
        body = bytes(envelope.record)
        if hashlib.sha256(body).hexdigest() != envelope.sha256:
            raise RecordFormatError("its checksum does not fit its content")
        fields = _decode_record(body)
        return ContainerRecord(
            sandbox=Sandbox(fields.container_id, fields.netns),
            attachments=tuple(map(_decode_attachment, fields.attachments)),
            netns_id=f"{fields.netns_id}{COOKIE_MARK}{fields.netns_cookie}" if fields.netns_cookie else fields.netns_id,
            **{name: getattr(fields, name) for name in _SAME_OF_RECORD},
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, CniError) as error:
        raise RecordFormatError(str(error)) from error


def _decode_attachment(fields: _Attachment) -> Attachment:
    config = conf.parse(fields.config)
    if config.cni_version != fields.cni_version:
        config = conf.with_version(config, fields.cni_version)
    values = {name: getattr(fields, name) for name in _SAME}
    # Earlier versions marked some attachments so.
    values["leaving"] = fields.leaving or fields.detached or fields.selection == LEAVING
    return Attachment(config=config, **values)


class Records:
    """The records in a store, and what the daemon remembers of them."""

    def __init__(self, store: DelegateStore) -> None:
        self.store = store
        self.occupants = Occupants()
        self.attached = Attached()
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
        self.occupants.enter(record.sandbox.netns, record.sandbox.container_id)
        try:
            self.store.save(record, durable=durable)
            self.attached.enter(record)
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
                self.attached.enter(rest)
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
        self.occupants.leave(container_id)
        self.attached.leave({container_id})

    def set_aside(self, record: ContainerRecord, *, since: float, why: str) -> None:
        """Move the record to quarantine (`DelegateStore.set_aside`). Raises OSError."""
        self.store.set_aside(record, since=since, why=why)
        self.attached.leave({record.sandbox.container_id})

    def forget(self, container_id: ContainerId) -> bool:
        """Forget the container (`DelegateStore.forget`). Raises OSError."""
        known = self.store.forget(container_id)
        self.attached.leave({container_id})
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

    def read_all(self, *, strict: bool = False) -> dict[ContainerId, ContainerRecord | None]:
        """Return the result of `read` for every container of ours.

        A record that cannot be read now is None; with `strict` it raises OSError. Raises OSError if the records cannot
        be listed.
        """
        known = self.attached.containers
        present = self.store.containers(foreign=False)
        # Those that another daemon has deleted.
        self.attached.leave(known.difference(present))
        found: dict[ContainerId, ContainerRecord | None] = {}
        for container_id in present:
            try:
                found |= self.read([container_id])
            except OSError as error:
                if strict:
                    raise
                log.warning("record of container %s can't be read now: %s", container_id, error)
                found[container_id] = None
        for record in found.values():
            if record is not None:
                self.attached.enter(record, replace=False)
        return found

    def claims_of_others(self, record: ContainerRecord) -> set[str]:
        """Return the UIDs of the ResourceClaims of which other containers of the pod have devices. Blocks."""
        # An earlier daemon may have added the pod's container.
        with contextlib.suppress(OSError):
            new = set(self.store.containers(foreign=False)) - self.attached.containers
            for found in self.read(sorted(new)).values():
                if found is not None:
                    self.attached.enter(found, replace=False)
        return self.attached.claims_of_others(record)

    def is_followed(self, record: ContainerRecord, path: str) -> bool:
        """Return True if a newer container uses the namespace at the path. Raises IoFailureError (5)."""
        try:
            if not self.occupants.is_complete:
                list_ids = functools.partial(self.store.containers, foreign=False)
                self.reads.of(("occupants",), self.occupants.fill, list_ids, self._netns_of)
            others = [key for key in sorted(self.occupants.at(path)) if key != record.sandbox.container_id]
            found = self.reads.of(("occupants",), self.read, others) if others else {}
        except OSError as error:
            raise IoFailureError(f"records of containers can't be read: {error}") from error
        return bool(others) and not without_followed(record.in_netns(path), filter(None, found.values())).sandbox.netns

    def _netns_of(self, container_id: ContainerId) -> str:
        # Nearly always the kernel has the record in memory.
        record = self.store.load_at_once(container_id) or self.read([container_id]).get(container_id)
        return record.sandbox.netns if record else ""

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


def is_of(record: ContainerRecord, pod: Pod) -> bool:
    """Return True if the record is the pod's. The API has a UID of its own for a static pod."""
    if (record.pod_namespace, record.pod_name) != (pod.namespace, pod.name):
        return False
    return not record.pod_uid or record.pod_uid == pod.uid or pod.is_static


def without_followed(record: ContainerRecord, others: Iterable[ContainerRecord]) -> ContainerRecord:
    """Return the record, without its namespace if one of `others` is of a newer container that uses the same one.

    A DEL in a reused namespace would strip the newer container. That one has an interface of the same name: its ADD
    would have been refused had the older one still been there.
    """
    own = {item.ifname for item in record.attachments if not item.auxiliary}
    for other in others:
        is_other = other.sandbox.container_id != record.sandbox.container_id
        is_newer = other.sandbox.netns == record.sandbox.netns and other.created > record.created
        if is_other and is_newer and any(item.ifname in own for item in other.attachments if not item.auxiliary):
            return record.in_netns("")
    return record
