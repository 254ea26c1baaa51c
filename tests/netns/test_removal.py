"""Links that are removed are gone when that returns, though the kernel is not done with them."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import threading
import time
from concurrent import futures
from typing import Any

import pytest

from multus_daemon.kernel import inet, links, removal
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.kernel.transport import Request, Socket
from multus_daemon.runtime import deadline, threads
from tests.aside import Aside
from tests.netns.direct import in_pod, wait_for_removals

AF_BRIDGE = 7
ADDRESS = ipaddress.ip_interface("10.214.1.1/24")


def make_pair(session: PodNetns, name: str = "eth0") -> int:
    """A pair whose other end, `host-<name>`, is up with an address, and so has routes."""
    session.pod.add_veth(name, f"host-{name}", session.host_netns)
    host = session.host.link(f"host-{name}").index
    session.host.change(host, up=True)
    session.host.request(inet.add_address(host, ADDRESS))
    index = session.pod.link(name).index
    session.pod.change(index, up=True)
    return index


def host_has(session: PodNetns) -> list[str]:
    """Links, addresses and routes on the host, but for those of `lo`."""
    found = [str(item.address) for item in session.host.addresses(0, socket.AF_INET)]
    found += [name for name in ("host-eth0", "host-net1") if session.host.find_link(name)]
    return [
        *found,
        *(str(route.dst) for route in session.host.routes(socket.AF_INET) if str(route.dst) == str(ADDRESS.network)),
    ]


def test_all_of_a_link_is_gone_on_return(netns: Any) -> None:
    def work(session: PodNetns) -> None:
        before = host_has(session)
        for _ in range(20):
            index = make_pair(session)
            assert len(host_has(session)) == len(before) + 3
            with session.inside():
                assert removal.remove(session.pod, [index]) == {}
            assert host_has(session) == before
            assert session.pod.find_link("eth0") is None

    in_pod(netns.path, work)
    wait_for_removals()


def test_nobody_waits_for_the_memory_of_a_link(netns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel never answers the request, as if it held the memory for ever."""
    hold: futures.Future[None] = futures.Future()

    def request(self: Socket, asked: Request) -> list[bytes]:
        done = ask(self, asked)
        if asked.kind == links.RTM_DELLINK:
            hold.result(30)
        return done

    ask = Socket.request
    monkeypatch.setattr(Socket, "request", request)

    def work(session: PodNetns) -> None:
        with session.inside():
            assert removal.remove(session.pod, [make_pair(session)]) == {}
        assert session.pod.find_link("eth0") is None
        assert session.host.find_link("host-eth0") is None

    try:
        in_pod(netns.path, work)
        assert any(thread.name == "links" for thread in threading.enumerate())
    finally:
        hold.set_result(None)
    wait_for_removals()


def test_several_go_together_and_one_that_is_refused_stays(netns: Any) -> None:
    def work(session: PodNetns) -> None:
        lo = session.pod.link("lo").index
        both = [make_pair(session, "eth0"), make_pair(session, "net1")]
        with session.inside():
            refused = removal.remove(session.pod, [*both, lo])
            assert {index: error.errno for index, error in refused.items()} == {lo: errno.EOPNOTSUPP}
            # Those that are absent by now are done.
            assert removal.remove(session.pod, both) == {}
            assert removal.remove(session.pod, both[:1]) == {}
            assert removal.remove(session.pod, []) == {}
            both = [make_pair(session, "eth0"), make_pair(session, "net1")]
            assert removal.remove(session.pod, both) == {}
        assert [session.pod.find_link(name) for name in ("eth0", "net1")] == [None, None]
        assert session.pod.link("lo").index == lo

    in_pod(netns.path, work)


def test_notices_that_were_lost_are_not_taken_for_those_of_the_links(
    netns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel drops notices where the socket has no room for them (ENOBUFS). Then only its answer counts."""

    notices_of = removal._notices

    def overrun() -> socket.socket:
        notices = notices_of()
        notices.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)
        change_mtu(10)
        return notices

    monkeypatch.setattr(removal, "_notices", overrun)

    def work(session: PodNetns) -> None:
        lo, eth0 = session.pod.link("lo").index, make_pair(session)
        with session.inside():
            lost = pytest.raises(OSError, match=os.strerror(errno.ENOBUFS))
            with overrun() as notices, lost:
                notices.recv(1)
            assert {index: error.errno for index, error in removal.remove(session.pod, [lo]).items()} == {
                lo: errno.EOPNOTSUPP
            }
            assert removal.remove(session.pod, [eth0]) == {}
        assert session.pod.find_link("eth0") is None

    in_pod(netns.path, work)


def change_mtu(times: int) -> None:
    """Cause this many notices about `lo` of the thread's namespace."""
    with contextlib.closing(links.Rtnl()) as kernel:
        for number in range(times):
            kernel.change(1, mtu=60000 + number % 2)


def test_a_refusal_is_heard_among_notices_about_other_links(netns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy node some link changes all the time, so the socket is never silent."""
    # A busy machine must not make a pause in which the refusal is heard by chance.
    monkeypatch.setattr(removal, "_LOOK_MICROSECONDS", 900_000)
    stopped = threading.Event()

    def change(session: PodNetns) -> None:
        end = time.monotonic() + 10
        while not stopped.is_set() and time.monotonic() < end:
            change_mtu(2)
            time.sleep(0.001)

    def work(session: PodNetns) -> None:
        lo = session.pod.link("lo").index
        with session.inside():
            try:
                assert {index: error.errno for index, error in removal.remove(session.pod, [lo]).items()} == {
                    lo: errno.EOPNOTSUPP
                }
            finally:
                stopped.set()

    others = Aside(in_pod, netns.path, change)
    began = time.monotonic()
    in_pod(netns.path, work)
    assert time.monotonic() - began < 9
    others.result()


def test_more_at_once_than_there_are_threads_for(netns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "_free", threading.BoundedSemaphore(1))
    assert removal._free.acquire()

    def work(session: PodNetns) -> None:
        index = make_pair(session)
        with session.inside():
            monkeypatch.setattr(threads, "start", None)
            assert removal.remove(session.pod, [index]) == {}
        assert session.pod.find_link("eth0") is None

    in_pod(netns.path, work)


def test_where_no_thread_is_to_be_had_nothing_is_left_open(netns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    free = threading.BoundedSemaphore(1)
    monkeypatch.setattr(removal, "_free", free)

    def work(session: PodNetns) -> None:
        index = make_pair(session)
        with session.inside(), monkeypatch.context() as patched:
            patched.setattr(threads, "start", start)
            before = len(os.listdir("/proc/self/fd"))
            with pytest.raises(RuntimeError, match="new thread"):
                removal.remove(session.pod, [index])
            assert len(os.listdir("/proc/self/fd")) == before

    in_pod(netns.path, work)
    assert free.acquire(blocking=False)


def test_the_wait_for_a_kernel_that_does_nothing_has_an_end(netns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hold: futures.Future[None] = futures.Future()
    monkeypatch.setattr(removal, "_one_by_one", lambda *_: hold.result(30) or {})

    def work(session: PodNetns) -> None:
        with session.inside(), pytest.raises(deadline.ExpiredError), deadline.within(0.1):
            removal.remove(session.pod, [make_pair(session)])

    try:
        in_pod(netns.path, work)
    finally:
        hold.set_result(None)
    wait_for_removals()


def test_a_port_that_leaves_its_bridge_is_still_there() -> None:
    fields = bytes.fromhex("0000") + (7).to_bytes(4, "little") + bytes(8)
    assert links.gone(b"\0\0" + fields) == 7
    assert links.gone(bytes([AF_BRIDGE]) + b"\0" + fields) == 0
