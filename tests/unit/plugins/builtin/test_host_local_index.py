"""The index of a directory between calls: it sees the changes of other programs, and its cost is flat in leases."""

import collections
import contextlib
import errno
import os

import pytest

from multus_daemon.plugins.builtin import host_local_store as store
from multus_daemon.plugins.builtin.host_local_store import Index

MINE = store.Owner("c1", "eth0")
SYSTEM_CALLS = ("open", "listdir", "scandir", "read", "write", "stat", "fstat", "link", "unlink", "close")


class Network:
    """A network's directory, and calls that share an index."""

    def __init__(self, path, index=None):
        self.path = path
        self.index = Index() if index is None else index
        self.files()

    def locked(self, owner=MINE):
        return store.locked(self.path, owner, patience=30, index=self.index)

    def files(self, owner=MINE):
        with self.locked(owner) as leases:
            return leases.files()

    def taken(self):
        with self.locked() as leases:
            return {name for name in leases.taken if name[0].isdigit()}

    def reserve(self, address, owner=MINE):
        with self.locked(owner) as leases:
            return leases.reserve(address, 0)

    def delete(self, owner=MINE):
        with self.locked(owner) as leases:
            for name in leases.files():
                leases.release(name)


@pytest.fixture
def network(tmp_path):
    return Network(tmp_path)


@pytest.fixture
def calls(monkeypatch):
    """Counts the system calls that matter."""
    seen: collections.Counter[str] = collections.Counter()
    for name in SYSTEM_CALLS:
        real = getattr(os, name)

        def counted(*args, _real=real, _name=name, **kwargs):
            seen[_name] += 1
            return _real(*args, **kwargs)

        monkeypatch.setattr(os, name, counted)
    return seen


def fill(path, leases):
    for number in range(leases):
        (path / f"10.1.{number >> 8}.{number & 255}").write_bytes(b"other%d\r\neth0" % number)


def calls_of_an_add_and_a_delete(network, calls):
    counts = []
    for verb in (lambda: network.reserve("10.2.0.2"), network.delete):
        calls.clear()
        verb()
        counts.append(dict(calls))
    return counts


def test_a_call_costs_the_same_with_any_number_of_leases(tmp_path, calls):
    counts = []
    for leases in (10, 5000):
        directory = tmp_path / str(leases)
        directory.mkdir()
        fill(directory, leases)
        network = Network(directory)
        calls_of_an_add_and_a_delete(network, calls)
        counts.append(calls_of_an_add_and_a_delete(network, calls))
    assert counts[0] == counts[1]
    for verb in counts[0]:
        assert "listdir" not in verb
        assert verb["open"] <= 8


def _removed(path):
    (path / "10.0.0.2").unlink()


def _added(path):
    (path / "10.0.0.9").write_bytes(b"c1\r\neth0")


def _replaced(path):
    (path / "x").write_bytes(b"c1\r\neth0")
    (path / "x").rename(path / "10.0.0.3")


def _moved_away(path):
    (path / "10.0.0.2").rename(path.parent / "10.0.0.2")


def _linked(path):
    os.link(path / "10.0.0.2", path / "10.0.0.8")


def _removed_and_added(path):
    (path / "10.0.0.2").unlink()
    (path / "10.0.0.2").write_bytes(b"c7\r\neth0")


@pytest.mark.parametrize(
    ("change", "mine", "taken"),
    [
        (_removed, [], {"10.0.0.3"}),
        (_added, ["10.0.0.2", "10.0.0.9"], {"10.0.0.2", "10.0.0.3", "10.0.0.9"}),
        (_replaced, ["10.0.0.2", "10.0.0.3"], {"10.0.0.2", "10.0.0.3"}),
        (_moved_away, [], {"10.0.0.3"}),
        (_linked, ["10.0.0.2", "10.0.0.8"], {"10.0.0.2", "10.0.0.3", "10.0.0.8"}),
        (_removed_and_added, [], {"10.0.0.2", "10.0.0.3"}),
    ],
)
def test_a_change_by_others_is_seen(tmp_path, change, mine, taken):
    """Also within one tick of the kernel's clock, which sets the directory's mtime."""
    path = tmp_path / "net"
    network = Network(path)
    for _ in range(20):
        network.delete()
        network.delete(store.Owner("c2", "eth0"))
        network.reserve("10.0.0.3", store.Owner("c2", "eth0"))
        network.reserve("10.0.0.2")
        change(path)
        assert network.taken() == taken
        assert network.files() == mine
        for entry in path.iterdir():
            entry.unlink()


def test_what_is_released_is_free_in_the_same_call(network):
    network.reserve("10.0.0.2")
    with network.locked() as leases:
        assert leases.files() == ["10.0.0.2"]
        leases.release("10.0.0.2")
        assert "10.0.0.2" not in leases.taken
        assert leases.files() == []
        assert leases.reserve("10.0.0.2", 0)


def test_another_directory_under_the_same_name(tmp_path):
    path, old = tmp_path / "net", tmp_path / "old"
    network = Network(path)
    network.reserve("10.0.0.2")
    path.rename(old)
    assert network.taken() == set()
    network.reserve("10.0.0.3")
    # And the one from before comes back, with a change.
    path.rename(tmp_path / "other")
    (old / "10.0.0.4").write_bytes(b"c1\r\neth0")
    old.rename(path)
    assert network.files() == ["10.0.0.2", "10.0.0.4"]


def test_a_directory_that_is_removed_and_made_again(tmp_path):
    """Its inode often has the number of the one before."""
    path = tmp_path / "net"
    network = Network(path)
    for _ in range(5):
        network.reserve("10.0.0.2")
        for entry in path.iterdir():
            entry.unlink()
        path.rmdir()
        path.mkdir()
        assert network.taken() == set()
        assert network.files() == []
        (path / "10.0.0.3").write_bytes(b"c1\r\neth0")
        assert network.files() == ["10.0.0.3"]


@pytest.mark.parametrize("is_refused", [True, False], ids=["read-only", "without nanoseconds"])
def test_without_a_stamp_everything_is_read_at_each_call(network, monkeypatch, calls, is_refused):
    real = os.utime

    def utime(directory, ns):
        if is_refused:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        real(directory, ns=tuple(value // 10**9 * 10**9 for value in ns))

    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", utime)
        for number in range(2, 5):
            assert network.reserve(f"10.0.0.{number}")
            calls.clear()
            assert network.taken() == {f"10.0.0.{other}" for other in range(2, number + 1)}
            assert calls["listdir"] >= 1
    network.delete()
    calls.clear()
    assert network.taken() == set()
    assert "listdir" not in calls


def test_directories_are_bounded(tmp_path, calls):
    index = Index(directories_max=2)
    networks = [Network(tmp_path / name, index) for name in ("a", "b", "c")]
    assert len(index) == 2
    calls.clear()
    networks[2].files()
    networks[1].files()
    assert "listdir" not in calls
    (networks[0].path / "10.0.0.2").write_bytes(b"c1\r\neth0")
    assert networks[0].files() == ["10.0.0.2"]
    # Forgotten was the one that had not been used for longest.
    calls.clear()
    networks[1].files()
    assert "listdir" not in calls
    networks[2].files()
    assert calls["listdir"] == 1
    assert len(index) == 2


def test_leases_are_bounded(tmp_path, calls):
    index = Index(names_max=100)
    networks = {}
    for name, leases in (("a", 40), ("b", 40), ("large", 120)):
        (tmp_path / name).mkdir()
        fill(tmp_path / name, leases)
        networks[name] = Network(tmp_path / name, index)
    # A directory that is too large is never kept, and displaces no other.
    assert len(index) == 2
    assert len(networks["large"].taken()) == 120
    calls.clear()
    assert networks["a"].reserve("10.0.0.2")
    assert networks["b"].reserve("10.0.0.2")
    assert "listdir" not in calls
    fill(networks["b"].path, 80)
    networks["b"].files()
    assert len(index) == 1


def test_a_lock_that_somebody_removes_lets_in_two_that_do_not_share_a_book(network):
    with network.locked() as first:
        assert first.taken
        (network.path / "lock").unlink()
        with network.locked(store.Owner("c2", "eth0")) as second:
            assert second.reserve("10.0.0.2", 0)
            assert "10.0.0.2" not in first.taken
            assert not first.reserve("10.0.0.2", 0)
            assert first.reserve("10.0.0.3", 0)
    assert network.files() == ["10.0.0.3"]
    assert network.taken() == {"10.0.0.2", "10.0.0.3"}


def test_a_call_that_fails_leaves_a_book_that_is_right(network, monkeypatch):
    (network.path / "10.0.0.2").write_bytes(b"c1\r\neth0")

    def raising(*args, **kwargs):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for step in ("open", "link", "write"):
        with monkeypatch.context() as patch, contextlib.suppress(OSError), network.locked() as leases:
            patch.setattr(os, step, raising)
            assert "10.0.0.2" in leases.taken
            leases.reserve("10.0.0.3", 0)
    assert network.taken() == {"10.0.0.2"}
    assert network.files() == ["10.0.0.2"]
