"""host-local's files after the death of the process that writes them."""

import os
import threading
import time

import pytest

from multus_daemon.builtin.host_local import store

OWNER = store.Owner("c1", "eth0")


def locked(path, owner=OWNER, *, timeout=1.0, given_up=None):
    return store.locked(path, owner, deadline=time.monotonic() + timeout, given_up=given_up or threading.Event())


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
