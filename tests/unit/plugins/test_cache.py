"""The result cache, byte for byte as upstream writes it, and read with tolerance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from multus_daemon.plugins import cache as cache_format
from multus_daemon.plugins.cache import Entry, ResultCache
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError

UPSTREAM = json.loads((Path(__file__).parents[1] / "pod" / "data" / "upstream.json").read_text())
RECORDED = [
    pytest.param(text, id=f"{name} {path}")
    for name, case in UPSTREAM.items()
    for path, text in case["files"].items()
    if path.startswith("results/")
]


def entry(network="n", container_id="c", ifname="net1", **fields):
    return Entry(container_id, b'{"name":"n","type":"x"}', ifname, network, **fields)


@pytest.fixture
def cache(tmp_path):
    return ResultCache(tmp_path)


@pytest.mark.parametrize("text", RECORDED)
def test_upstreams_files_come_out_as_they_went_in(text):
    encoded = cache_format.decode(text.encode()).encode().decode()
    if '"portMappings":' in text:
        # Upstream writes the ports of a pod's annotation from a struct, in its order; the runtime's keep our order.
        assert list(json.loads(encoded)) == list(json.loads(text))
        encoded, text = json.loads(encoded), json.loads(text)
    assert encoded == text


def test_modes(cache, tmp_path):
    cache.write(entry())
    assert (tmp_path / "results").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "results" / "n-c-net1").stat().st_mode & 0o777 == 0o600


def test_optional_keys_are_left_out():
    assert list(json.loads(entry().encode())) == ["kind", "containerId", "config", "ifName", "networkName"]


def test_round_trip(cache):
    whole = entry(
        netns="/n", cni_args=(("A", "b"),), capability_args={"z": 1, "a": {"<": "&"}}, result={"cniVersion": "1.0.0"}
    )
    cache.write(whole)
    assert cache.entries("c") == [whole]


def test_remove(cache):
    cache.write(entry())
    cache.remove("n", "c", "net1")
    cache.remove("n", "c", "net1")
    assert cache.entries("c") == []


@pytest.mark.parametrize(
    "names", [("", "c", "i"), ("n", "", "i"), ("n", "c", ""), ("../x", "c", "i"), ("n", "c/..", "i")]
)
def test_names_that_make_no_file_name(cache, names):
    network, container_id, ifname = names
    with pytest.raises(CniError):
        cache.write(entry(network, container_id, ifname))
    with pytest.raises(CniError):
        cache.remove(network, container_id, ifname)


def test_entries_of_one_container_only(cache):
    """`a-b` in network `n` and `b` in network `n-a` have the same file names."""
    cache.write(entry("n", "a-b", "net1"))
    cache.write(entry("n", "b", "net1"))
    cache.write(entry("x-b", "a", "net1"))
    assert [item.network for item in cache.entries("b")] == ["n"]
    assert [item.container_id for item in cache.entries("a-b")] == ["a-b"]


def test_unreadable_files_are_passed_over(cache, tmp_path, caplog):
    cache.write(entry("n2"))
    for name, text in (("n-c-net1", "{"), ("n-c-net2", '{"kind":"other"}'), ("n-c-net3", "")):
        (tmp_path / "results" / name).write_text(text)
    (tmp_path / "results" / "n-c-net4").mkdir()
    (tmp_path / "results" / "n-c-net5").symlink_to(tmp_path / "results" / "n2-c-net1")
    (tmp_path / "results" / ".n2-c-net6.tmp").write_bytes(entry("n2", ifname="net6").encode())
    assert [item.ifname for item in cache.entries("c")] == ["net1"]
    assert [record.message for record in caplog.records] == [f"5 cached results in {tmp_path}/results can't be read"]


def test_entries_that_mention_a_text(cache, tmp_path, monkeypatch):
    for container_id in ("a", "b"):
        cache.write(entry(container_id=container_id))
    (tmp_path / "results" / "n-x-net1").write_text('"kind":')
    (tmp_path / "results" / ".n-c-net1").write_bytes(entry().encode())
    assert [item.container_id for item in cache.mentioning('"kind":', other_than="a")] == ["b"]
    assert list(cache.mentioning("nothing", other_than="a")) == []
    assert list(ResultCache(tmp_path / "missing").mentioning('"kind":', other_than="a")) == []
    monkeypatch.setattr(cache_format, "_SEARCHED_MAX", 0)
    assert list(cache.mentioning('"kind":', other_than="a")) == []


class TestReadResult:
    def read(self, cache, tmp_path, text, version="0.4.0"):
        (tmp_path / "results").mkdir(exist_ok=True)
        (tmp_path / "results" / "n-c-net1").write_text(text)
        return cache.read_result("n", "c", "net1", version)

    def test_absent(self, cache):
        assert cache.read_result("n", "c", "net1", "1.0.0") is None

    def test_ours(self, cache):
        cache.write(entry(result={"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.1/8"}]}))
        assert cache.read_result("n", "c", "net1", "0.4.0").ips[0].address == "10.0.0.1/8"

    def test_without_a_result(self, cache):
        cache.write(entry())
        assert cache.read_result("n", "c", "net1", "1.0.0") is None

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "null", '{"kind":"cniCacheV2"}', '{"cniVersion":"9.0.0"}', '{"ips":1}']
    )
    def test_unreadable(self, cache, tmp_path, text, caplog):
        assert self.read(cache, tmp_path, text) is None
        assert "can't be read" in caplog.text


@pytest.mark.parametrize("key", ["containerId", "config", "ifName", "networkName"])
def test_incomplete(key):
    fields = json.loads(entry().encode())
    del fields[key]
    with pytest.raises(gojson.JsonError, match=key):
        cache_format.decode(json.dumps(fields).encode())


@pytest.mark.parametrize("value", ["%", 3, [["a"]], [["a", 1]], {"a": "b"}])
def test_wrong_types(value):
    for key in ("config", "cniArgs"):
        fields = json.loads(entry().encode()) | {key: value}
        with pytest.raises(gojson.JsonError):
            cache_format.decode(json.dumps(fields).encode())


def test_a_file_whose_base64_is_damaged_is_passed_over(tmp_path):
    """Not only by another letter: what is no ASCII raises another error of the library's."""
    cache = ResultCache(tmp_path)
    good = Entry("c0ffee", b"{}", "eth0", "n", result={"cniVersion": "1.0.0"})
    cache.write(good)
    cache.write(replace(good, network="m"))
    path = tmp_path / "results" / "m-c0ffee-eth0"
    path.write_bytes(path.read_bytes().replace(b"e30=", "e3é=".encode()))
    assert cache.entries("c0ffee") == [good]
    assert list(cache.of_containers(["c0ffee"], set(), 0)) == ["c0ffee"]
