"""The index of a directory between calls: it sees the changes of other programs, and its cost is flat in leases."""

import collections
import contextlib
import errno
import os
import threading
from pathlib import Path

import pytest

from multus_daemon.plugins.builtin import host_local_index as index_module
from multus_daemon.plugins.builtin import host_local_store as store
from multus_daemon.plugins.builtin.host_local_index import Index
from multus_daemon.runtime import inotify

MINE = store.Owner("c1", "eth0")
SYSTEM_CALLS = ("open", "listdir", "scandir", "read", "write", "stat", "fstat", "link", "unlink", "close")


class Network:
    """A network's directory, and calls that share an index."""

    def __init__(self, path, index=None):
        self.path = path
        self.index = Index() if index is None else index
        # The first call of a process keeps nothing, the second begins to.
        for _ in range(2):
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


def test_changes_of_others_cost_only_what_they_changed(network, calls):
    fill(network.path, 100)
    network.files()
    (network.path / "10.1.0.5").unlink()
    (network.path / "10.1.0.6").write_bytes(b"c1\r\neth0")
    (network.path / "10.9.0.1").write_bytes(b"c1\r\neth0")
    calls.clear()
    assert network.files() == ["10.1.0.6", "10.9.0.1"]
    assert "listdir" not in calls
    # The directory, the lock, three changed names, two results looked up again.
    assert calls["open"] == 7


def _removed(path):
    (path / "10.0.0.2").unlink()


def _added(path):
    (path / "10.0.0.9").write_bytes(b"c1\r\neth0")


def _rewritten(path):
    (path / "10.0.0.3").write_bytes(b"c1\r\neth0")


def _overwritten(path):
    descriptor = os.open(path / "10.0.0.2", os.O_WRONLY)
    os.write(descriptor, b"c7")
    os.close(descriptor)


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


@pytest.mark.parametrize("same_mtime", [False, True])
@pytest.mark.parametrize(
    ("change", "mine", "taken"),
    [
        (_removed, [], {"10.0.0.3"}),
        (_added, ["10.0.0.2", "10.0.0.9"], {"10.0.0.2", "10.0.0.3", "10.0.0.9"}),
        (_rewritten, ["10.0.0.2", "10.0.0.3"], {"10.0.0.2", "10.0.0.3"}),
        (_overwritten, [], {"10.0.0.2", "10.0.0.3"}),
        (_replaced, ["10.0.0.2", "10.0.0.3"], {"10.0.0.2", "10.0.0.3"}),
        (_moved_away, [], {"10.0.0.3"}),
        (_linked, ["10.0.0.2", "10.0.0.8"], {"10.0.0.2", "10.0.0.3", "10.0.0.8"}),
        (_removed_and_added, [], {"10.0.0.2", "10.0.0.3"}),
    ],
)
def test_a_change_by_hand_is_seen(tmp_path, change, mine, taken, same_mtime):
    """Also where the directory's mtime is what it was, as it is within one tick of the kernel's clock."""
    path = tmp_path / "net"
    network = Network(path)
    network.reserve("10.0.0.2")
    network.reserve("10.0.0.3", store.Owner("c2", "eth0"))
    assert network.files() == ["10.0.0.2"]
    before = path.stat()
    change(path)
    if same_mtime:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert network.taken() == taken
    assert network.files() == mine


def test_a_change_during_a_call_is_seen_by_the_next(network):
    with network.locked() as leases:
        assert leases.files() == []
        (network.path / "10.0.0.9").write_bytes(b"c1\r\neth0")
        leases.reserve("10.0.0.2", 0)
        (network.path / "10.0.0.2").unlink()
    assert network.files() == ["10.0.0.9"]


def test_nothing_is_removed_from_memory_alone(network, monkeypatch):
    """Nor where a change is not reported at all, and the mtime is what it was."""
    network.reserve("10.0.0.2")
    network.files()
    before = network.path.stat()
    monkeypatch.setattr(inotify.Watcher, "changes", lambda self: iter(()))
    (network.path / "10.0.0.2").write_bytes(b"c7\r\neth0")
    os.utime(network.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    network.delete()
    assert (network.path / "10.0.0.2").read_bytes() == b"c7\r\neth0"


def test_an_address_is_nobodys_twice_though_a_change_is_not_reported(network, monkeypatch):
    monkeypatch.setattr(inotify.Watcher, "changes", lambda self: iter(()))
    before = network.path.stat()
    (network.path / "10.0.0.2").write_bytes(b"c7\r\neth0")
    os.utime(network.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with network.locked() as leases:
        assert "10.0.0.2" not in leases.taken
        assert not leases.reserve("10.0.0.2", 0)
        assert "10.0.0.2" in leases.taken
        assert leases.reserve("10.0.0.3", 0)


def test_a_file_system_that_reports_nothing_is_told_by_the_mtime(network, monkeypatch, calls):
    """NFS reports what this machine does, and nothing else."""
    network.reserve("10.0.0.7", store.Owner("c2", "eth0"))
    monkeypatch.setattr(inotify.Watcher, "changes", lambda self: iter(()))
    (network.path / "10.0.0.2").write_bytes(b"c1\r\neth0")
    assert network.files() == ["10.0.0.2"]
    (network.path / "10.0.0.2").unlink()
    assert network.files() == []
    calls.clear()
    assert network.files() == []
    assert "listdir" not in calls


def test_a_refusal_comes_from_the_directory(network, monkeypatch):
    network.reserve("10.0.0.2")
    network.files()
    monkeypatch.setattr(inotify.Watcher, "changes", lambda self: iter(()))
    before = network.path.stat()
    (network.path / "10.0.0.2").unlink()
    os.utime(network.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with network.locked() as leases:
        assert "10.0.0.2" in leases.taken
        assert leases.refresh()
        assert "10.0.0.2" not in leases.taken
        # A directory that was listed in this call is not listed again.
        assert not leases.refresh()


def test_a_lease_that_can_not_be_read_now_is_tried_again(network, monkeypatch):
    (network.path / "10.0.0.2").write_bytes(b"c1\r\neth0")
    real = os.open

    def refused(path, *args, **kwargs):
        if path == "10.0.0.2":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        assert network.files() == []
        assert network.taken() == {"10.0.0.2"}
    assert network.files() == ["10.0.0.2"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        assert network.files() == []
    assert network.files() == ["10.0.0.2"]


def test_what_is_released_is_free_in_the_same_call(network):
    network.reserve("10.0.0.2")
    with network.locked() as leases:
        assert leases.files() == ["10.0.0.2"]
        leases.release("10.0.0.2")
        assert "10.0.0.2" not in leases.taken
        assert leases.files() == []
        assert leases.reserve("10.0.0.2", 0)


def test_a_directory_that_is_touched_is_not_read_again(network, calls):
    calls.clear()
    os.utime(network.path)
    assert network.files() == []
    assert "listdir" not in calls


def test_a_program_with_one_call_makes_no_watch(tmp_path):
    index = Index()
    with store.locked(tmp_path, MINE, patience=0, index=index) as leases:
        assert leases.files() == []
    assert (len(index), index._watcher) == (0, None)


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
        before = path.stat()
        (path / "10.0.0.3").write_bytes(b"c1\r\neth0")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert network.files() == ["10.0.0.3"]
    assert len(network.index) == 1


def test_an_overflow_of_the_queue(network, calls):
    longest = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if longest > 65_536:
        pytest.skip(f"takes too long: fs.inotify.max_queued_events is {longest}")
    network.reserve("10.0.0.2")
    network.files()
    note = network.path / "note"
    for _ in range(longest // 2 + 1):
        note.touch()
        note.unlink()
    (network.path / "10.0.0.2").write_bytes(b"c7\r\neth0")
    (network.path / "10.0.0.5").write_bytes(b"c1\r\neth0")
    assert network.files() == ["10.0.0.5"]
    assert network.taken() == {"10.0.0.2", "10.0.0.5"}


def test_more_changes_than_are_kept(network, monkeypatch, calls):
    monkeypatch.setattr(index_module, "_CHANGES_MAX", 3)
    other = Network(network.path.parent / "other", network.index)
    for number in range(2, 7):
        (network.path / f"10.0.0.{number}").write_bytes(b"c1\r\neth0")
        # Collects what has changed anywhere.
        other.files()
    calls.clear()
    assert network.files() == [f"10.0.0.{number}" for number in range(2, 7)]
    assert calls["listdir"] == 1


@pytest.mark.parametrize("step", ["__init__", "watch", "changes"])
def test_without_inotify_everything_is_read_at_each_call(tmp_path, monkeypatch, caplog, calls, step):
    def refused(*args):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(inotify.Watcher, step, refused)
        network = Network(tmp_path)
        for number in range(2, 5):
            calls.clear()
            assert network.reserve(f"10.0.0.{number}")
            assert network.taken() == {f"10.0.0.{other}" for other in range(2, number + 1)}
            assert calls["listdir"] >= 1
        # Once, not for every call.
        assert [record.message for record in caplog.records] == [
            "host-local reads every lease of a network at each call: [Errno 24] Too many open files"
        ]
    network.delete()
    calls.clear()
    assert network.taken() == set()
    assert "listdir" not in calls


def _watches(index):
    descriptor = index._watcher._descriptor
    return Path(f"/proc/self/fdinfo/{descriptor}").read_text().count("inotify wd:")


def test_directories_are_bounded(tmp_path, calls):
    index = Index(directories_max=2)
    networks = [Network(tmp_path / name, index) for name in ("a", "b", "c")]
    assert (len(index), _watches(index)) == (2, 2)
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
    assert (len(index), _watches(index)) == (2, 2)


def test_leases_are_bounded(tmp_path, calls):
    index = Index(names_max=100)
    networks = {}
    for name, leases in (("a", 40), ("b", 40), ("large", 120)):
        (tmp_path / name).mkdir()
        fill(tmp_path / name, leases)
        networks[name] = Network(tmp_path / name, index)
    # A directory that is too large is never kept, and displaces no other.
    assert (len(index), _watches(index)) == (2, 2)
    assert len(networks["large"].taken()) == 120
    calls.clear()
    assert networks["a"].reserve("10.0.0.2")
    assert networks["b"].reserve("10.0.0.2")
    assert "listdir" not in calls
    fill(networks["b"].path, 80)
    networks["b"].files()
    assert (len(index), _watches(index)) == (1, 1)


def test_an_index_leaves_no_descriptor(tmp_path):
    before = os.listdir("/proc/self/fd")
    network = Network(tmp_path)
    network.reserve("10.0.0.2")
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    del network
    assert os.listdir("/proc/self/fd") == before


def _in_threads(work, number):
    errors = []

    def guarded(*args):
        try:
            work(*args)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(position,)) for position in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_many_threads(network):
    """Half of them share the index, the others have their own, as another daemon would."""
    others = Network(network.path)
    # Appending and removing are atomic.
    held: list[str] = []

    def work(position):
        for turn in range(40):
            owner = store.Owner(f"t{position}n{turn}", "eth0")
            mine = (network, others)[(position + turn) % 2]
            with mine.locked(owner) as leases:
                assert leases.owned() == []
                address = next(name for n in range(2, 255) if (name := f"10.0.0.{n}") not in leases.taken)
                assert leases.reserve(address, 0)
                assert held.count(address) == 0
                held.append(address)
            with (network, others)[turn % 2].locked(owner) as leases:
                assert leases.files() == [address]
                held.remove(address)
                leases.release(address)

    _in_threads(work, 6)
    assert network.taken() == others.taken() == set()


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
