"""How much of a network's ranges is given: seen from calls of the plugin, without a look at the disk."""

import os

import pytest

from multus_daemon.plugins.builtin import host_local as plugin
from multus_daemon.plugins.builtin import host_local_config as config
from multus_daemon.plugins.builtin.host_local_store import Book, Index, Usage
from multus_daemon.plugins.builtin.registry import Builtin
from multus_daemon.runtime.threads import KeyedLock
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni.errors import InternalError
from tests.calls import run


@pytest.fixture
def usage(monkeypatch):
    """The plugin as in a daemon that starts."""
    monkeypatch.setattr(plugin, "_locks", KeyedLock())
    monkeypatch.setattr(plugin, "_index", Index())
    usage = Usage()
    monkeypatch.setattr(plugin, "usage", usage)
    return usage


@pytest.fixture
def call(tmp_path):
    host_local = Builtin("host-local", tmp_path)

    def work(verb, number=0, network="web/net", name="net", **ipam):
        ipam = {"type": "host-local", "dataDir": "/data", **ipam}
        config = {"cniVersion": "1.0.0", "name": name, "ipam": ipam}
        invocation = Invocation(verb, f"c{number}", "/run/netns/x", "eth0", "", "/bin", config, network=network)
        return run(host_local, invocation)

    return work


def test_addresses_are_counted_without_gateways(usage, call):
    ipam = {"ranges": [[{"subnet": "10.0.0.0/29"}]]}
    for number in range(3):
        call("ADD", number, **ipam)
    # Six addresses, of which one is the gateway's.
    assert usage.ratios() == {"web/net": 3 / 5}
    call("DEL", 0, **ipam)
    assert usage.ratios() == {"web/net": 2 / 5}


def test_the_fullest_set_counts(usage, call):
    small = [{"subnet": "10.0.0.0/28", "rangeStart": "10.0.0.4", "rangeEnd": "10.0.0.5"}]
    small.append({"subnet": "10.1.0.0/28", "rangeStart": "10.1.0.4", "rangeEnd": "10.1.0.5"})
    ipam = {"ranges": [[{"subnet": "fd00::/64"}], small]}
    for number in range(3):
        call("ADD", number, **ipam)
    assert usage.ratios() == {"web/net": 3 / 4}


def test_a_full_range_is_1(usage, call):
    ipam = {"ranges": [[{"subnet": "10.0.0.0/30"}]]}
    call("ADD", 0, **ipam)
    with pytest.raises(InternalError, match="no IP addresses available"):
        call("ADD", 1, **ipam)
    assert usage.ratios() == {"web/net": 1.0}


def test_a_scrape_looks_at_no_file_and_counts_once(usage, call, monkeypatch):
    ipam = {"ranges": [[{"subnet": "10.0.0.0/24"}]]}
    for number in range(2):
        call("ADD", number, **ipam)
    expected = {"web/net": 2 / 253}
    with monkeypatch.context() as patched:
        for name in ("open", "listdir", "scandir", "stat"):
            patched.setattr(os, name, lambda *_, name=name, **__: pytest.fail(name))
        assert usage.ratios() == expected
        # The index forgets the directory: what was counted stays.
        patched.setattr(plugin, "_index", Index())
        assert usage.ratios() == expected


def test_files_that_are_no_address_of_the_range_do_not_count(usage, call, tmp_path):
    ipam = {"ranges": [[{"subnet": "10.0.0.0/24"}]]}
    for number in range(2):
        call("ADD", number, **ipam)
    for name in ("10.9.9.9", "readme", "10.0.0.010"):
        (tmp_path / "data" / "net" / name).write_text("c9\r\neth0")
    call("CHECK", 0, **ipam)
    assert usage.ratios() == {"web/net": 2 / 253}


def sets(*lines):
    ranges = [[{"subnet": line}] for line in lines]
    fields = {"cniVersion": "1.0.0", "name": "net", "ipam": {"type": "host-local", "ranges": ranges}}
    return config.read(fields, name="net", cni_version="1.0.0").range_sets


def test_the_networks_are_bounded():
    usage = Usage(networks_max=3)
    books = [Book() for _ in range(5)]
    for number, book in enumerate(books):
        book["10.0.0.2"] = b"c1\r\neth0"
        usage.served(f"net-{number}", sets("10.0.0.0/24"), book)
    assert sorted(usage.ratios()) == ["net-2", "net-3", "net-4"]


def test_a_book_is_not_kept_for_the_metrics():
    usage, book = Usage(), Book()
    book["10.0.0.2"] = b"c1\r\neth0"
    usage.served("net", sets("10.0.0.0/24"), book)
    del book
    assert usage.ratios() == {}
