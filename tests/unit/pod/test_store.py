"""The files of FileStore: format, modes, damage, and what an upstream daemon left."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from multus_daemon.plugins.cache import Entry, ResultCache
from multus_daemon.plugins.run import ListRunner
from multus_daemon.pod import record_format
from multus_daemon.pod.store import FileStore
from multus_daemon.runtime import fs
from multus_daemon.spec.attachment import LEAVING, Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.ports import CorruptRecordError
from tests import calls
from tests.fakes.runner import FakePluginRunner

UPSTREAM = json.loads((Path(__file__).parent / "data" / "upstream.json").read_text())


def small(container_id="c0ffee"):
    config = conf.parse(b'{"name":"n","type":"ptp","cniVersion":"1.0.0"}')
    return ContainerRecord(
        sandbox=Sandbox(container_id, "/run/netns/a"),
        ifname=IfName("eth0"),
        pod_namespace=Namespace("web"),
        pod_name=PodName("p"),
        pod_uid=PodUid("u"),
        attachments=(Attachment("n", config, IfName("eth0"), cluster_network=True, cni_args=(("K8S_POD_NAME", "p"),)),),
        created=1.5,
    )


@pytest.fixture
def cni_dir(tmp_path):
    return tmp_path / "multus"


@pytest.fixture
def cache(cni_dir):
    return ResultCache(cni_dir)


@pytest.fixture
def store(cni_dir, cache):
    return FileStore(cni_dir, cache)


def delete(runner, cache, record, attachment):
    """DEL of one attachment, as the engine does it."""
    calls.delete(ListRunner(runner.as_plugins, cache, "/opt/cni/bin"), record.sandbox, attachment)


def own_path(cni_dir, container_id="c0ffee"):
    return cni_dir / "attachments" / f"{container_id}.json"


# --- our own format --------------------------------------------------------------------------------------------------


@pytest.mark.conformance("verbs-23")
def test_file_format(store, cni_dir):
    store.save(small())
    path = own_path(cni_dir)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    data = path.read_bytes()
    assert data.endswith(b"}\n")
    head, _, body = data.partition(b',"record":')
    body = body[:-2]
    assert json.loads(head + b"}") == {"format": 1, "sha256": hashlib.sha256(body).hexdigest()}
    fields = json.loads(body)
    assert fields["containerId"] == "c0ffee"
    assert base64.b64decode(fields["attachments"][0]["config"]) == small().attachments[0].config.raw
    assert [entry.name for entry in path.parent.iterdir()] == ["c0ffee.json"]


def test_a_newer_format_is_refused_in_clear_text(store, cni_dir):
    store.save(small())
    path = own_path(cni_dir)
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":2'))
    with pytest.raises(CorruptRecordError, match="written by a newer version of the daemon: format 2"):
        store.load("c0ffee")


def test_new_keys_of_a_later_version_are_passed_over(store, cni_dir):
    store.save(small())
    path = own_path(cni_dir)
    body = path.read_bytes().partition(b',"record":')[2][:-2].replace(b"{", b'{"later":{"x":1},', 1)
    envelope = b'{"format":1,"note":1,"sha256":"%s","record":%s}' % (hashlib.sha256(body).hexdigest().encode(), body)
    path.write_bytes(envelope)
    assert store.load("c0ffee") == small()


def test_every_truncation_is_corruption():
    data = record_format.encode(small())
    for length in range(len(data)):
        with pytest.raises(record_format.RecordFormatError):
            record_format.decode(data[:length])


def test_every_flipped_bit_is_corruption():
    data = record_format.encode(small())
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(record_format.RecordFormatError):
                record_format.decode(bytes(damaged))


def test_a_record_of_another_container_is_not_believed(store, cni_dir):
    store.save(small("other"))
    own_path(cni_dir, "other").rename(own_path(cni_dir))
    with pytest.raises(CorruptRecordError, match="for another container, other"):
        store.load("c0ffee")


def test_symbolic_links_are_not_followed(store, cni_dir, tmp_path):
    store.save(small("other"))
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_bytes(record_format.encode(small()))
    own_path(cni_dir).symlink_to(elsewhere)
    with pytest.raises(CorruptRecordError):
        store.load("c0ffee")
    # Saving puts a file in the link's place.
    store.save(small())
    assert not own_path(cni_dir).is_symlink()
    assert elsewhere.read_bytes() == record_format.encode(small())


def test_a_linked_directory_is_refused(store, cni_dir, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    cni_dir.mkdir()
    (cni_dir / "attachments").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError):
        store.save(small())
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.weak_spot(28)
@pytest.mark.conformance("verbs-1")
def test_a_failed_save_changes_nothing(store, cni_dir, monkeypatch):
    store.save(small())
    before = own_path(cni_dir).read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.save(small())
    assert own_path(cni_dir).read_bytes() == before
    assert len(list(own_path(cni_dir).parent.iterdir())) == 1


def test_foreign_files_are_no_containers(store, cni_dir):
    store.save(small())
    cni_dir.joinpath("results").mkdir()
    (cni_dir / "attachments" / ".c0ffee.json.abc").write_text("")
    (cni_dir / "attachments" / "notes.txt").write_text("")
    (cni_dir / "upstreamid").write_text("[]")
    (cni_dir / ".hidden").write_text("")
    assert store.containers() == ["c0ffee", "upstreamid"]


@pytest.mark.parametrize("name", ["results", "attachments"])
def test_a_container_called_like_a_directory(store, cni_dir, cache, name):
    (cni_dir / "results").mkdir(parents=True)
    assert store.load(name) is None
    store.save(small(name))
    assert store.load(name) == small(name)
    store.remove(name)
    assert (cni_dir / "results").is_dir()


# --- a damaged record and what else is known -------------------------------------------------------------------------


def entry(network="n", ifname="eth0", container_id="c0ffee", networks=0):
    return Entry(
        networks=networks,
        container_id=container_id,
        config=b'{"cniVersion":"1.0.0","name":"%s","type":"ptp"}' % network.encode(),
        ifname=ifname,
        network=network,
        netns="/run/netns/a",
        cni_args=(("K8S_POD_NAMESPACE", "web"), ("K8S_POD_NAME", "p"), ("K8S_POD_UID", "u")),
        capability_args={"mac": "02:00:00:00:00:01"},
        result={"cniVersion": "1.0.0", "ips": [{"address": "10.1.0.2/24"}]},
    )


def test_a_damaged_record_falls_back_to_the_result_cache(store, cni_dir, cache, caplog):
    store.save(small())
    own_path(cni_dir).write_bytes(b'{"format":1')
    for network, ifname in (("b", "net10"), ("n", "eth0"), ("a", "net9")):
        cache.write(entry(network, ifname, networks=2 if network == "b" else 3))
    cache.write(entry("n", "eth0", "c0ffee-other"))
    with pytest.raises(CorruptRecordError, match=str(own_path(cni_dir))):
        store.load("c0ffee")
    (cni_dir / "c0ffee").write_bytes(b"y")
    with caplog.at_level(logging.WARNING):
        found = store.recover("c0ffee")
    assert str(cni_dir / "c0ffee") in caplog.text
    assert [(item.name, item.ifname, item.cluster_network) for item in found.attachments] == [
        ("n", "eth0", True),
        ("a", "net9", False),
        ("b", "net10", False),
    ]
    assert found.pod == "web/p"
    assert found.pod_uid == "u"
    assert found.sandbox == Sandbox(ContainerId("c0ffee"), "/run/netns/a")
    assert found.attachments[0].capability_args == {"mac": "02:00:00:00:00:01"}
    assert found.attachments[0].result.ips[0].address == "10.1.0.2/24"
    assert found.complete
    cache.remove("n", "c0ffee", "eth0")
    own_path(cni_dir).unlink()
    assert not store.recover("c0ffee").complete


@pytest.mark.parametrize("damage", [b"", b'{"format":1', b'{"format":2,"sha256":"","record":{}}\n'])
@pytest.mark.parametrize("entries", [[(1, 2)], [(1, 0)], [(1, 3), (2, 3)], [(1, 2), (2, 2), (3, 2)]])
@pytest.mark.parametrize("beside", ["", "[]", "y"])
def test_a_cache_that_may_lack_some_is_no_success(store, cni_dir, cache, damage, entries, beside):
    store.save(small())
    own_path(cni_dir).write_bytes(damage)
    if beside:
        (cni_dir / "c0ffee").write_text(beside)
    for number, networks in entries:
        cache.write(entry(f"n{number}", f"net{number}", networks=networks))
    problem = f"{own_path(cni_dir)} can't be read, and libcni's result cache may lack"
    with pytest.raises(CorruptRecordError, match=problem):
        store.recover("c0ffee")
    # Where no record of ours is, that is all that there is to know.
    own_path(cni_dir).unlink()
    assert len(store.recover("c0ffee").attachments) == len(entries)


def test_damage_everywhere(store, cni_dir, cache):
    store.save(small())
    own_path(cni_dir).write_bytes(b"x")
    (cni_dir / "c0ffee").write_bytes(b"y")
    cache.write(entry())
    (cni_dir / "results" / "n-c0ffee-eth0").write_bytes(b"z")
    with pytest.raises(CorruptRecordError, match=str(own_path(cni_dir))):
        store.load("c0ffee")
    with pytest.raises(CorruptRecordError, match=f"{cni_dir / 'c0ffee'}.*the result cache has nothing"):
        store.recover("c0ffee")


# --- what an upstream daemon left ------------------------------------------------------------------------------------


def left_by_upstream(cni_dir, name, *, without=""):
    for path, text in UPSTREAM[name]["files"].items():
        if not without or not path.startswith(without):
            target = cni_dir / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    return UPSTREAM[name]["env"]["CNI_CONTAINERID"]


def summary(record):
    return [(item.name, item.config.name, item.ifname, item.cluster_network) for item in record.attachments]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("0.3.1/no-annotation/ADD", [("cluster", "cluster", "eth0", True)]),
        (
            "0.3.1/two-networks/ADD",
            [
                ("cluster", "cluster", "eth0", True),
                ("web/ptp-a", "ptp-a", "net1", False),
                ("infra/other-ns", "other-ns", "extra0", False),
            ],
        ),
        (
            "0.3.1/conflist-network/ADD",
            [("cluster", "cluster", "eth0", True), ("web/bridge-b", "bridge-b", "net1", False)],
        ),
        ("0.3.1/json-ips-mac/ADD", [("cluster", "cluster", "eth0", True), ("web/caps", "caps", "data0", False)]),
        ("1.1.0/nad-without-name/ADD", [("cluster", "cluster", "eth0", True), ("web/noname", "noname", "net1", False)]),
        (
            "1.0.0/list-without-version/ADD",
            [
                ("pods", "pods", "eth0", True),
                ("web/unversioned", "unversioned", "net1", False),
                ("web/ptp", "ptp", "data0", False),
            ],
        ),
        (
            "1.0.0/port-mappings/ADD",
            [
                ("pods", "pods", "eth0", True),
                ("web/addressed", "addressed", "lan0", False),
                ("web/ports", "ports", "net2", False),
            ],
        ),
        ("conflist-primary/ADD", [("cluster", "cluster", "eth0", True), ("web/ptp-a", "ptp-a", "net1", False)]),
    ],
)
def test_take_over(store, cni_dir, name, expected):
    env = UPSTREAM[name]["env"]
    container_id = left_by_upstream(cni_dir, name)
    record = store.recover(container_id)
    assert summary(record) == expected
    assert record.complete
    assert record.foreign
    assert record.ifname == "eth0"
    assert record.sandbox == Sandbox(container_id, env["CNI_NETNS"])
    assert f"K8S_POD_NAME={record.pod_name};" in env["CNI_ARGS"]
    assert record.pod_namespace == "web"
    assert record.pod_uid == "11111111-2222-3333-4444-555555555555"
    for item in record.attachments:
        assert item.result.ips
        assert dict(item.cni_args)["K8S_POD_NAME"] == record.pod_name
    assert store.containers() == [container_id]
    # It is ours after the first save, and gone with the last of both.
    store.save(record)
    assert store.load(container_id) == record
    assert not store.load(container_id).foreign
    assert store.containers() == [container_id]
    store.remove(container_id)
    assert store.containers() == []
    assert not (cni_dir / container_id).exists()


def test_take_over_of_a_failed_add(store, cni_dir):
    """The same network twice: both elements are there, no result is."""
    record = store.recover(left_by_upstream(cni_dir, "0.3.1/same-network-twice/ADD"))
    # It has no built-ins, so CHECK and DEL are for the binaries.
    assert {location for item in record.attachments for location in item.served_by.values()} == {"binary"}
    assert [item[2] for item in summary(record)] == ["eth0", "net1", "net2"]
    assert all(item.result is None for item in record.attachments)
    assert not record.complete


def test_take_over_from_the_result_cache_alone(store, cni_dir):
    name = "0.3.1/json-ips-mac/ADD"
    whole = store.recover(left_by_upstream(cni_dir, name))
    (cni_dir / "c0ffee05").unlink()
    alone = store.recover("c0ffee05")
    assert [item.config for item in alone.attachments] == [item.config for item in whole.attachments]
    assert [item.result for item in alone.attachments] == [item.result for item in whole.attachments]
    assert alone.attachments[1].capability_args == {"ips": ["10.210.0.7/24"], "mac": "02:00:00:00:00:07"}
    assert alone.attachments[1].cni_args[-2:] == (("MAC", "02:00:00:00:00:07"), ("IP", "10.210.0.7/24"))


def test_load_takes_over_what_is_in_upstreams_file_and_searches_nothing(store, cni_dir, monkeypatch):
    """The result cache may have hundreds of thousands of files, and an ADD of a new container would list them all."""

    def list_nothing(*_):
        raise AssertionError("the result cache is listed")

    container_id = left_by_upstream(cni_dir, "0.3.1/two-networks/ADD")
    whole = store.recover(container_id)
    monkeypatch.setattr(ResultCache, "entries", list_nothing)
    record = store.load(container_id)
    assert summary(record) == summary(whole)
    assert record.foreign
    assert not record.complete
    (cni_dir / container_id).unlink()
    assert store.load(container_id) is None
    assert store.load("never-seen") is None


def test_take_over_from_the_delegate_cache_alone(store, cni_dir):
    name = "0.3.1/json-ips-mac/ADD"
    container_id = left_by_upstream(cni_dir, name, without="results")
    record = store.recover(container_id)
    assert summary(record)[1] == ("web/caps", "caps", "data0", False)
    assert record.attachments[1].capability_args == {"ips": ["10.210.0.7/24"], "mac": "02:00:00:00:00:07"}
    assert record.pod == "/"


def test_what_a_failed_delete_of_upstream_left(store, cni_dir):
    """Its own file is gone, the result of the cluster network still there: the address can yet be freed."""
    container_id = left_by_upstream(cni_dir, "conflist-primary/DEL")
    assert summary(store.recover(container_id)) == [("cluster", "cluster", "eth0", True)]


@pytest.mark.weak_spot(1)
@pytest.mark.conformance("verbs-31")
@pytest.mark.parametrize("without", ["", "results"])
def test_delete_of_an_upstream_conflist_gets_every_key(store, cni_dir, cache, without):
    """Upstream's own DEL had lost the IPAM ranges here, and the address."""
    record = store.recover(left_by_upstream(cni_dir, "conflist-primary/ADD", without=without))
    runner = FakePluginRunner()
    delete(runner, cache, record, record.attachments[0])
    assert [call.plugin_type for call in runner.calls] == ["bandwidth", "portmap", "ptp"]
    ptp = runner.calls[2].config
    assert ptp["mtu"] == 1450
    assert ptp["ipam"]["ranges"] == [[{"subnet": "10.244.0.0/24"}]]
    assert ptp["cniVersion"] == "1.0.0"
    assert ("prevResult" in ptp) is (without == "")


@pytest.mark.weak_spot(13)
def test_a_list_without_a_version_is_deleted_as_it_was_added(store, cni_dir, cache):
    """libcni takes it for 0.1.0, which has no prevResult."""
    record = store.recover(left_by_upstream(cni_dir, "1.0.0/list-without-version/ADD"))
    runner = FakePluginRunner()
    delete(runner, cache, record, record.attachments[1])
    assert [(call.plugin_type, call.config["cniVersion"]) for call in runner.calls] == [
        ("tuning", "0.1.0"),
        ("bridge", "0.1.0"),
    ]
    assert runner.calls[1].config["ipam"]["ranges"] == [[{"subnet": "10.92.0.0/24"}]]
    assert "prevResult" not in runner.calls[1].config


@pytest.mark.weak_spot(18)
@pytest.mark.parametrize(("without", "expected"), [("", [(18081, 81)]), ("c0ffee72", [(18081, 81)]), ("results", [])])
def test_delete_gets_the_port_mappings_of_the_annotation(store, cni_dir, cache, without, expected):
    """They are in the result cache only: upstream's own DEL is without them, and leaves portmap's rules."""
    record = store.recover(left_by_upstream(cni_dir, "1.0.0/port-mappings/ADD", without=without))
    runner = FakePluginRunner()
    delete(runner, cache, record, record.attachments[2])
    assert [call.plugin_type for call in runner.calls] == ["portmap", "ptp"]
    mappings = runner.calls[0].config.get("runtimeConfig", {}).get("portMappings", [])
    assert [(item["hostPort"], item["containerPort"]) for item in mappings] == expected


def test_a_list_that_is_damaged_is_no_reason_to_undo_a_living_pod(store, cni_dir):
    """Every result is there: a repeated ADD is answered with what there is, and CHECK looks at it."""
    container_id = left_by_upstream(cni_dir, "1.0.0/port-mappings/ADD")
    (cni_dir / container_id).write_text("[{")
    record = store.recover(container_id)
    assert record.complete
    assert [item[2] for item in summary(record)] == ["eth0", "lan0", "net2"]
    (cni_dir / "results" / f"pods-{container_id}-eth0").unlink()
    assert not store.recover(container_id).complete


def test_a_list_completed_from_a_folder(store, cni_dir):
    """Upstream keeps the plugins that came from a folder in `Plugins` only."""
    container_id = left_by_upstream(cni_dir, "conflist-primary/ADD", without="results")
    path = cni_dir / container_id
    elements = json.loads(path.read_text())
    extra = {"type": "tuning", "sysctl": {"net.core.somaxconn": "500"}}
    elements[0]["CNINetworkConfigList"]["Plugins"].append(
        {"Network": {"type": "tuning"}, "Bytes": base64.b64encode(json.dumps(extra).encode()).decode()}
    )
    path.write_text(json.dumps(elements))
    config = store.recover(container_id).attachments[0].config
    assert [plugin.type for plugin in config.plugins] == ["ptp", "portmap", "bandwidth", "tuning"]
    assert config.plugins[3].fields == extra
    elements[0]["CNINetworkConfigList"]["Bytes"] = None
    path.write_text(json.dumps(elements))
    config = store.recover(container_id).attachments[0].config
    assert [plugin.type for plugin in config.plugins] == ["ptp", "portmap", "bandwidth", "tuning"]
    assert (config.name, config.cni_version) == ("cluster", "1.0.0")


def test_a_network_that_was_plugged_in_later_is_deleted_too(store, cni_dir, cache):
    container_id = left_by_upstream(cni_dir, "0.3.1/no-annotation/ADD")
    cache.write(entry("plugged", "net1", container_id))
    assert summary(store.recover(container_id))[1] == ("plugged", "plugged", "net1", False)


@pytest.mark.weak_spot(23)
@pytest.mark.parametrize("text", ["[]", "null"])
def test_upstreams_empty_lists(store, cni_dir, text):
    """Upstream itself crashes on these."""
    cni_dir.mkdir()
    (cni_dir / "c0ffee").write_text(text)
    assert store.recover("c0ffee").attachments == ()


@pytest.mark.weak_spot(28)
def test_upstreams_damaged_file_is_no_success(store, cni_dir):
    cni_dir.mkdir()
    (cni_dir / "c0ffee").write_text("")
    with pytest.raises(CorruptRecordError, match=str(cni_dir / "c0ffee")):
        store.recover("c0ffee")
    with pytest.raises(CorruptRecordError, match=str(cni_dir / "c0ffee")):
        store.load("c0ffee")
    store.remove("c0ffee")
    assert store.recover("c0ffee") is None
    assert store.load("c0ffee") is None


def test_one_damaged_element_does_not_hide_the_others(store, cni_dir, caplog):
    container_id = left_by_upstream(cni_dir, "0.3.1/two-networks/ADD", without="results")
    elements = json.loads((cni_dir / container_id).read_text())
    elements[1]["Bytes"] = "%%%"
    (cni_dir / container_id).write_text(json.dumps(elements))
    assert [item[0] for item in summary(store.recover(container_id))] == ["cluster", "infra/other-ns"]
    assert "element 1 can't be used" in caplog.text


def test_a_damaged_element_is_taken_from_the_result_cache(store, cni_dir):
    container_id = left_by_upstream(cni_dir, "0.3.1/two-networks/ADD")
    elements = json.loads((cni_dir / container_id).read_text())
    elements[1]["Bytes"] = None
    (cni_dir / container_id).write_text(json.dumps(elements))
    assert [item[0] for item in summary(store.recover(container_id))] == ["cluster", "web/ptp-a", "infra/other-ns"]


def test_upstreams_files_damaged_at_every_byte_never_crash(store, cni_dir):
    """A record, or CorruptRecordError: nothing else."""
    container_id = left_by_upstream(cni_dir, "0.3.1/json-ips-mac/ADD")
    corrupt = 0
    for path in (cni_dir / container_id, cni_dir / "results" / f"caps-{container_id}-data0"):
        data = path.read_bytes()
        for position in range(0, len(data), 3):
            for damaged in (data[:position], data[:position] + bytes([data[position] ^ 0x11]) + data[position + 1 :]):
                path.write_bytes(damaged)
                try:
                    assert store.recover(container_id) is not None
                except CorruptRecordError:
                    corrupt += 1
        path.write_bytes(data)
    # The other source helped each time.
    assert corrupt == 0


def test_read_limit(store, cni_dir, monkeypatch):
    store.save(small())
    monkeypatch.setattr(fs.read_limited, "__kwdefaults__", {"limit": 10, "follow": True})
    with pytest.raises(CorruptRecordError):
        store.load("c0ffee")


# --- directories and sizes -------------------------------------------------------------------------------------------


def test_modes_are_put_right_at_start(store, cni_dir, caplog):
    for name, mode in ((".", 0o777), ("attachments", 0o755), ("results", 0o750)):
        (cni_dir / name).mkdir(parents=True, exist_ok=True)
        (cni_dir / name).chmod(mode)
    store.sweep()
    modes = {name: (cni_dir / name).stat().st_mode & 0o777 for name in (".", "attachments", "results")}
    assert modes == {".": 0o755, "attachments": 0o700, "results": 0o700}
    assert len(caplog.records) == 3
    caplog.clear()
    store.sweep()
    assert caplog.records == []


def test_what_a_daemon_left_that_ended_later_goes_while_serving(store, cni_dir):
    """The temporary files are of the daemon that this one has replaced."""
    store.sweep()
    store.save(small())
    dead, lives = 2**22 + 1, os.getpid()
    places = {cni_dir: ".c0ffee", cni_dir / "attachments": ".c0ffee.json", cni_dir / "results": ".n-c0ffee-eth0"}
    for directory, name in places.items():
        directory.mkdir(exist_ok=True)
        for pid in (dead, lives):
            (directory / f"{name}.{pid}-0123456789ab").touch()
    # Whole, and of an ADD that failed on the disk before anything was attached.
    record = (cni_dir / "attachments" / "c0ffee.json").read_bytes().replace(b"c0ffee", b"c0ffef")
    (cni_dir / "attachments" / f".c0ffef.json.{dead}-{fs.boot()}-0123456789ab").write_bytes(record)
    store.tidy()
    left = sorted(path.name for directory in places for path in directory.iterdir() if path.is_file())
    assert left == sorted([*(f"{name}.{lives}-0123456789ab" for name in places.values()), "c0ffee.json"])


@pytest.mark.parametrize("name", ["attachments", "results"])
def test_a_directory_that_is_a_link_is_refused(store, cni_dir, tmp_path, name):
    (tmp_path / "elsewhere").mkdir()
    cni_dir.mkdir()
    (cni_dir / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError, match="no link"):
        store.sweep()


def test_a_result_is_not_written_through_a_linked_directory(cache, cni_dir, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    cni_dir.mkdir()
    (cni_dir / "results").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError, match="no link"):
        cache.write(Entry("c0ffee", b"{}", "eth0", "n"))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_what_could_not_be_read_again_is_not_written(store, cache, cni_dir, monkeypatch):
    """Many selections of one large network: their DEL would find a record that is too large to be read."""
    monkeypatch.setattr(fs, "DEFAULT_READ_LIMIT", 300)
    with pytest.raises(fs.FileTooLargeError):
        store.save(small())
    with pytest.raises(fs.FileTooLargeError):
        cache.write(Entry("c0ffee", b"x" * 300, "eth0", "n"))
    assert [path for path in cni_dir.rglob("*") if path.is_file()] == []


def test_an_upstream_file_with_more_networks_than_a_pod_can_have(store, cni_dir):
    cni_dir.mkdir()
    (cni_dir / "c0ffee").write_bytes(b"[" + b"{}," * 1024 + b"{}]")
    with pytest.raises(CorruptRecordError, match="1025 elements"):
        store.load("c0ffee")


def test_what_is_set_aside_or_forgotten_is_no_leftover(store, cache, cni_dir):
    record = small()
    store.save(record)
    cache.write(Entry("c0ffee", record.attachments[0].config.raw, "eth0", "n", result={"cniVersion": "1.0.0"}))
    store.set_aside(record, since=1.0, why="x")
    # GC must not take the cached result for another daemon's.
    assert store.recover(ContainerId("c0ffee")) is None
    assert store.leftovers(set(), 10) == {}
    assert [oct(path.stat().st_mode)[-3:] for path in (cni_dir / "aside", cni_dir / "aside" / "c0ffee.json")] == [
        "700",
        "600",
    ]
    assert FileStore(cni_dir, cache).aside()[0].record == record
    assert store.forget(ContainerId("c0ffee"))
    assert cache.entries("c0ffee") == []
    assert store.leftovers(set(), 10) == {}


@pytest.mark.parametrize("place", ["aside", "attachments"])
def test_what_cannot_be_read_is_kept_beside_what_is_set_aside(store, cni_dir, place):
    """A newer daemon's record, or a damaged one, may name more networks than is known otherwise."""
    newer = b'{"format":99,"sha256":"","record":{}}\n'
    store.save(small())
    store.set_aside(small(), since=1.0, why="x")
    (cni_dir / place / "c0ffee.json").write_bytes(newer)
    store.set_aside(small(), since=2.0, why="y")
    assert store.aside()[0].record == small()
    kept = [path for path in (cni_dir / "aside").iterdir() if path.name != "c0ffee.json"]
    assert [path.read_bytes() for path in kept] == [newer]
    assert store.forget("c0ffee")
    assert list((cni_dir / "aside").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"x", b'{"since":1.0,"why":"x"}\n', b'{"since":"then","why":"x"}\n{}'])
def test_what_is_set_aside_and_can_not_be_read_is_listed_nevertheless(store, cni_dir, content):
    store.set_aside(small(), since=1.0, why="x")
    (cni_dir / "aside" / "c0ffee.json").write_bytes(content)
    (item,) = store.aside()
    assert item.container_id == "c0ffee"
    assert item.record is None
    assert "can't be read" in item.why
    store.set_aside(small(), since=2.0, why="y")
    assert store.aside()[0].record == small()
    assert store.forget(ContainerId("c0ffee"))


# --- for an upstream daemon ------------------------------------------------------------------------------------------


def for_upstream(**more):
    """A record as an ADD begins with it: a list from a file, a network without a version, one with requests."""
    texts = {
        "eth0": '{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"ptp","x":{"y":[1]}},{"type":"portmap"}]}',
        "net1": '{"name":"lan","plugins":[{"type":"bridge","ipam":{"type":"host-local","ranges":[[{}]]}}]}',
        "lan0": '{"cniVersion":"0.4.0","name":"asked","type":"macvlan","capabilities":{"ips":true}}',
    }
    asked = {"ips": ["10.0.0.7/24"], "mac": "02:00:00:00:00:07", "portMappings": [{"hostPort": 80}]}
    attachments = [
        Attachment(
            f"web/{config.name}",
            config,
            IfName(ifname),
            cluster_network=ifname == "eth0",
            capability_args=asked if ifname == "lan0" else {},
        )
        for ifname, text in texts.items()
        for config in (conf.parse(text.encode()),)
    ]
    return replace(small(), attachments=tuple(attachments), **more)


@pytest.fixture
def both(cni_dir, cache):
    return FileStore(cni_dir, cache, upstream_too=True)


def test_upstreams_file_beside_ours(both, cni_dir):
    both.save(for_upstream())
    path = cni_dir / "c0ffee"
    assert path.stat().st_mode & 0o777 == 0o600
    first, second, third = json.loads(path.read_bytes())
    assert base64.b64decode(first["Bytes"]) == for_upstream().attachments[0].config.raw
    assert [plugin["type"] for plugin in first["ConfList"]["plugins"]] == ["ptp", "portmap"]
    assert first["ifnameRequest"] == "eth0"
    # Where it finds no version, upstream's DEL writes the bytes anew and loses what its structs do not know.
    assert second["ConfList"]["cniVersion"] == "0.1.0"
    assert base64.b64decode(second["Bytes"]) == for_upstream().attachments[1].config.raw
    assert third["Conf"] == {"cniVersion": "0.4.0", "name": "asked", "type": "macvlan"}
    assert third["ConfList"] == {}
    wanted = {"ifnameRequest": "lan0", "ipRequest": ["10.0.0.7/24"], "macRequest": "02:00:00:00:00:07"}
    assert {key: third[key] for key in third if key.endswith("Request")} == wanted
    both.save(for_upstream(complete=True), durable=False)
    assert json.loads(path.read_bytes()) == [first, second, third]
    both.save(replace(for_upstream(), attachments=for_upstream().attachments[:1]))
    assert json.loads(path.read_bytes()) == [first]
    both.remove("c0ffee")
    assert [name for name in cni_dir.rglob("*") if name.is_file()] == []


def test_upstreams_file_is_read_where_ours_is_lost(both, cni_dir):
    saved = for_upstream()
    both.save(saved)
    own_path(cni_dir).unlink()
    loaded = both.load("c0ffee")
    assert loaded.foreign
    keys = ("name", "config", "ifname", "cluster_network")
    assert [[getattr(item, key) for key in keys] for item in loaded.attachments] == [
        [getattr(item, key) for key in keys] for item in saved.attachments
    ]
    assert loaded.attachments[2].capability_args == {"ips": ["10.0.0.7/24"], "mac": "02:00:00:00:00:07"}


def test_the_cluster_network_is_first_in_upstreams_file(both, cni_dir):
    saved = for_upstream()
    both.save(replace(saved, attachments=saved.attachments[::-1]))
    assert [item["ifnameRequest"] for item in json.loads((cni_dir / "c0ffee").read_bytes())] == ["eth0", "lan0", "net1"]


def test_the_version_that_plugins_are_really_called_with(both, cni_dir):
    saved = for_upstream()
    forced = replace(saved.attachments[0], config=replace(saved.attachments[0].config, cni_version="0.3.1"))
    both.save(replace(saved, attachments=(forced,)))
    (element,) = json.loads((cni_dir / "c0ffee").read_bytes())
    assert element["ConfList"]["cniVersion"] == "0.3.1"
    wanted = json.loads(forced.config.raw) | {"cniVersion": "0.3.1"}
    assert json.loads(base64.b64decode(element["Bytes"])) == wanted


def test_without_a_cluster_network_there_is_no_file_for_upstream(both, cni_dir):
    saved = for_upstream()
    both.save(replace(saved, attachments=saved.attachments[1:]))
    assert not (cni_dir / "c0ffee").exists()


def test_upstreams_file_that_cannot_be_written_fails_nothing(both, cni_dir, caplog):
    (cni_dir / "c0ffee").mkdir(parents=True)
    both.save(for_upstream())
    assert both.load("c0ffee") == for_upstream()
    assert "an upstream daemon could not delete pod" in caplog.text
    both.remove("c0ffee")


def test_sweep_removes_an_emptied_file_of_before_the_boot(both, cni_dir, cache, monkeypatch):
    cni_dir.mkdir()
    kept = ("of-this-boot", "not-empty", ".hidden", "has-a-record", "has-a-result")
    for name in ("emptied", *kept):
        (cni_dir / name).write_bytes(b"[" if name == "not-empty" else b"")
        os.utime(cni_dir / name, None if name == "of-this-boot" else (1000, 1000))
    both.save(replace(small(), sandbox=replace(small().sandbox, container_id="has-a-record")))
    (cni_dir / "has-a-record").write_bytes(b"")
    os.utime(cni_dir / "has-a-record", (1000, 1000))
    cache.write(Entry("has-a-result", b'{"name":"n","type":"t"}', "eth0", "n"))
    both.sweep()
    assert sorted(path.name for path in cni_dir.iterdir() if path.is_file()) == sorted(kept)


def test_sweep_removes_what_a_writer_has_left_beside_upstreams_file(both, cni_dir):
    cni_dir.mkdir()
    (cni_dir / ".c0ffee.99999999-0123456789ab").write_bytes(b"[")
    both.sweep()
    assert list(cni_dir.iterdir()) == []


def test_what_writers_left_beside_the_directories_is_removed(store, cni_dir):
    cni_dir.mkdir()
    for name in (".state.99999999-000000000000", "state", ".hidden"):
        (cni_dir / name).write_text("")
    store.sweep()
    assert sorted(path.name for path in cni_dir.iterdir() if path.is_file()) == [".hidden", "state"]


@pytest.mark.parametrize(
    ("netns_id", "kept"), [("b00t-4-17", ("b00t-4-17", "")), ("b00t-4-17.2a", ("b00t-4-17", "2a")), ("", ("", ""))]
)
def test_the_cookie_of_a_namespace_is_apart_from_its_id(netns_id: str, kept: tuple[str, str]) -> None:
    """A daemon that knows no cookies compares the id as a whole: after a roll-back it still finds its namespaces."""
    data = record_format.encode(replace(small(), netns_id=netns_id))
    fields = json.loads(data)["record"]
    assert (fields["netnsId"], fields["netnsCookie"]) == kept
    assert record_format.decode(data).netns_id == netns_id


# --- the mark of a DEL ------------------------------------------------------------------------------------------------


def test_a_mark_is_one_short_line_that_is_not_synced(store, cni_dir, monkeypatch):
    store.save(for_upstream(complete=True))
    before = own_path(cni_dir).read_bytes()

    def refuse(_descriptor):
        raise AssertionError("a DEL waits for the disk")

    monkeypatch.setattr(os, "fsync", refuse)
    store.mark("c0ffee", [("net", "eth0")])
    assert own_path(cni_dir).read_bytes() == before + b'{"leaving":[["net","eth0"]]}\n'


@pytest.mark.parametrize("line", [b'{"leaving":', b'{"leaving":[["net"]]}', b'{"leaving":[["a","\xff"]]}', b""])
def test_a_mark_that_is_cut_off_marks_nothing(store, cni_dir, line):
    saved = for_upstream(complete=True)
    store.save(saved)
    with own_path(cni_dir).open("ab") as file:
        file.write(line + b"\n")
    loaded = store.load("c0ffee")
    assert loaded.complete
    assert not any(item.leaving for item in loaded.attachments)


def test_the_marks_of_earlier_versions(store):
    """They had another selection, or were detached."""
    first, second, *others = for_upstream().attachments
    marked = (replace(first, detached=True, leaving=False), replace(second, selection=LEAVING), *others)
    store.save(replace(for_upstream(), attachments=marked))
    found = store.load("c0ffee").attachments
    assert [item.leaving for item in found] == [True, True, *[False] * len(others)]


def test_upstreams_file_has_no_attachment_of_which_only_a_result_is_left(both, cni_dir):
    first, second, *others = for_upstream().attachments
    both.save(replace(for_upstream(), attachments=(first, replace(second, detached=True), *others)))
    assert [item["Name"] for item in json.loads((cni_dir / "c0ffee").read_bytes())] == [
        item.name for item in (first, *others)
    ]
