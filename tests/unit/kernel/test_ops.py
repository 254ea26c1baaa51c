"""Sessions of a pod's namespace: when they open something, who shares them, where the thread is.

`tests/netns/test_netlink.py` has the same with namespaces that are others than the test's own.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from multus_daemon.kernel import netns as namespaces
from multus_daemon.kernel import ops
from multus_daemon.kernel.netns import NamespaceError
from tests.aside import Aside

OWN = "/proc/thread-self/ns/net"


class Moves:
    """In place of setns(2): which descriptor the thread was sent to; `fail_at`: the number of a call, from 1."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.fail_at = 0

    def enter(self, descriptor: int) -> None:
        if len(self.made) + 1 == self.fail_at:
            raise OSError(errno.EPERM, "setns: Operation not permitted")
        self.made.append(descriptor)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Moves:
    """The test's own namespace counts as another one, and nothing is entered."""
    found = Moves()
    monkeypatch.setattr(namespaces, "enter", found.enter)
    monkeypatch.setattr(namespaces, "is_same", lambda descriptor, other: False)
    return found


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


# --- what is opened --------------------------------------------------------------------------------------------------


def test_a_session_without_work_opens_nothing_and_starts_no_thread() -> None:
    threads, files = set(threading.enumerate()), descriptors()
    with ops.session("/nonexistent") as session:
        assert session.path == "/nonexistent"
        assert descriptors() == files
        assert set(threading.enumerate()) <= threads


def test_what_a_session_opens_is_closed_with_it(moves: Moves) -> None:
    before = descriptors()
    with ops.session(OWN) as session:
        assert session.host_netns != session.pod_netns
        # Both sockets: one that is asked in the pod, one on the host.
        assert session.pod is not session.host
        assert len(descriptors()) == len(before) + 4
    assert descriptors() == before


def test_what_a_session_opens_is_closed_after_an_error(moves: Moves) -> None:
    before = descriptors()

    def work() -> None:
        with ops.session(OWN) as session, session.inside():
            raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        work()
    assert descriptors() == before


@pytest.mark.parametrize(
    ("path", "number", "words"),
    [
        ("", errno.ENOENT, "No such file or directory"),
        ("/nonexistent", errno.ENOENT, "No such file or directory"),
        ("/dev/null", errno.EINVAL, "not a network namespace"),
        ("/proc/self/ns/mnt", errno.EINVAL, "one of another kind"),
        (OWN, errno.EINVAL, "the host's own network namespace, not a container's"),
        ("a\0b", errno.EINVAL, "null (byte|character)"),
    ],
)
def test_what_can_not_be_entered(path: str, number: int, words: str) -> None:
    before = descriptors()
    with ops.session(path) as session:
        for _ in range(2):
            with pytest.raises(NamespaceError, match=words) as caught, session.inside():
                pytest.fail("in a namespace that there is not")
            assert (caught.value.errno, caught.value.filename) == (number, path)
        with pytest.raises(NamespaceError):
            _ = session.pod
    assert descriptors() == before


# --- who shares one --------------------------------------------------------------------------------------------------


def test_a_thread_that_keeps_sessions_has_one_of_each_path() -> None:
    with ops.kept_open():
        with ops.session("/a") as first:
            pass
        with ops.session("/a") as again, ops.session("/b") as other:
            assert again is first
            assert other is not first
        # A block inside another one ends nothing.
        with ops.kept_open(), ops.session("/a") as inner:
            assert inner is first
        with ops.session("/a") as still:
            assert still is first
    with ops.session("/a") as later:
        assert later is not first


def test_a_session_within_one_is_the_same() -> None:
    """A plugin that calls another one: both have the pod's namespace open once."""
    with ops.session("/a") as outer, ops.session("/a") as inner:
        assert inner is outer


def test_sessions_that_are_kept_are_open_until_the_block_ends(moves: Moves) -> None:
    before = descriptors()
    with ops.kept_open():
        with ops.session(OWN) as session:
            opened = session.pod_netns
        assert len(descriptors()) == len(before) + 2
        with ops.session(OWN) as again:
            assert again.pod_netns == opened
    assert descriptors() == before


def test_kept_sessions_are_closed_after_an_error(moves: Moves) -> None:
    before = descriptors()

    def work() -> None:
        with ops.kept_open(), ops.session(OWN) as session:
            assert session.pod_netns
            raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        work()
    assert descriptors() == before
    # And the thread keeps nothing any more.
    with ops.session(OWN) as first:
        pass
    with ops.session(OWN) as second:
        assert second is not first


def test_each_thread_has_its_own() -> None:
    def session_of() -> ops.Session:
        with ops.session("/a") as session:
            return session

    with ops.kept_open(), ops.session("/a") as mine:
        assert Aside(session_of).result() is not mine


# --- where the thread is ---------------------------------------------------------------------------------------------


def test_there_and_back(moves: Moves) -> None:
    with ops.session(OWN) as session:
        host, pod = session.host_netns, session.pod_netns
        with session.inside():
            assert moves.made == [pod]
            # Who is there already goes nowhere.
            with session.inside():
                assert moves.made == [pod]
            assert moves.made == [pod]
            with session.on_host():
                assert moves.made == [pod, host]
                with session.inside():
                    assert moves.made == [pod, host, pod]
                assert moves.made == [pod, host, pod, host]
            assert moves.made == [pod, host, pod, host, pod]
        assert moves.made == [pod, host, pod, host, pod, host]
        with session.on_host():
            pass
        assert moves.made == [pod, host, pod, host, pod, host]


def test_sockets_are_made_where_they_belong(moves: Moves) -> None:
    with ops.session(OWN) as session:
        host, pod = session.host_netns, session.pod_netns
        assert session.pod
        assert moves.made == [pod, host]
        with session.inside():
            assert session.host
            assert moves.made == [pod, host, pod, host, pod]
        # Made once.
        made = len(moves.made)
        assert session.pod
        assert session.host
        assert len(moves.made) == made


def test_an_error_leads_back(moves: Moves) -> None:
    def work(session: ops.Session) -> None:
        with session.inside():
            raise ValueError("no luck")

    with ops.session(OWN) as session:
        with pytest.raises(ValueError, match="no luck"):
            work(session)
        assert moves.made == [session.pod_netns, session.host_netns]


def test_a_namespace_that_does_not_let_in(moves: Moves) -> None:
    moves.fail_at = 1
    with ops.session(OWN) as session:
        with pytest.raises(NamespaceError, match="Operation not permitted") as caught, session.inside():
            pytest.fail("it has let in")
        assert (caught.value.errno, caught.value.filename) == (errno.EPERM, OWN)
        assert moves.made == []
        # Nothing is remembered of it.
        moves.fail_at = 0
        with session.inside():
            assert moves.made == [session.pod_netns]


def test_a_way_back_that_fails_is_not_passed_over(moves: Moves) -> None:
    moves.fail_at = 2
    with ops.session(OWN) as session, pytest.raises(NamespaceError, match="Operation not permitted"), session.inside():
        pass


@pytest.mark.parametrize(("now", "number"), [("", errno.ENOENT), ("/proc/self/ns/mnt", errno.EINVAL)])
def test_a_path_that_leads_elsewhere_by_now(tmp_path: Path, moves: Moves, now: str, number: int) -> None:
    """The runtime has taken the namespace away, and may have put another one there: its number can be the same."""
    path = tmp_path / "ns"
    path.symlink_to("/proc/self/ns/net")
    with ops.session(str(path)) as session:
        with session.inside():
            pass
        path.unlink()
        if now:
            path.symlink_to(now)
        with pytest.raises(NamespaceError) as caught, session.inside():
            pytest.fail("in a namespace of the past")
        assert (caught.value.errno, caught.value.filename) == (number, str(path))
        # What is under way there goes on: the namespace lives while its descriptor is open.
        assert len(moves.made) == 2
