"""`kernel.watch`: the kernel's own messages, of real namespaces."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.kernel.watch import Changes, Watch
from tests.programs import needed


def ip(*arguments: str) -> None:
    subprocess.run([needed("ip"), *arguments], check=True, capture_output=True)


@pytest.fixture
def make() -> Iterator[Callable[[], str]]:
    made: list[str] = []

    def add() -> str:
        made.append(f"watch{uuid.uuid4().hex[:8]}")
        ip("netns", "add", made[-1])
        return made[-1]

    yield add
    for name in made:
        subprocess.run([needed("ip"), "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.close()


@pytest.fixture
def link() -> Iterator[str]:
    name = f"w{uuid.uuid4().hex[:8]}"
    ip("link", "add", name, "type", "bridge")
    yield name
    subprocess.run([needed("ip"), "link", "del", name], check=False, capture_output=True)


def identity(name: str) -> str:
    # With the cookie, as on record: Linux 6.12 gives the inode to the next one at once.
    with PodNetns(f"/run/netns/{name}") as netns:
        return netns.identity()


def follow(watch: Watch, name: str) -> int:
    found = watch.follow(f"/run/netns/{name}", identity(name))
    assert found is not None
    return found


def settled(watch: Watch) -> Changes:
    """Everything that the kernel reports until it is quiet."""
    found = Changes()
    while select.select([watch], [], [], 0.1)[0]:
        more = watch.changes()
        found.namespaces |= more.namespaces
        found.links |= more.links
        found.addresses |= more.addresses
        found.lost |= more.lost
    return found


def test_changes_come_from_followed_namespaces_and_the_host_only(
    watch: Watch, make: Callable[[], str], link: str
) -> None:
    followed, other = make(), make()
    number = follow(watch, followed)
    settled(watch)
    ip("-n", other, "link", "set", "lo", "up")
    ip("-n", other, "address", "add", "10.9.9.9/24", "dev", "lo")
    ip("-n", other, "address", "del", "10.9.9.9/24", "dev", "lo")
    assert settled(watch) == Changes()
    ip("-n", followed, "link", "set", "lo", "up")
    assert settled(watch).namespaces == {number}
    ip("link", "set", link, "up")
    found = settled(watch)
    assert (found.namespaces, found.links) == (set(), {link: (socket.if_nametoindex(link), True)})
    ip("link", "del", link)
    assert settled(watch).links == {link: (0, False)}


@pytest.mark.parametrize("address", ["10.9.9.9/24", "fd00:9::9/64"])
def test_an_address_is_reported_when_it_goes_and_not_when_it_comes(
    watch: Watch, make: Callable[[], str], link: str, address: str
) -> None:
    name = make()
    number = follow(watch, name)
    ip("-n", name, "link", "set", "lo", "up")
    ip("link", "set", link, "up")
    settled(watch)
    ip("-n", name, "address", "add", address, "dev", "lo")
    ip("address", "add", address, "dev", link)
    assert settled(watch) == Changes()
    ip("-n", name, "address", "del", address, "dev", "lo")
    assert settled(watch) == Changes(namespaces={number})
    ip("address", "del", address, "dev", link)
    assert settled(watch) == Changes(addresses={link})


def test_a_port_that_leaves_its_bridge_is_reported_and_what_the_bridge_says_is_not(watch: Watch, link: str) -> None:
    port = f"p{uuid.uuid4().hex[:8]}"
    ip("link", "add", port, "type", "veth", "peer", "name", f"{port}x")
    try:
        ip("link", "set", port, "master", link)
        settled(watch)
        ip("link", "set", port, "nomaster")
        found = settled(watch)
        assert found.links[port][0] == socket.if_nametoindex(port), "it is still there"
    finally:
        ip("link", "del", port)


def test_a_namespace_that_is_not_the_one_on_record_is_not_followed(watch: Watch, make: Callable[[], str]) -> None:
    name, other = make(), make()
    assert watch.follow(f"/run/netns/{name}", identity(other)) is None
    assert watch.follow("/run/netns/no-such", identity(other)) is None


def test_following_holds_no_descriptor_and_delays_no_end(watch: Watch, make: Callable[[], str]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    name, end = make(), f"v{uuid.uuid4().hex[:8]}"
    ip("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name)
    follow(watch, name)
    assert len(os.listdir("/proc/self/fd")) == before
    settled(watch)
    ip("netns", "del", name)
    patience = time.monotonic() + 40
    found = Changes()
    while end not in found.links:
        assert time.monotonic() < patience, "the pair goes with the namespace"
        found = settled(watch)
    assert found.links[end] == (0, False)


def test_what_is_too_much_for_the_socket_is_reported_as_lost(watch: Watch, link: str) -> None:
    watch._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    for _ in range(20):
        ip("link", "set", link, "up")
        ip("link", "set", link, "down")
    found = settled(watch)
    assert found.lost
    ip("link", "set", link, "up")
    assert link in settled(watch).links, "it goes on"


def test_messages_of_the_host_and_of_namespaces_are_told_apart_in_one_reading(
    watch: Watch, make: Callable[[], str], link: str
) -> None:
    name = make()
    number = follow(watch, name)
    settled(watch)
    for _ in range(40):
        ip("link", "set", link, "up")
        ip("-n", name, "link", "set", "lo", "up")
        ip("link", "set", link, "down")
        ip("-n", name, "link", "set", "lo", "down")
    found = watch.changes()
    assert found.namespaces == {number}
    assert found.links == {link: (socket.if_nametoindex(link), False)}, "the last state"
    assert not found.lost


def test_a_link_that_goes_with_its_address_reports_itself_only(watch: Watch, link: str) -> None:
    ip("link", "set", link, "up")
    ip("address", "add", "10.9.9.9/24", "dev", link)
    settled(watch)
    ip("link", "del", link)
    found = settled(watch)
    assert found.links == {link: (0, False)}
    assert found.addresses == set()


def test_the_next_namespace_at_a_path_is_followed_by_its_own_record(watch: Watch, make: Callable[[], str]) -> None:
    name = make()
    before, recorded = identity(name), time.time()
    follow(watch, name)
    ip("netns", "del", name)
    ip("netns", "add", name)
    # The next one is younger than the record: its cookie is compared, too.
    assert watch.follow(f"/run/netns/{name}", before, recorded) is None
    number = follow(watch, name)
    settled(watch)
    ip("-n", name, "link", "set", "lo", "up")
    assert settled(watch).namespaces == {number}


def test_an_id_is_given_again_after_its_namespace(watch: Watch, make: Callable[[], str]) -> None:
    first = make()
    number = follow(watch, first)
    ip("netns", "del", first)
    patience = time.monotonic() + 40
    while follow(watch, last := make()) != number:
        assert time.monotonic() < patience, f"the kernel gives the lowest free id, and {number} stays in use"
    settled(watch)
    ip("-n", last, "link", "set", "lo", "up")
    assert settled(watch).namespaces == {number}
