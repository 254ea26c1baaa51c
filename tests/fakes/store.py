"""A FileStore in memory."""

from __future__ import annotations

import threading
from collections.abc import Collection, Set
from dataclasses import replace

from multus_daemon.pod.store import FileStore
from multus_daemon.spec.attachment import ContainerRecord, SetAside
from multus_daemon.spec.cni import names
from multus_daemon.spec.cni.errors import InvalidEnvironmentError
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.ports import CorruptRecordError


class FakeDelegateStore(FileStore):
    """`saved` has every record in the order of its writing; `corrupt` the ids whose record can't be read.

    `left`: what another daemon left, by id; `load` finds those ids of it that are in `listed`, `recover` all. Of those
    in `damaged_left` it left what can't be read.

    `put_aside`: what is set aside, by id.

    `no_marks`: what `mark` raises.

    `fail_at`: the number of a call of any method, from 1, to what it raises.
    """

    def __init__(self) -> None:
        self.records: dict[str, ContainerRecord] = {}
        self.saved: list[ContainerRecord] = []
        self.put_aside: dict[str, SetAside] = {}
        self.left: dict[str, ContainerRecord] = {}
        self.damaged_left: set[str] = set()
        self.listed: set[str] = set()
        self.corrupt: set[str] = set()
        self.calls: list[tuple[str, str]] = []
        self.fail_at: dict[int, BaseException] = {}
        self.no_marks: OSError | None = None
        self._guard = threading.Lock()

    def _call(self, method: str, container_id: str) -> None:
        with self._guard:
            self.calls.append((method, container_id))
            number = len(self.calls)
        if error := self.fail_at.get(number):
            raise error

    def _check(self, container_id: str) -> None:
        if problem := names.container_id_problem(container_id):
            raise InvalidEnvironmentError(problem, repr(container_id))

    def load(self, container_id: ContainerId) -> ContainerRecord | None:
        self._call("load", container_id)
        self._check(container_id)
        if container_id in self.corrupt:
            raise CorruptRecordError(f"record can't be read: fake/{container_id}.json")
        if record := self.records.get(container_id):
            return record
        return replace(self.left[container_id], foreign=True) if container_id in self.listed else None

    def tidy(self, *, own: bool = False) -> None:
        """Nothing is half written."""

    def recover(self, container_id: ContainerId) -> ContainerRecord | None:
        self._call("recover", container_id)
        self._check(container_id)
        record = None if container_id in self.put_aside else self.left.get(container_id)
        return replace(record, foreign=True) if record else None

    def save(self, record: ContainerRecord, *, durable: bool = True) -> None:
        self._call("save", record.sandbox.container_id)
        self._check(record.sandbox.container_id)
        self.records[record.sandbox.container_id] = replace(record, foreign=False)
        self.corrupt.discard(record.sandbox.container_id)
        self.saved.append(record)

    def mark(self, container_id: ContainerId, leaving: Collection[tuple[str, str]]) -> None:
        self._call("mark", container_id)
        if self.no_marks:
            raise self.no_marks
        self._check(container_id)
        if container_id not in self.records:
            raise FileNotFoundError(container_id)
        self.records[container_id] = self.records[container_id].with_leaving(leaving)

    def remove(self, container_id: ContainerId) -> None:
        self._call("remove", container_id)
        self._check(container_id)
        self.records.pop(container_id, None)
        self.listed.discard(container_id)
        self.corrupt.discard(container_id)

    def set_aside(self, record: ContainerRecord, *, since: float, why: str) -> None:
        container_id = record.sandbox.container_id
        self._call("set_aside", container_id)
        self._check(container_id)
        if (before := self.put_aside.get(container_id)) and before.record:
            more = tuple(item for item in before.record.attachments if item not in record.attachments)
            record = replace(record, attachments=(*more, *record.attachments))
        self.put_aside[container_id] = SetAside(container_id, since, why, record)
        self.records.pop(container_id, None)

    def aside(self) -> list[SetAside]:
        self._call("aside", "")
        return [self.put_aside[name] for name in sorted(self.put_aside)]

    def forget(self, container_id: ContainerId) -> bool:
        self._call("forget", container_id)
        self._check(container_id)
        places = (self.put_aside, self.left, self.records)
        found = [place.pop(container_id, None) for place in places]
        known = any(found) or bool({container_id} & (self.corrupt | self.listed | self.damaged_left))
        for names_found in (self.corrupt, self.listed, self.damaged_left):
            names_found.discard(container_id)
        return known

    def leftovers(self, passed_over: Set[ContainerId], limit: int) -> dict[ContainerId, ContainerRecord | None]:
        self._call("leftovers", "")
        known = {*self.records, *self.corrupt, *self.put_aside, *passed_over}
        found = [ContainerId(name) for name in sorted({*self.left, *self.damaged_left}) if name not in known]
        return {name: self.recover(name) for name in found[:limit]}

    def containers(self, *, foreign: bool = True) -> list[ContainerId]:
        self._call("containers", "")
        found = {*self.records, *self.corrupt, *(self.listed if foreign else ())}
        return sorted(ContainerId(name) for name in found)
