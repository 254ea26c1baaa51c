"""host-local's files when several processes write them, and after the death of one."""

import os
import traceback

import pytest

from multus_daemon.plugins.builtin import host_local_store as store
from multus_daemon.plugins.builtin.host_local_store import Index

OWNER = store.Owner("c1", "eth0")


def locked(path, owner=OWNER, *, patience=1.0, index=None):
    return store.locked(path, owner, patience=patience, index=index)


def contents(path):
    return {entry.name: entry.read_bytes() for entry in path.iterdir()}


@pytest.mark.parametrize("step", ["open", "write", "link", "unlink", "fstat"])
def test_a_crash_at_any_step_leaves_no_address_without_an_owner(tmp_path, step):
    """A child dies at the step, without any clean-up; then the directory must still work."""
    for occurrence in (1, 2):
        directory = tmp_path / f"{step}{occurrence}"
        with locked(directory):
            pass
        child = os.fork()
        if not child:
            _die_at(step, occurrence)
            with locked(directory) as leases:
                leases.reserve("10.0.0.2", 0)
            os._exit(0)
        assert os.waitpid(child, 0)[1] >> 8 in (0, 9)
        files = contents(directory)
        if "10.0.0.2" in files:
            assert files["10.0.0.2"] == b"c1\r\neth0"
        with locked(directory, store.Owner("c2", "eth0")) as leases:
            assert leases.reserve("10.0.0.3", 0)
            assert leases.files() == ["10.0.0.3"]
        with locked(directory) as leases:
            for name in leases.files():
                leases.release(name)
        files = contents(directory)
        assert files == {"10.0.0.3": b"c2\r\neth0", "last_reserved_ip.0": b"10.0.0.3", "lock": b""}


def _die_at(step, occurrence):
    real = getattr(os, step)
    seen = 0

    def dying(*args, **kwargs):
        nonlocal seen
        # Of the opens only the one that creates the file to be linked counts.
        if step != "open" or args[0] == ".new":
            seen += 1
            if seen == occurrence:
                if step == "open":
                    real(*args, **kwargs)
                os._exit(9)
        return real(*args, **kwargs)

    setattr(os, step, dying)


def test_processes_that_remember_share_a_directory(tmp_path):
    """Each keeps an index of its own. No address is anybody's twice, none is lost, and all agree in the end."""
    children = []
    for number in range(3):
        child = os.fork()
        if not child:
            os._exit(_in_child(tmp_path, number))
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    files = contents(tmp_path)
    assert {content for name, content in files.items() if name[0].isdigit()} == {
        b"p0\r\neth0",
        b"p1\r\neth0",
        b"p2\r\neth0",
    }
    with locked(tmp_path) as leases:
        assert {name for name in leases.taken if name[0].isdigit()} == {name for name in files if name[0].isdigit()}


def _in_child(directory, number):
    """0 where all was well. The last address stays."""
    owner, index = store.Owner(f"p{number}", "eth0"), Index()
    first = 2
    try:
        for turn in range(200):
            with locked(directory, owner, patience=30, index=index) as leases:
                for name in leases.files():
                    leases.release(name)
                assert leases.owned() == []
                listed = set(os.listdir(directory))
                assert leases.taken - {"lock", "last_reserved_ip.0"} == listed - {"lock", "last_reserved_ip.0"}
                # Four addresses for three, in an order that changes.
                free = [name for n in range(first + turn % 2, first + 4) if (name := f"10.0.0.{n}") not in leases.taken]
                assert leases.reserve(free[0], 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
