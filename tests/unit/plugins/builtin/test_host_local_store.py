"""The data directory: its bytes, its state after a crash, its lock."""

import os
import stat
from ipaddress import IPv4Address

import pytest

from multus_daemon.plugins.builtin import host_local_store as store
from multus_daemon.plugins.builtin.host_local import candidates
from multus_daemon.plugins.builtin.host_local_config import Range, RangeSet
from multus_daemon.spec.cni.errors import TryAgainLaterError

OWNER = store.Owner("c1", "eth0")


def locked(path, owner=OWNER, *, timeout=1.0):
    return store.locked(path, owner, patience=timeout)


def contents(path):
    return {entry.name: entry.read_bytes() for entry in path.iterdir()}


def test_files_and_modes(tmp_path):
    directory = tmp_path / "data" / "net"
    before = os.umask(0)
    try:
        with locked(directory) as leases:
            assert leases.reserve("10.0.0.2", 0)
            assert leases.reserve("fd00::2", 1)
    finally:
        os.umask(before)
    assert contents(directory) == {
        "10.0.0.2": b"c1\r\neth0",
        "fd00::2": b"c1\r\neth0",
        "last_reserved_ip.0": b"10.0.0.2",
        "last_reserved_ip.1": b"fd00::2",
        "lock": b"",
    }
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in directory.iterdir()}
    assert modes.pop("lock") == 0o750
    assert set(modes.values()) == {0o600}
    assert [stat.S_IMODE(path.stat().st_mode) for path in (directory, directory.parent)] == [0o755, 0o755]


def test_a_link_is_no_way_out_of_the_directory(tmp_path):
    (tmp_path / "victim").write_bytes(OWNER.content)
    directory = tmp_path / "net"
    directory.mkdir()
    (directory / "10.0.0.2").symlink_to(tmp_path / "victim")
    (directory / "10.0.0.3").symlink_to(tmp_path / "new")
    (directory / ".new").symlink_to(tmp_path / "victim")
    (directory / "last_reserved_ip.0").symlink_to(tmp_path / "victim")
    with locked(directory) as leases:
        assert {"10.0.0.2", "10.0.0.3"} <= leases.taken
        assert not leases.reserve("10.0.0.2", 0)
        assert not leases.reserve("10.0.0.3", 0)
        assert leases.reserve("10.0.0.4", 0)
        # The target of a link does not say whose the address is.
        assert leases.files() == ["10.0.0.4"]
    assert (tmp_path / "victim").read_bytes() == OWNER.content
    assert not (tmp_path / "new").exists()
    assert (directory / "last_reserved_ip.0").read_bytes() == b"10.0.0.4"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"10.0.0.2": b"c1\r\neth0"}, ["10.0.0.2"]),
        ({"10.0.0.2": b" c1\r\neth0\n"}, ["10.0.0.2"]),
        ({"10.0.0.2": b"c1\neth0"}, []),
        ({"10.0.0.2": b"c1\r\neth1"}, []),
        ({"10.0.0.2": b"c12\r\neth0"}, []),
        # The form of 2019, before version 0.8: no container of then runs.
        ({"10.0.0.2": b"c1"}, []),
        ({"10.0.0.2": b""}, []),
        ({"10.0.0.2": b"\xff\x00"}, []),
        ({"last_reserved_ip.0": b"c1\r\neth0", "lock": b"c1\r\neth0"}, []),
    ],
)
def test_files_of_an_owner(tmp_path, files, expected):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with locked(tmp_path) as leases:
        assert leases.files() == expected


def test_owned_are_addresses(tmp_path):
    for name in ("10.0.0.2", "fd00::2", "note", ".new"):
        (tmp_path / name).write_bytes(b"c1\r\neth0")
    with locked(tmp_path) as leases:
        assert leases.owned() == ["10.0.0.2", "fd00::2"]


def test_marks(tmp_path):
    (tmp_path / "last_reserved_ip.0").write_bytes(b"10.0.0.9")
    (tmp_path / "last_reserved_ip.1").write_bytes(b"\xff")
    with locked(tmp_path) as leases:
        assert [leases.last_reserved(index) for index in range(3)] == ["10.0.0.9", "", ""]
        # Shorter than the one before.
        assert leases.reserve("10.0.0.200", 0)
        assert leases.reserve("10.0.0.3", 0)
        assert leases.last_reserved(0) == "10.0.0.3"


@pytest.mark.parametrize("torn", [b"10.0.0.", b"10.0.0.999", b"10.0.0.3\0\0"])
def test_half_a_mark_is_none(tmp_path, torn):
    (tmp_path / "last_reserved_ip.0").write_bytes(torn)
    with locked(tmp_path) as leases:
        first, gateway = int(IPv4Address("10.0.0.2")), IPv4Address("10.0.0.1")
        range_set = RangeSet((Range(4, 24, first, first + 250, gateway),))
        assert next(candidates(range_set, leases.last_reserved(0), leases.taken))[0] == "10.0.0.2"


def test_an_address_is_not_kept_when_its_mark_fails(tmp_path, monkeypatch):
    with locked(tmp_path) as leases:
        monkeypatch.setattr(store.LeaseDirectory, "_mark", _raise)
        with pytest.raises(OSError, match="disk is full"):
            leases.reserve("10.0.0.2", 0)
        monkeypatch.undo()
        assert "10.0.0.2" not in leases.taken
        assert leases.reserve("10.0.0.2", 0)


def _raise(*args, **kwargs):
    raise OSError(28, "disk is full")


def test_no_descriptor_is_left(tmp_path):
    before = os.listdir("/proc/self/fd")
    with locked(tmp_path) as leases:
        leases.reserve("10.0.0.2", 0)
        with pytest.raises(TryAgainLaterError), locked(tmp_path, timeout=0):
            pass
    assert os.listdir("/proc/self/fd") == before
