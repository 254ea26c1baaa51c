"""A pod's namespace: when it is opened and closed, what other threads and paths get, where the thread is.

`tests/netns/test_netlink.py` has the same with namespaces that are others than the test's own.
"""

from __future__ import annotations

import errno
import os
import socket
import threading

import pytest

from multus_daemon.kernel import netns as namespaces
from multus_daemon.kernel import pod_netns
from multus_daemon.kernel.netns import NamespaceError
from multus_daemon.spec.cni.names import IfName
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
    monkeypatch.setattr(os.path, "sameopenfile", lambda descriptor, other: False)
    return found


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


# --- what is opened --------------------------------------------------------------------------------------------------


def test_a_namespace_without_work_opens_nothing_and_starts_no_thread() -> None:
    threads, files = set(threading.enumerate()), descriptors()
    with pod_netns.PodNetns("/nonexistent") as netns:
        assert netns.path == "/nonexistent"
        assert descriptors() == files
        assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize(
    ("path", "number", "words"),
    [
        ("", errno.ENOENT, "No such file or directory"),
        ("/nonexistent", errno.ENOENT, "No such file or directory"),
        ("/dev/null", errno.EINVAL, "not a network namespace"),
        ("/proc/self/ns/mnt", errno.EINVAL, "a namespace of another kind"),
        (OWN, errno.EINVAL, "the host's own network namespace, not a container's"),
        ("a\0b", errno.EINVAL, "null (byte|character)"),
    ],
)
def test_what_can_not_be_entered(path: str, number: int, words: str) -> None:
    before = descriptors()
    with pod_netns.PodNetns(path) as netns:
        for _ in range(2):
            with pytest.raises(NamespaceError, match=words) as caught, netns.inside():
                pytest.fail("in a namespace that there is not")
            assert (caught.value.errno, caught.value.filename) == (number, path)
        with pytest.raises(NamespaceError):
            _ = netns.pod
    assert descriptors() == before


# --- one for a request -----------------------------------------------------------------------------------------------


def test_what_is_opened_is_closed_after_a_socket_that_fails(moves: Moves, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is back on the host, too."""
    before = descriptors()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", refuse)
    with pod_netns.PodNetns(OWN) as netns:
        with pytest.raises(OSError, match="Too many open files"):
            _ = netns.pod
        assert len(descriptors()) == len(before) + 2
        assert moves.made == [netns.pod_netns, netns.host_netns]
    assert descriptors() == before


def test_the_daemons_own_namespace_is_refused_unless_it_may_be_the_pods() -> None:
    with pod_netns.PodNetns(OWN) as netns, pytest.raises(NamespaceError, match="the host's own") as caught:
        netns.require()
    assert (caught.value.errno, caught.value.filename) == (errno.EINVAL, OWN)
    with pod_netns.PodNetns(OWN, may_be_own=True) as netns:
        netns.require()
        assert netns.host_netns != netns.pod_netns


def test_another_path_of_the_request(moves: Moves) -> None:
    """It is opened anew, and may be the daemon's own if the request allows it; what was learned is of its path."""
    before = descriptors()
    for may_be_own in (False, True):
        with pod_netns.PodNetns(OWN, may_be_own=may_be_own, leaving=["net1"]) as netns:
            netns.removed["net1"] = ()
            netns.absent = frozenset({IfName("net2")})
            netns.forwarded.add(True)
            for path in ("/proc/self/ns/net", OWN):
                with netns.at(path, ["net3"]) as other:
                    assert (other.path, other.may_be_own, other.leaving) == (path, may_be_own, frozenset({"net3"}))
                    assert (other.removed, other.absent, other.forwarded) == ({}, frozenset(), set())
                    assert other.pod_netns != netns.pod_netns
                    assert len(descriptors()) == len(before) + 4
                # Each closes its own.
                assert len(descriptors()) == len(before) + 2
            assert netns.at(OWN).leaving == frozenset()
    assert descriptors() == before


def test_each_thread_has_its_own(moves: Moves) -> None:
    before = descriptors()

    def of_thread(netns: pod_netns.PodNetns, error: Exception | None = None) -> pod_netns.PodNetns:
        with netns.of_thread() as own:
            assert own.pod_netns not in (mine.pod_netns, mine.host_netns)
            assert (own.path, own.may_be_own) == (OWN, True)
            # There is one object per thread, however often it is asked for.
            with own.of_thread() as again:
                assert again is own
            assert len(descriptors()) == len(before) + 4
            if error:
                raise error
            return own

    with pod_netns.PodNetns(OWN, may_be_own=True) as mine:
        opened = mine.pod_netns
        other = Aside(of_thread, mine).result()
        assert other is not mine
        assert len(descriptors()) == len(before) + 2
        with pytest.raises(ValueError, match="no luck"):
            Aside(of_thread, mine, ValueError("no luck")).result()
        assert len(descriptors()) == len(before) + 2
        # In its own thread it is the same, and the end of the block closes nothing.
        with mine.of_thread() as same:
            assert same is mine
        assert mine.pod_netns == opened
        assert len(descriptors()) == len(before) + 2
    assert descriptors() == before


def test_where_a_thread_is_says_nothing_of_another(moves: Moves) -> None:
    def move(netns: pod_netns.PodNetns) -> None:
        with netns.of_thread() as own:
            host, pod = own.host_netns, own.pod_netns
            with own.inside():
                assert moves.made[1:] == [pod]
            assert moves.made[1:] == [pod, host]

    with pod_netns.PodNetns(OWN) as mine:
        with mine.inside():
            Aside(move, mine).result()
        assert (moves.made[0], moves.made[-1]) == (mine.pod_netns, mine.host_netns)


def test_a_namespace_is_opened_with_the_permission_that_is_given() -> None:
    links = pod_netns.NodeNamespaces()
    assert [links.open("/a", may_be_own=own).may_be_own for own in (False, True)] == [False, True]
    assert (links.open("/a").path, links.open("/a").may_be_own) == ("/a", False)


# --- where the thread is ---------------------------------------------------------------------------------------------


def test_there_and_back(moves: Moves) -> None:
    with pod_netns.PodNetns(OWN) as netns:
        host, pod = netns.host_netns, netns.pod_netns
        with netns.inside():
            assert moves.made == [pod]
            # A thread that is already there does not move.
            with netns.inside():
                assert moves.made == [pod]
            assert moves.made == [pod]
            with netns.on_host():
                assert moves.made == [pod, host]
                with netns.inside():
                    assert moves.made == [pod, host, pod]
                assert moves.made == [pod, host, pod, host]
            assert moves.made == [pod, host, pod, host, pod]
        assert moves.made == [pod, host, pod, host, pod, host]
        with netns.on_host():
            pass
        assert moves.made == [pod, host, pod, host, pod, host]


def test_a_namespace_that_does_not_let_in(moves: Moves) -> None:
    moves.fail_at = 1
    with pod_netns.PodNetns(OWN) as netns:
        with pytest.raises(NamespaceError, match="Operation not permitted") as caught, netns.inside():
            pytest.fail("it has let in")
        assert (caught.value.errno, caught.value.filename) == (errno.EPERM, OWN)
        assert moves.made == []
        # Nothing is remembered of it.
        moves.fail_at = 0
        with netns.inside():
            assert moves.made == [netns.pod_netns]


def test_a_way_back_that_fails_is_not_passed_over(moves: Moves) -> None:
    moves.fail_at = 2
    with (
        pod_netns.PodNetns(OWN) as netns,
        pytest.raises(NamespaceError, match="Operation not permitted"),
        netns.inside(),
    ):
        pass
