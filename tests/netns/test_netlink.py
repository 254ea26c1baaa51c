"""The netlink package against the kernel."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import os
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.kernel import everywhere, inet
from multus_daemon.kernel import netns as namespaces
from multus_daemon.kernel.netns import NamespaceError
from multus_daemon.kernel.pod_netns import NodeNamespaces, PodNetns
from multus_daemon.kernel.transport import Socket
from multus_daemon.runtime import deadline, portal
from multus_daemon.runtime.deadline import Deadline, Interrupted
from multus_daemon.spec.cni.names import IfName
from tests.aside import Aside
from tests.namespaces import require_every_process
from tests.netns.direct import in_pod, wait_for_threads
from tests.programs import needed
from tests.waiting import eventually, until


def test_is_netns(netns: Any, tmp_path: Path) -> None:
    links = NodeNamespaces()
    plain, fifo, link = tmp_path / "plain", tmp_path / "fifo", tmp_path / "link"
    plain.touch()
    os.mkfifo(fifo)
    link.symlink_to(netns.path)
    assert links.is_netns(netns.path)
    assert links.is_netns(str(link))
    assert links.is_netns("/proc/self/ns/net")
    for path in (
        "",
        "/nonexistent",
        "/",
        "/dev/null",
        "/proc/self/ns/mnt",
        "a\0b",
        str(plain),
        str(fifo),
        str(tmp_path),
    ):
        assert not links.is_netns(path)
        assert PodNetns(path).problem == "is no network namespace"
    assert PodNetns(netns.path).problem == ""


def test_inhabited(make_netns: Any, tmp_path: Path) -> None:
    require_every_process()
    lived_in, empty, gone = make_netns(), make_netns(), tmp_path / "gone"
    link = tmp_path / "link"
    link.symlink_to(lived_in.path)
    plain = tmp_path / "plain"
    plain.touch()
    impossible = ["", "a\0b", "a" * 256, "/proc/self/ns/mnt"]
    everything = [lived_in.path, empty.path, str(gone), str(link), str(plain), *impossible]
    links = NodeNamespaces()
    assert links.netns_in_use(everything) == set()
    process = subprocess.Popen([needed("nsenter"), f"--net={lived_in.path}", "sleep", "60"])
    try:
        by_process = f"/proc/{process.pid}/ns/net"
        until(lambda: os.stat(by_process).st_ino == os.stat(lived_in.path).st_ino, 10)
        assert links.netns_in_use([*everything, by_process]) == {lived_in.path, str(link), by_process}
        assert links.netns_in_use([]) == set()
    finally:
        process.kill()
        process.wait(timeout=10)
    assert links.netns_in_use([*everything, by_process]) == set()


def test_vanished(make_netns: Any, tmp_path: Path) -> None:
    there, gone = make_netns(), tmp_path / "gone"
    plain = tmp_path / "plain"
    plain.touch()
    dangling = tmp_path / "dangling"
    dangling.symlink_to(gone)
    # The last ones: of these nothing can be told.
    doubtful = ["", "a\0b", "/proc/999999999/ns/net", "/proc/gone", str(tmp_path / "no" / "directory")]
    paths = [there.path, str(gone), str(plain), str(dangling), *doubtful]
    assert NodeNamespaces().vanished(paths) == {str(gone)}


def test_the_daemons_own_namespace_is_inhabited() -> None:
    assert NodeNamespaces().netns_in_use(["/proc/self/ns/net"]) == {"/proc/self/ns/net"}


@pytest.mark.parametrize("doubt", ["processes unseen", "process locked up", "path locked up"])
def test_in_doubt_a_namespace_is_inhabited(netns: Any, monkeypatch: pytest.MonkeyPatch, doubt: str) -> None:
    require_every_process()
    real, refused = os.stat, f"/proc/{os.getppid()}/ns/net" if doubt == "process locked up" else "/none"

    def stat(path: Any, **options: Any) -> os.stat_result:
        if path == refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, **options)

    def locked(path: str, flags: int) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    assert namespaces.inhabited([netns.path]) == set()
    monkeypatch.setattr(os, "stat", stat)
    if doubt == "processes unseen":
        monkeypatch.setattr(namespaces, "sees_every_process", lambda: False)
    if doubt == "path locked up":
        monkeypatch.setattr(os, "open", locked)
    assert namespaces.inhabited([netns.path]) == {netns.path}


def test_existing_links(netns: Any) -> None:
    netns.run("ip", "link", "add", "veth1", "type", "veth", "peer", "name", "veth0")
    asked = [IfName(name) for name in ("veth1", "eth0", "lo", "veth0")]
    with PodNetns(netns.path) as pod:
        assert pod.existing(asked) == ["veth1", "lo", "veth0"]
        assert pod.absent == {"eth0"}
        assert pod.existing([]) == []
        assert pod.absent == frozenset()
    with PodNetns("/nonexistent") as pod, pytest.raises(NamespaceError) as caught:
        pod.existing(asked)
    assert caught.value.is_absent
    assert isinstance(caught.value, OSError)


def test_sysctls_and_sockets_are_of_their_side(host: Any, netns: Any) -> None:
    host.run("ip", "link", "add", "here0", "type", "veth", "peer", "name", "here1")

    def work(session: PodNetns) -> None:
        assert session.host.find_link("here0") is not None
        assert session.pod.find_link("here0") is None
        namespaces.write_sysctl("ipv4", "conf", "all", "forwarding", value="1")
        assert namespaces.read_sysctl("ipv4", "conf", "all", "forwarding") == "1"
        with session.on_host():
            assert namespaces.read_sysctl("ipv4", "conf", "all", "forwarding") == "0"
        assert namespaces.read_sysctl("ipv4", "conf", "all", "forwarding") == "1"

    in_pod(netns.path, work)
    assert host.sysctl("net/ipv4/conf/all/forwarding") == "0"
    assert netns.sysctl("net/ipv4/conf/all/forwarding") == "1"


def test_sysctl_refusals_name_the_file(netns: Any) -> None:
    def work(_session: PodNetns) -> None:
        with pytest.raises(OSError, match="/proc/sys/net/ipv4/conf/eth9/forwarding"):
            namespaces.read_sysctl("ipv4", "conf", "eth9", "forwarding")
        with pytest.raises(OSError, match="/proc/sys/net/ipv6/conf/lo/disable_ipv6"):
            namespaces.write_sysctl("ipv6", "conf", "lo", "disable_ipv6", value="x")

    in_pod(netns.path, work)


def test_many_addresses_are_read_whole(netns: Any) -> None:
    def work(session: PodNetns) -> int:
        lo = session.pod.link("lo")
        for number in range(1000):
            address = ipaddress.ip_interface(f"10.213.{number // 250}.{number % 250}/32")
            session.pod.request(inet.add_address(lo.index, address))
        session.pod.change(lo.index, up=True)
        return len(session.pod.addresses(lo.index, socket.AF_INET))

    assert in_pod(netns.path, work) == 1001


def test_a_dump_survives_changes_meanwhile(netns: Any) -> None:
    stop = threading.Event()

    def change(session: PodNetns) -> None:
        lo = session.pod.link("lo").index
        number = 0
        while not stop.is_set() and number < 3000:
            number += 1
            address = ipaddress.ip_interface(f"10.214.{number // 250 % 250}.{number % 250}/32")
            session.pod.request(inet.add_address(lo, address))

    def read(session: PodNetns) -> int:
        seen, end = 0, time.monotonic() + 1
        # A machine that was busy elsewhere has more time.
        while time.monotonic() < end or (seen <= 100 and time.monotonic() < end + 30):
            # Addresses are only added: a shorter list than before would be a part of one. EINTR after 5 attempts is
            # an answer too.
            with contextlib.suppress(InterruptedError):
                now = len(session.pod.addresses(1, socket.AF_INET))
                assert now >= seen
                seen = now
        return seen

    changer = Aside(in_pod, netns.path, change)
    assert in_pod(netns.path, read) > 100
    stop.set()
    changer.result()


def test_routes_are_read_as_they_were_added(netns: Any) -> None:
    def work(session: PodNetns) -> None:
        session.host.add_veth("veth1", "eth0", session.pod_netns, mtu=1400)
        link = session.pod.link("eth0")
        assert (link.mtu, link.kind, link.is_up) == (1400, "veth", False)
        session.pod.request(inet.add_address(link.index, ipaddress.ip_interface("10.213.7.2/24")))
        session.pod.change(link.index, up=True)
        wanted = [
            inet.Route(ipaddress.ip_interface("0.0.0.0/0"), link.index, ipaddress.ip_address("10.213.7.1")),
            inet.Route(ipaddress.ip_interface("10.99.0.0/16"), link.index, scope=inet.SCOPE_LINK, priority=7),
            inet.Route(ipaddress.ip_interface("10.98.0.0/16"), link.index, scope=inet.SCOPE_LINK, table=100),
            inet.Route(ipaddress.ip_interface("10.97.0.0/16"), link.index, scope=inet.SCOPE_LINK, table=1000),
        ]
        for route in wanted:
            session.pod.request(inet.add_route(route))
        main = session.pod.routes(socket.AF_INET)
        assert [route for route in wanted if route in main] == wanted[:2]
        assert session.pod.routes(socket.AF_INET, 100) == [wanted[2]]
        assert session.pod.routes(socket.AF_INET, 1000) == [wanted[3]]
        assert session.pod.routes(socket.AF_INET, 1001) == []
        for route in wanted:
            session.pod.request(inet.delete_route(route))
        assert session.pod.routes(socket.AF_INET, 100) == []

    in_pod(netns.path, work)
    netns.run("ip", "route", "add", "10.96.0.0/16", "nexthop", "via", "10.213.7.3", "nexthop", "via", "10.213.7.4")
    found = in_pod(netns.path, lambda session: session.pod.routes(socket.AF_INET))
    hops = [str(route.gateway) for route in found if str(route.dst) == "10.96.0.0/16"]
    assert hops == ["10.213.7.3", "10.213.7.4"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("eth0",), 17, "File exists"),
        (("eth0123456789abcdef",), 34, "Attribute failed policy validation"),
    ],
)
def test_the_kernels_words_are_passed_on(arguments: tuple[str], code: int, words: str, netns: Any) -> None:
    def work(session: PodNetns) -> None:
        session.pod.add_veth("eth0", "veth1", session.host_netns)
        session.pod.add_veth(*arguments, "veth2", session.host_netns)

    with pytest.raises(OSError, match=words) as caught:
        in_pod(netns.path, work)
    assert caught.value.errno == code


def test_an_error_in_the_work_ends_thread_and_sockets(netns: Any) -> None:
    before, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())

    def work(session: PodNetns) -> None:
        session.pod.link("lo")
        session.host.link("lo")
        raise StopIteration("odd")

    with pytest.raises(StopIteration, match="odd"):
        Aside(in_pod, netns.path, work).result()
    wait_for_threads(threads)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_cancellation_waits_for_the_thread(netns: Any, caplog: pytest.LogCaptureFixture) -> None:
    entered, ended = threading.Event(), list[str]()

    def work(_session: PodNetns) -> None:
        entered.set()
        try:
            deadline.pause(30)
        except Interrupted:
            time.sleep(0.05)
            ended.append("interrupted")
            raise

    task = asyncio.create_task(portal.run(Deadline(), functools.partial(in_pod, netns.path, work)))
    while not entered.is_set():
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["interrupted"]
    assert caplog.text == ""


async def test_a_thread_that_does_not_end_is_logged(
    netns: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(portal, "_STILL_RUNNING_SECONDS", 0.02)
    entered, released = threading.Event(), threading.Event()

    def hang(_session: PodNetns) -> None:
        entered.set()
        released.wait(60)

    task = asyncio.create_task(portal.run(Deadline(), functools.partial(in_pod, netns.path, hang), name="netns a"))
    await eventually(entered.is_set)
    task.cancel()
    await eventually(lambda: "netns a: was told to stop, but the kernel has not let go" in caplog.text)
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_namespace_of_another_kind_is_named() -> None:
    with pytest.raises(NamespaceError, match="another kind: '/proc/self/ns/uts'"):
        namespaces.open_path("/proc/self/ns/uts")


# --- one entry for several pieces of work ----------------------------------------------------------------------------


def test_a_namespace_is_entered_once(netns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = namespaces.open_path

    def noted(path: str) -> int:
        opened.append(path)
        return real(path)

    monkeypatch.setattr(namespaces, "open_path", noted)
    before = len(os.listdir("/proc/self/fd"))
    with PodNetns(netns.path) as pod:
        with pod.inside():
            first = pod.pod
        with pytest.raises(OSError, match="No such device"), pod.inside():
            pod.pod.link("eth0")
        with pod.inside():
            assert pod.pod is first
        for value in ("0", "1"):
            netns.run("sysctl", "-qw", f"net.ipv4.conf.all.forwarding={value}")
            with pod.inside():
                assert namespaces.read_sysctl("ipv4", "conf", "all", "forwarding") == value
    assert opened.count(netns.path) == 1
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("other", [False, True])
def test_a_namespace_that_goes_between_two_pieces_of_work(make_netns: Any, tmp_path: Path, other: bool) -> None:
    path, first, second = tmp_path / "netns", make_netns(), make_netns()
    path.symlink_to(first.path)
    with PodNetns(str(path)) as pod:
        with pod.inside():
            pass
        path.unlink()
        if other:
            path.symlink_to(second.path)
        with pytest.raises(NamespaceError) as caught, pod.inside():
            pytest.fail("in a namespace of the past")
    assert (caught.value.is_absent, caught.value.filename) == (not other, str(path))


def test_a_namespace_that_cant_be_entered_leaves_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for path in ("/nonexistent", "/proc/self/ns/net", "/dev/null"):
        with pytest.raises(NamespaceError):
            in_pod(path, lambda _session: None)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_batch_goes_on_behind_what_fails(netns: Any) -> None:
    def work(session: PodNetns) -> None:
        lo = session.pod.link("lo").index
        wanted = [ipaddress.ip_interface(text) for text in ("10.213.7.2/32", "10.213.7.2/32", "10.213.7.3/32")]
        errors = session.pod.batch([inet.add_address(lo, address) for address in wanted])
        assert {position: error.errno for position, error in errors.items()} == {1: errno.EEXIST}
        errors = session.pod.batch([inet.delete_address(lo, address) for address in wanted])
        assert {position: error.errno for position, error in errors.items()} == {1: errno.EADDRNOTAVAIL}
        assert session.pod.batch([inet.add_address(lo, address) for address in wanted[1:]]) == {}
        found = [str(item.address) for item in session.pod.addresses(lo, socket.AF_INET)]
        assert found[-2:] == ["10.213.7.2/32", "10.213.7.3/32"]

    in_pod(netns.path, work)


def test_a_large_batch_of_which_all_fail(netns: Any) -> None:
    def work(session: PodNetns) -> None:
        requests = [
            inet.delete_address(1, ipaddress.ip_interface(f"10.213.{n // 250}.{n % 250}/32")) for n in range(5000)
        ]
        assert len(session.pod.batch(requests)) == 5000
        assert session.pod.link("lo").index == 1

    in_pod(netns.path, work)


def test_a_new_pair_is_told_of_as_it_is(netns: Any) -> None:
    def work(session: PodNetns) -> None:
        told = session.host.add_veth("veth1", "eth0", session.pod_netns, mtu=1400, peer_mac="02:00:00:00:00:0a")
        host, pod = session.host.link("veth1"), session.pod.link("eth0")
        assert (host.is_up, pod.is_up, pod.mac) == (True, False, "02:00:00:00:00:0a")
        assert (told.index, told.name, told.mac, told.mtu, told.kind, told.is_up, told.peer) == (
            *(host.index, "veth1", host.mac, 1400, "veth", True),
            pod.index,
        )

    in_pod(netns.path, work)


def test_which_of_several_links_are_there(netns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [IfName(f"net{number}") for number in range(40)]
    sent: list[int] = []
    real = Socket._send

    def send(*given: Any) -> int:
        sent.append(len(given[1]))
        return real(*given)

    monkeypatch.setattr(Socket, "_send", send)
    assert in_pod(netns.path, lambda session: session.pod.existing(names)) == []
    netns.run("ip", "link", "add", "net7", "type", "veth", "peer", "name", "net39")
    assert in_pod(netns.path, lambda session: session.pod.existing(names)) == ["net7", "net39"]
    assert in_pod(netns.path, lambda session: session.pod.existing([])) == []
    # One datagram each, however many names.
    assert sent == [40, 40]


def test_a_name_that_the_kernel_refuses_is_not_taken_for_absent(netns: Any) -> None:
    with pytest.raises(OSError, match="Attribute failed policy validation"):
        in_pod(netns.path, lambda session: session.pod.existing([IfName("lo"), IfName("x" * 20)]))


def test_an_address_is_found_in_any_namespace_with_a_mount_or_a_process(netns: Any, make_netns: Any) -> None:
    require_every_process()
    other = make_netns()
    for text in ("10.77.0.9", "fd77::9"):
        address = ipaddress.ip_address(text)
        assert not everywhere.has_address(address)
        other.run("ip", "addr", "add", f"{text}/{24 if address.version == 4 else 64}", "dev", "lo")
        assert everywhere.has_address(address)
        assert not everywhere.has_address(address + 1)


def test_in_doubt_an_address_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "sees_every_process", lambda: False)
    assert everywhere.has_address(ipaddress.ip_address("10.77.0.9"))
