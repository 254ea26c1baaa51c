"""FileStore on a disk that loses what was not fsynced: after any failure every plugin that had begun can be deleted."""

from __future__ import annotations

import itertools
import logging
import os
import unittest.mock
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.plugins.cache import ResultCache
from multus_daemon.pod import record_format, upstream
from multus_daemon.pod import store as store_module
from multus_daemon.pod.store import FileStore
from multus_daemon.runtime import fs
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni import conf, gojson, result
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from tests import power

ID = ContainerId("c0ffee")


def attachment(name: str, ifname: str, note: str = "", **more: Any) -> Attachment:
    config = conf.parse(
        b'{"cniVersion":"1.0.0",  "name":"%s","type":"ptp","note":"%s"}' % (name.encode(), note.encode())
    )
    return Attachment(name, config, IfName(ifname), cni_args=(("K8S_POD_NAME", "p"),), **more)


FIRST = (attachment("cluster", "eth0", cluster_network=True), attachment("storage", "net1"))
OTHERS = (attachment("cluster", "eth0", "changed", cluster_network=True), attachment("backup", "net1"))
HOT = attachment("hot", "net2", hot_plugged=True)


def with_result(begun: Attachment) -> Attachment:
    given = {"cniVersion": "1.0.0", "interfaces": [{"name": begun.ifname, "sandbox": "/run/netns/a"}]}
    return replace(begun, result=result.from_object(given, "1.0.0"))


@dataclass
class Node:
    """A daemon's store, and its engine as far as records go: what it does, in its order."""

    store: FileStore
    recorder: power.Recorder
    begun: tuple[Attachment, ...] = ()
    """Lists the attachments whose plugins may have made something."""
    answered: ContainerRecord | None = None
    """Holds the record whose results the runtime has received."""
    moments: list[tuple[int, tuple[Attachment, ...], ContainerRecord | None]] = field(default_factory=list)
    """After how many operations these two have been what."""
    record: ContainerRecord = field(
        default_factory=lambda: ContainerRecord(
            sandbox=Sandbox(ID, "/run/netns/a"),
            ifname=IfName("eth0"),
            pod_namespace=Namespace("web"),
            pod_name=PodName("p"),
            pod_uid=PodUid("u"),
            attachments=(),
            created=1.5,
        )
    )

    def moment(self) -> None:
        self.moments.append((len(self.recorder.operations), self.begun, self.answered))

    def begin(self, *new: Attachment) -> None:
        """Plugins run: the record is there before."""
        self.record = replace(self.record, attachments=(*self.record.attachments, *new))
        self.store.save(self.record)
        self.begun += new
        self.moment()

    def finish(self) -> None:
        """The results are kept, then told."""
        self.record = replace(self.record, attachments=tuple(map(with_result, self.record.attachments)), complete=True)
        self.store.save(self.record, durable=False)
        self.answered = self.record
        self.moment()

    def detach(self, *names: str) -> None:
        """Plugins have undone theirs, then the record says so."""
        self.answered = None
        self.begun = tuple(item for item in self.begun if item.name not in names)
        self.moment()
        rest = tuple(item for item in self.record.attachments if item.name not in names)
        self.record = replace(self.record, attachments=rest)
        if rest:
            self.store.save(self.record)
        else:
            self.store.remove(ID)

    def at(self, operations: int) -> tuple[tuple[Attachment, ...], ContainerRecord | None]:
        """Return the attachments begun and the last answer after this many operations."""
        found: tuple[tuple[Attachment, ...], ContainerRecord | None] = ((), None)
        for position, begun, answered in self.moments:
            if position <= operations:
                found = begun, answered
        return found


def add(node: Node) -> None:
    node.begin(*FIRST)
    node.finish()


def hot_plug(node: Node) -> None:
    add(node)
    node.begin(HOT)
    node.finish()


def delete(node: Node) -> None:
    add(node)
    node.detach("cluster", "storage")


def delete_in_part(node: Node) -> None:
    add(node)
    node.detach("storage")
    node.detach("cluster")


def undo(node: Node) -> None:
    node.begin(*FIRST)
    node.detach("cluster", "storage")


def undo_hot_plug(node: Node) -> None:
    add(node)
    node.begin(HOT)
    node.detach("hot")


def unplug(node: Node) -> None:
    hot_plug(node)
    node.detach("hot")


def add_again(node: Node) -> None:
    """The runtime may do so with the same id; meanwhile the networks have changed."""
    undo(node)
    node.record = replace(node.record, created=2.5)
    node.begin(*OTHERS)
    node.finish()


def add_after_delete(node: Node) -> None:
    delete(node)
    node.record = replace(node.record, created=2.5)
    node.begin(*OTHERS)
    node.finish()


SEQUENCES = [add, hot_plug, delete, delete_in_part, undo, undo_hot_plug, unplug, add_again, add_after_delete]


class BrokenPromiseError(AssertionError):
    """A promise has not been kept."""


def recorded(root: Path, sequence: Callable[[Node], None], *, syncs: bool = True, upstream_too: bool = False) -> Node:
    """The sequence, done in `root`; the recorder has seen all of it."""
    # Before the first pod there are directories: the model is of files.
    (root / "attachments").mkdir(parents=True, mode=0o700)
    before_the_failure = unittest.mock.patch.object(fs, "boot", return_value="0" * 8)
    with before_the_failure, power.Recorder(root, syncs=syncs) as recorder:
        node = Node(FileStore(root, ResultCache(root), upstream_too=upstream_too), recorder)
        sequence(node)
    assert recorder.disk().whole() == power.content(root)
    return node


def restart(root: Path, files: power.Files) -> FileStore:
    """A daemon starts where there is this."""
    power.put(root, files)
    store = FileStore(root, ResultCache(root))
    store.sweep()
    return store


def check(root: Path, files: power.Files, begun: tuple[Attachment, ...], caplog: pytest.LogCaptureFixture) -> None:
    """The promises of the store where there is this after a power failure."""
    caplog.clear()
    store = restart(root, files)
    try:
        if not (is_damaged_for_upstream(files) and not (root / "attachments" / f"{ID}.json").exists()):
            check_started(store, root, begun)
        else:
            # Nobody can read what upstream's daemon was to have, and nobody has to: there is nothing to be deleted.
            assert begun == ()
            # Emptied, as file systems really leave it, it is gone. A cut one is as upstream leaves its own.
            assert (root / ID).exists() is (files[ID] != b"")
        assert [entry.message for entry in caplog.records if entry.levelno >= logging.ERROR] == []
    except Exception as error:
        raise BrokenPromiseError(f"{type(error).__name__}: {error}; with {files}") from error


def is_damaged_for_upstream(files: power.Files) -> bool:
    """Return whether the file for an upstream daemon exists and is incomplete."""
    if (data := files.get(ID)) is None:
        return False
    try:
        return upstream.from_delegates(ID, data, (), 0.0).attachments == ()
    except gojson.JsonError:
        return True


def check_started(store: FileStore, root: Path, begun: tuple[Attachment, ...]) -> None:
    assert [name for name in power.content(root) if not name.endswith(".json") and name != ID] == [], "a file is left"
    # One that can't be read would keep DEL and GC from what it names.
    records = {container_id: store.load(container_id) for container_id in store.containers()}
    record = records.get(ID)
    if record is not None and record.foreign:
        # Of what was deleted. It has no arguments, as the result cache would have them.
        assert begun == ()
        record = replace(record, attachments=tuple(replace(i, cni_args=FIRST[0].cni_args) for i in record.attachments))
        record = replace(record, attachments=tuple(replace(i, hot_plugged=i.name == "hot") for i in record.attachments))
    known = [] if record is None else [replace(item, result=None) for item in record.attachments]
    for item in begun:
        assert item in known, f"the plugin of {item.name} has begun, and can't be deleted"
    # Nobody has ever asked for others.
    assert all(item in (*FIRST, *OTHERS, HOT) for item in known)
    store.remove(ID)
    assert store.load(ID) is None


@pytest.fixture(autouse=True)
def _another_boot(monkeypatch):
    """Whatever is found was written before the power failed."""
    monkeypatch.setattr(fs, "is_of_earlier_boot", lambda status: True)


def check_power_failures(
    root: Path,
    node: Node,
    caplog: pytest.LogCaptureFixture,
    few: Callable[[str], bool] = lambda path: False,
) -> int:
    """After each operation, with each loss (`few`: see `outcomes`); how many different states of the disk that were."""
    done = set()
    for count in range(len(node.recorder.operations) + 1):
        begun, _ = node.at(count)
        for files in node.recorder.disk(count).outcomes(few):
            key = (tuple(item.config.raw for item in begun), tuple(files.items()))
            if key not in done:
                done.add(key)
                check(root, files, begun, caplog)
    return len(done)


def is_for_upstream(path: str) -> bool:
    """Return whether the file is one that an upstream daemon would read, or a temporary file for it."""
    return "/" not in path


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_a_power_failure_at_any_step(sequence, tmp_path, caplog):
    node = recorded(tmp_path / "multus", sequence)
    assert check_power_failures(tmp_path / "multus", node, caplog) >= 10


@pytest.mark.parametrize("sequence", [add, delete, undo])
def test_a_power_failure_at_any_step_with_upstreams_record(sequence, tmp_path, caplog):
    node = recorded(tmp_path / "multus", sequence, upstream_too=True)
    assert check_power_failures(tmp_path / "multus", node, caplog) >= 10


@pytest.mark.parametrize("sequence", [item for item in SEQUENCES if item not in (add, delete, undo)])
def test_a_power_failure_at_any_step_of_a_longer_sequence_with_upstreams_record(sequence, tmp_path, caplog):
    """Every name may be lost; what upstream's file can hold is cut short, for there are 50,000 states else."""
    node = recorded(tmp_path / "multus", sequence, upstream_too=True)
    assert check_power_failures(tmp_path / "multus", node, caplog, is_for_upstream) >= 500


@pytest.mark.parametrize("upstream_too", [False, True])
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_a_kill_at_any_step(sequence, upstream_too, tmp_path, caplog):
    """Then nothing is lost, and what has been answered is known as it was answered."""
    root = tmp_path / "multus"
    node = recorded(root, sequence, upstream_too=upstream_too)
    for count in range(len(node.recorder.operations) + 1):
        begun, answered = node.at(count)
        files = node.recorder.disk(count).whole()
        if answered:
            record = restart(root, files).load(ID)
            assert record is not None
            assert record.complete
            # A hot-plug that has begun is in it too.
            assert record.attachments[: len(answered.attachments)] == answered.attachments
        check(root, files, begun, caplog)


@pytest.mark.parametrize("sequence", [add, add_again])
def test_a_second_power_failure_while_the_daemon_starts(sequence, tmp_path, caplog):
    root = tmp_path / "multus"
    node = recorded(root, sequence)
    for count in range(len(node.recorder.operations) + 1):
        begun, _ = node.at(count)
        for files in list(node.recorder.disk(count).outcomes()):
            power.put(root, files)
            with power.Recorder(root) as recorder:
                FileStore(root, ResultCache(root)).sweep()
            for step in range(1, len(recorder.operations) + 1):
                for left in recorder.disk(step).outcomes():
                    check(root, left, begun, caplog)


@pytest.mark.parametrize("sequence", [add, hot_plug])
def test_the_number_of_the_process_is_another_ones_after_the_restart(sequence, tmp_path, caplog, monkeypatch):
    """Temporary files of a writer that lives are its own; after a power failure it does not live."""
    with monkeypatch.context() as before:
        before.setattr(os, "getpid", lambda: 1)
        node = recorded(tmp_path / "multus", sequence)
    check_power_failures(tmp_path / "multus", node, caplog)


def test_what_an_add_waits_for(tmp_path):
    """One fsync; a container that is known already has two for each further state, and removing it has none.

    What is written for an upstream daemon has none.
    """
    node = recorded(tmp_path / "multus", add)
    kinds = [operation.kind for operation in node.recorder.operations]
    assert kinds == ["create", "write", "fsync", "rename", "write"]
    node = recorded(tmp_path / "hot", hot_plug)
    kinds = [operation.kind for operation in node.recorder.operations[len(kinds) :]]
    assert kinds == ["create", "write", "fsync", "rename", "fsync of a directory", "write"]
    node = recorded(tmp_path / "undone", undo)
    assert [operation.kind for operation in node.recorder.operations][-1:] == ["unlink"]
    node = recorded(tmp_path / "upstream", add, upstream_too=True)
    kinds = [operation.kind for operation in node.recorder.operations]
    assert kinds == ["create", "write", "fsync", "rename", "create", "write", "rename", "write"]


# --- these tests can fail --------------------------------------------------------------------------------------------


def never_adopt(monkeypatch):
    monkeypatch.setattr(FileStore, "_adopt", lambda self, own: fs.sweep(self._directory, own=own) and None)


def no_wait_for_names(monkeypatch):
    monkeypatch.setattr(fs, "fsync_directory", lambda path: None)


def no_wait_for_content(monkeypatch):
    monkeypatch.setattr(fs, "write_atomic", partial(fs.write_atomic, fsync=False))


def results_in_a_new_file(monkeypatch):
    """Put in the place of the durable record instead of behind it."""

    def append(path, data):
        fs.write_atomic(path, Path(path).read_bytes() + data, fsync=False)

    monkeypatch.setattr(fs, "append", append)


def torn_results_count(monkeypatch):
    """Decode only the last line of a record, complete or not."""
    decode = record_format.decode
    monkeypatch.setattr(record_format, "decode", lambda data: decode(data.removesuffix(b"\n").split(b"\n")[-1]))


def what_is_in_place_counts(monkeypatch):
    monkeypatch.setattr(store_module, "_is_newer", lambda record, place: not Path(place).exists())


def numbers_of_processes_are_for_ever(monkeypatch):
    # Of the writer, which another process has later, then of the daemon that starts.
    numbers = itertools.chain([1], itertools.repeat(2))
    monkeypatch.setattr(fs, "boot", lambda: "0" * 8)
    monkeypatch.setattr(os, "getpid", lambda: next(numbers))


def first_line_without_its_end(monkeypatch):
    write = fs.write_atomic
    monkeypatch.setattr(fs, "write_atomic", lambda path, data, **more: write(path, data[:-1], **more))
    append = fs.append
    monkeypatch.setattr(fs, "append", lambda path, data: append(path, b"\n" + data))


@pytest.mark.parametrize(
    ("sequence", "mutate"),
    [
        (add, never_adopt),
        (add, no_wait_for_content),
        (add, results_in_a_new_file),
        (add, torn_results_count),
        (add, first_line_without_its_end),
        (add, numbers_of_processes_are_for_ever),
        (add_again, what_is_in_place_counts),
        (add_after_delete, what_is_in_place_counts),
        (hot_plug, no_wait_for_names),
        (delete_in_part, no_wait_for_content),
    ],
)
def test_a_store_that_does_less_is_found_out(sequence, mutate, tmp_path, caplog, monkeypatch):
    mutate(monkeypatch)
    node = recorded(tmp_path / "multus", sequence)
    with pytest.raises(BrokenPromiseError):
        check_power_failures(tmp_path / "multus", node, caplog)


def upstreams_counts_first(monkeypatch):
    load = FileStore.load

    def swapped(self, container_id):
        return self._left_by_upstream(container_id, ()) or load(self, container_id)

    monkeypatch.setattr(FileStore, "load", swapped)


def upstreams_stays(monkeypatch):
    monkeypatch.setattr(FileStore, "remove", lambda self, container_id: fs.remove(self._own_path(container_id)))


def emptied_stay(monkeypatch):
    monkeypatch.setattr(FileStore, "_remove_emptied", lambda self: None)


@pytest.mark.parametrize(
    ("sequence", "mutate"),
    [
        (hot_plug, upstreams_counts_first),
        (add_again, upstreams_counts_first),
        (add_after_delete, upstreams_counts_first),
        (delete_in_part, upstreams_stays),
        (add_after_delete, emptied_stay),
    ],
)
def test_a_store_that_does_less_with_upstreams_record_is_found_out(sequence, mutate, tmp_path, caplog, monkeypatch):
    mutate(monkeypatch)
    node = recorded(tmp_path / "multus", sequence, upstream_too=True)
    with pytest.raises(BrokenPromiseError):
        check_power_failures(tmp_path / "multus", node, caplog, is_for_upstream)


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_a_disk_that_does_nothing_for_fsync_is_found_out(sequence, tmp_path, caplog):
    node = recorded(tmp_path / "multus", sequence, syncs=False)
    with pytest.raises(BrokenPromiseError):
        check_power_failures(tmp_path / "multus", node, caplog)
