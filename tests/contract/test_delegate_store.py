"""The contract of `FileStore`, over the files and over the fake."""

from __future__ import annotations

import base64
import dataclasses
import json

import pytest

from multus_daemon.plugins.cache import Entry, ResultCache
from multus_daemon.pod.store import FileStore
from multus_daemon.spec.attachment import BUILT_IN, Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni import conf, versions
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Dns, Interface, IpConfig, Result, Route
from multus_daemon.spec.ports import CorruptRecordError
from tests.fakes.store import FakeDelegateStore

RESULT = Result(
    interfaces=(
        Interface("veth0", "02:00:00:00:00:01", 1450),
        Interface("net1", sandbox="/run/netns/a", pci_id="0000:1"),
    ),
    ips=(IpConfig("10.1.0.2/24", "10.1.0.1", 1), IpConfig("fd00::2/64")),
    routes=(Route("0.0.0.0/0", table=0, scope=0), Route("::/0", "fd00::1", 1400, 1300, 5)),
    dns=Dns(("10.1.0.1",), "example", ("a", "b"), ("ndots:5",)),
)
# Bytes that no JSON encoder would write like this: they must come back as they are.
SINGLE = b'{ "name" : "one",\n "type":"ptp", "big": 1e2, "cniVersion":"0.4.0", "unknown":[1,2] }'
LIST = (
    b'{"cniVersions":["0.3.1","1.0.0"],"name":"two","disableCheck":"true",'
    b'"plugins":[{"type":"bridge"},{"type":"portmap"}]}'
)


def record(container_id="c0ffee", **changes):
    one = conf.parse(SINGLE)
    attachments = (
        Attachment(
            "cluster", one, IfName("eth0"), cluster_network=True, cni_args=(("IgnoreUnknown", "true"), ("A", "b=c"))
        ),
        Attachment(
            "web/two", conf.parse(LIST), IfName("net1"), capability_args={"ips": ["10.1.0.2/24"], "n": {"x": 1}}
        ).with_result(RESULT),
        Attachment(
            "web/three",
            dataclasses.replace(one, cni_version="0.3.1"),
            IfName("net2"),
            hot_plugged=True,
            served_by={"ptp": BUILT_IN, "host-local": "/opt/cni/bin/host-local"},
        ).with_result(Result()),
    )
    whole = ContainerRecord(
        sandbox=Sandbox(container_id, "/run/netns/a"),
        ifname=IfName("eth0"),
        pod_namespace=Namespace("web"),
        pod_name=PodName("web-0"),
        pod_uid=PodUid("1-2-3"),
        attachments=attachments,
        created=1234567890.25,
        deletes_failed=3,
        given_up=True,
        failing_since=12.5,
    )
    return dataclasses.replace(whole, **changes)


def _files(tmp_path):
    return FileStore(tmp_path / "multus", ResultCache(tmp_path / "multus"))


@pytest.fixture(params=["files", "fake"])
def store(request, tmp_path):
    return _files(tmp_path) if request.param == "files" else FakeDelegateStore()


def test_nothing_known(store):
    assert store.load("c0ffee") is None
    assert store.containers() == []
    store.remove("c0ffee")


def test_a_record_comes_back_equal(store):
    store.save(record())
    loaded = store.load("c0ffee")
    assert loaded == record()
    assert loaded.attachments[0].config.raw == SINGLE
    assert loaded.attachments[1].config.cni_version == "1.0.0"
    assert loaded.attachments[2].config.cni_version == "0.3.1"
    # A record of ours is not another daemon's.
    assert not loaded.foreign
    assert store.recover("c0ffee") is None


def test_the_last_one_counts(store):
    store.save(record())
    store.save(record(complete=True, attachments=()))
    assert store.load("c0ffee") == record(complete=True, attachments=())


def test_the_mark_of_what_leaves(store):
    store.save(record(complete=True))
    store.save(record(complete=True, created=5.0), durable=False)
    store.mark("c0ffee", [("two", "net1")])
    loaded = store.load("c0ffee")
    assert [item.leaving for item in loaded.attachments] == [False, True, False]
    assert (loaded.complete, loaded.created) == (True, 5.0)
    store.mark("c0ffee", [("one", "net2")])
    assert [item.leaving for item in store.load("c0ffee").attachments] == [False, True, True]
    # Without the cluster network the ADD is not complete.
    store.mark("c0ffee", [("one", "eth0")])
    loaded = store.load("c0ffee")
    assert [item.leaving for item in loaded.attachments] == [True, True, True]
    assert not loaded.complete
    store.save(loaded)
    assert store.load("c0ffee") == loaded
    # A record that is written later has its own marks.
    store.save(record())
    assert not any(item.leaving for item in store.load("c0ffee").attachments)


def test_a_mark_without_a_record(store):
    with pytest.raises(FileNotFoundError):
        store.mark("c0ffee", [("two", "net1")])
    assert store.load("c0ffee") is None


def test_removed_is_forgotten(store):
    store.save(record())
    store.save(record("other"))
    assert store.containers() == ["c0ffee", "other"]
    store.remove("c0ffee")
    store.remove("c0ffee")
    assert store.load("c0ffee") is None
    assert store.containers() == ["other"]
    assert store.load("other") == record("other")


@pytest.mark.parametrize("name", ["", "..", "a/b", "../c0ffee", "a\0", "a\n", "-a", "a" * 129])
def test_ids_that_are_none(store, name):
    for call in (store.load, store.recover, store.remove, lambda name: store.save(record(name))):
        with pytest.raises(CniError):
            call(name)
    assert store.containers() == []


def test_long_ids(store):
    name = "a" * 128
    store.save(record(name))
    assert store.load(name) == record(name)


@pytest.mark.parametrize("version", versions.SUPPORTED)
def test_configurations_of_each_version(store, version):
    config = conf.parse(b'{"name":"n","type":"ptp","cniVersion":"%s"}' % version.encode())
    attachment = Attachment("n", config, IfName("net1")).with_result(RESULT)
    store.save(record(attachments=(attachment,)))
    assert store.load("c0ffee").attachments == (attachment,)


def test_configuration_without_a_version(store):
    attachment = Attachment("n", conf.parse(b'{"name":"n","type":"ptp"}'), IfName("net1"))
    store.save(record(attachments=(attachment,)))
    assert store.load("c0ffee").attachments[0].config.cni_version == ""


def test_a_corrupt_record_is_no_unknown_container(store, tmp_path):
    store.save(record())
    if isinstance(store, FakeDelegateStore):
        store.corrupt.add("c0ffee")
    else:
        (tmp_path / "multus" / "attachments" / "c0ffee.json").write_bytes(b"")
    with pytest.raises(CorruptRecordError, match=r"c0ffee\.json"):
        store.load("c0ffee")
    assert store.containers() == ["c0ffee"]
    store.remove("c0ffee")
    assert store.load("c0ffee") is None


def _leave(store, tmp_path, container_id, attachments=(), *, listed=True):
    """Leave what another daemon leaves of a container: cached results, and its file where it is `listed`."""
    if isinstance(store, FakeDelegateStore):
        store.left[container_id] = record(container_id, attachments=attachments or record().attachments)
        return
    cache = ResultCache(tmp_path / "multus")
    for attachment in attachments:
        cache.write(
            Entry(
                container_id, attachment.config.raw, attachment.ifname, attachment.config.name, netns="/run/netns/a",
                result={"cniVersion": "0.4.0"},
            )
        )  # fmt: skip
    if listed:
        file = [{"Name": item.name, "Bytes": base64.b64encode(item.config.raw).decode()} for item in attachments]
        (tmp_path / "multus" / container_id).write_text(json.dumps(file))


ONE = Attachment("one", conf.parse(SINGLE), IfName("eth0"), cluster_network=True)
TWO = Attachment("two", conf.parse(LIST), IfName("net1"))


def test_nothing_left(store):
    assert store.leftovers(frozenset(), 10) == {}


@pytest.mark.parametrize("listed", [True, False])
def test_leftovers_of_another_daemon(store, tmp_path, listed):
    store.save(record("ours"))
    _leave(store, tmp_path, "theirs", (ONE, TWO), listed=listed)
    _leave(store, tmp_path, "ours", (ONE,), listed=listed)
    found = store.leftovers(frozenset(), 10)
    assert list(found) == ["theirs"]
    left = found["theirs"]
    assert left.foreign
    assert left.sandbox == Sandbox(ContainerId("theirs"), "/run/netns/a")
    assert [(item.config.name, item.ifname) for item in left.attachments] == [("one", "eth0"), ("two", "net1")]
    assert store.load("ours") == record("ours")
    assert store.containers(foreign=False) == ["ours"]


@pytest.mark.parametrize("listed", [True, False])
def test_leftovers_come_in_parts_each_container_whole(store, tmp_path, listed):
    names = {f"a-{number}-b" for number in range(9)}
    for name in sorted(names):
        _leave(store, tmp_path, name, (ONE, TWO), listed=listed)
    seen: set[str] = set()
    while found := store.leftovers(frozenset(seen), 4):
        assert len(found) <= 4
        assert not seen & found.keys()
        assert all(len(left.attachments) == 2 for left in found.values())
        seen |= found.keys()
    assert seen == names


def test_leftovers_that_cannot_be_read(store, tmp_path):
    if isinstance(store, FakeDelegateStore):
        store.damaged_left.add("broken")
    else:
        (tmp_path / "multus" / "results").mkdir(parents=True)
        (tmp_path / "multus" / "broken").write_bytes(b"")
        (tmp_path / "multus" / "results" / "cbr0-half-eth0").write_bytes(b'{"kind":')
    _leave(store, tmp_path, "whole", (ONE,))
    found = store.leftovers(frozenset(), 10)
    assert found["broken"] is None
    assert found["whole"] is not None
    assert set(found) == {"broken", "whole"}


def test_what_is_set_aside_is_on_record_no_more_until_it_is_forgotten(store):
    store.save(record())
    store.save(record("other"))
    store.set_aside(record(), since=12.5, why="no daemon of mine")
    assert store.containers() == ["other"]
    assert store.load("c0ffee") is None
    assert store.recover("c0ffee") is None
    (item,) = store.aside()
    assert (item.container_id, item.since, item.why, item.record) == ("c0ffee", 12.5, "no daemon of mine", record())
    assert store.forget("c0ffee")
    assert store.aside() == []
    assert not store.forget("c0ffee")
    assert store.containers() == ["other"]


def test_what_is_set_aside_twice_is_there_once_and_whole(store):
    first, *others = record().attachments
    store.set_aside(record(attachments=(first,)), since=1.0, why="x")
    for _ in range(2):
        store.save(record(attachments=tuple(others)))
        store.set_aside(record(attachments=tuple(others)), since=2.0, why="y")
    (item,) = store.aside()
    assert item.record.attachments == record().attachments
    assert (item.since, item.why) == (2.0, "y")


def test_what_is_set_aside_does_not_hold_up_another_container_of_that_name(store):
    store.set_aside(record(), since=1.0, why="x")
    store.save(record(created=99.0))
    assert store.load("c0ffee").created == 99.0
    assert store.containers() == ["c0ffee"]


def test_what_is_on_record_can_be_forgotten_too(store):
    store.save(record())
    store.save(record("other"))
    assert store.forget("c0ffee")
    assert store.load("c0ffee") is None
    assert store.recover("c0ffee") is None
    assert not store.forget("c0ffee")
    assert store.containers() == ["other"]


@pytest.mark.parametrize("container_id", ["../x", "", "a/b", ".x"])
def test_an_id_that_is_none_is_nothing_to_forget(store, container_id):
    with pytest.raises(CniError):
        store.forget(container_id)
