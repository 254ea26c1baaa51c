"""The records in memory: what is asked of them, who is told, and when the disk is read."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from multus_daemon import deadlines
from multus_daemon.pod.records import Records
from multus_daemon.pod.view import Entry, View
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import IoFailureError
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Interface, Result
from tests.fakes.store import FakeDelegateStore

A, B = ContainerId("a"), ContainerId("b")
PATH = "/run/netns/p1"
CONFIG = conf.parse(b'{"cniVersion":"1.0.0","name":"n","type":"macvlan","master":"eth7"}')


def record(name: str, path: str = PATH, created: float = 1.0, ifname: str = "eth0") -> ContainerRecord:
    sandbox = Sandbox(ContainerId(name), path)
    result = Result(interfaces=(Interface("veth1"), Interface(ifname, sandbox=path)))
    attachment = Attachment("web/blue", CONFIG, IfName(ifname), result=result)
    names = Namespace("web"), PodName("p1"), PodUid("u1")
    return ContainerRecord(sandbox, IfName("eth0"), *names, (attachment,), complete=True, created=created)


class Node:
    """Records in a store, and the changes of which a follower was told."""

    def __init__(self) -> None:
        self.store = FakeDelegateStore()
        self.records = Records(self.store)
        self.told: list[tuple[str, str, bool]] = []
        for number in range(2):
            self.records.view.followers.append(
                lambda container_id, entry, is_read, number=number: self.told.append(  # type: ignore[misc]  # a default
                    (f"{container_id}{number}", entry.netns if entry else "", is_read)
                )
            )

    @property
    def view(self) -> View:
        return self.records.view

    @property
    def at(self) -> set[str]:
        return {entry.container_id for entry in self.view.at(PATH)}

    @property
    def reads(self) -> int:
        return sum(method != "save" for method, _ in self.store.calls)


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_container_is_at_its_path_until_it_leaves(node: Node) -> None:
    node.records.save(record("a"))
    node.records.save(record("b"))
    assert node.at == {"a", "b"}
    node.records.remove(A)
    node.records.remove(A)
    assert node.at == {"b"}
    assert node.view.counts == Counter({"web/blue": 1})
    node.records.save(record("b", "/run/netns/p2"))
    assert node.at == set()
    node.records.set_aside(record("b"), since=1.0, why="x")
    assert list(node.view) == []
    assert node.view.counts == Counter()


def test_followers_are_told_in_one_order(node: Node) -> None:
    node.store.records["b"] = record("b", "/run/netns/p2")
    node.records.save(record("a"))
    node.records.refresh()
    node.records.refresh()
    node.records.forget(B)
    assert node.told == [
        ("a0", PATH, False),
        ("a1", PATH, False),
        ("b0", "/run/netns/p2", True),
        ("b1", "/run/netns/p2", True),
        ("b0", "", False),
        ("b1", "", False),
    ]


def test_a_record_that_cannot_be_written_is_not_in_the_view(node: Node) -> None:
    node.store.fail_at[1] = OSError("no space")
    with pytest.raises(IoFailureError):
        node.records.save(record("a"))
    assert list(node.view) == []


def test_what_is_known_counts_more_than_what_is_read(node: Node) -> None:
    node.records.save(record("a"))
    node.store.records["a"] = record("a", "/run/netns/old")
    node.store.records["b"] = record("b", "/run/netns/old")
    node.store.calls.clear()
    node.records.refresh()
    assert node.store.calls == [("containers", ""), ("load", "b")]
    assert node.at == {"a"}
    del node.store.records["a"]
    node.records.refresh()
    assert node.at == set()


def test_what_leaves_while_it_is_read_has_left(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.store.records["a"] = record("a")
    load = node.store.load

    def deleting(container_id: ContainerId) -> ContainerRecord | None:
        found = load(container_id)
        node.records.remove(container_id)
        return found

    monkeypatch.setattr(node.store, "load", deleting)
    node.records.refresh()
    assert node.at == set()
    # It may come again.
    monkeypatch.setattr(node.store, "load", load)
    node.store.records["a"] = record("a")
    node.records.refresh()
    assert node.at == {"a"}


def test_what_cannot_be_read_is_read_the_next_time(node: Node) -> None:
    node.store.records["b"] = record("b")
    node.store.corrupt.add("a")
    node.records.refresh()
    assert node.view.unreadable == {"a"}
    assert node.at == {"b"}
    node.store.corrupt.clear()
    node.store.records["a"] = record("a")
    node.records.refresh()
    assert node.view.unreadable == set()
    assert node.at == {"a", "b"}


@pytest.mark.parametrize("seconds", [0.0, 3600.0])
def test_the_disk_is_asked_as_long_as_a_predecessor_may_write(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(deadlines, "PREDECESSOR_SECONDS", seconds)
    node = Node()
    ours = record("a")
    assert not node.records.is_followed(ours, PATH)
    assert not node.records.claims_of_others(ours)
    before = node.reads
    node.store.records["b"] = record("b", created=2.0)
    assert node.records.is_followed(ours, PATH) is (seconds > 0)
    assert (node.reads > before) is (seconds > 0)


def test_a_listing_that_fails_makes_nothing_complete(monkeypatch: pytest.MonkeyPatch, node: Node) -> None:
    monkeypatch.setattr(deadlines, "PREDECESSOR_SECONDS", 0.0)
    node = Node()
    node.store.fail_at[1] = OSError("disk")
    with pytest.raises(IoFailureError, match="disk"):
        node.records.is_followed(record("a"), PATH)
    assert not node.view.is_complete
    node.records.refresh()
    assert node.view.is_complete


@pytest.mark.parametrize(
    ("other", "is_followed"),
    [
        (record("b", created=2.0), True),
        (record("b", created=0.5), False),
        (record("b", "/run/netns/p2", created=2.0), False),
        (record("b", created=2.0, ifname="net1"), False),
        (record("a", created=2.0), False),
    ],
)
def test_a_newer_container_with_the_same_interface_follows(
    node: Node, other: ContainerRecord, is_followed: bool
) -> None:
    node.records.save(other)
    assert node.records.is_followed(record("a"), PATH) is is_followed
    # A record that a person has removed.
    node.store.records.clear()
    assert not node.records.is_followed(record("a"), PATH)


def test_what_an_entry_has_of_a_record() -> None:
    entry = Entry.of(record("a"))
    assert (entry.pod, entry.netns, entry.complete, entry.detached) == ("web/p1", PATH, True, False)
    assert sorted(entry.links) == ["eth7", "veth1"]
    assert [(item.name, item.ifname, item.has_link, item.is_measured) for item in entry.networks] == [
        ("web/blue", "eth0", True, True)
    ]
    # The links of one that is not attached yet are of no use.
    assert Entry.of(replace(record("a"), complete=False)).links == ()
