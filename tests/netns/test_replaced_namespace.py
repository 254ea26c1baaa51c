"""A real namespace at the path of another one that is gone: a DEL leaves it alone, and frees what is on the host."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from multus_daemon.daemon import Daemon
from multus_daemon.kernel import netns as namespaces
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.pod.store import FileStore
from multus_daemon.spec.cni.errors import InvalidNetnsError
from tests.fakes.cluster import WarmStore
from tests.namespaces import make_at, remove_netns
from tests.netns.conftest import Netns
from tests.netns.test_road import make
from tests.unit.api.harness import body
from tests.waiting import until

__all__ = ["make"]


def call(make: Callable[[], tuple[Daemon, WarmStore]], verb: str, netns: str, container: str = "c0ffee") -> int:
    async def one() -> int:
        daemon, _ = make()
        try:
            answer = await daemon._api.call(body(verb, CNI_NETNS=netns, CNI_CONTAINERID=container))
        except InvalidNetnsError:
            return 400
        return answer.status

    return asyncio.run(one())


def leases(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("leases/*/10.*"))


@pytest.mark.parametrize("after", ["namespace", "file"])
def test_del_leaves_what_is_at_the_path_alone(
    make: Callable[[], tuple[Daemon, WarmStore]], netns: Netns, host: Netns, tmp_path: Path, after: str
) -> None:
    path = Path(netns.path)
    assert call(make, "ADD", netns.path) == 200
    assert len(leases(tmp_path)) == 3
    # A namespace takes the number of one that has gone; here it is another's.
    beside = tmp_path / "beside"
    make_at(beside)
    remove_netns(path)
    try:
        if after == "file":
            path.touch()
        else:
            make_at(path)
            Netns(str(path)).detect_duplicates(False)
            netns.batch(*(f"link add {name} type bridge" for name in ("eth0", "net1", "net2")))
        assert call(make, "DEL", netns.path) == 200
        if after == "namespace":
            assert netns.links() == {"eth0", "net1", "net2"}
        assert leases(tmp_path) == []
        assert list((tmp_path / "cni" / "attachments").iterdir()) == []
        # The kernel takes a namespace apart when it has the time.
        until(lambda: not {name for name in host.links() if name.startswith("veth")})
    finally:
        remove_netns(beside)


def identity_of(path: str) -> str:
    with PodNetns(path) as netns:
        return netns.identity()


def is_elsewhere(path: str, known: str) -> bool:
    with PodNetns(path) as netns:
        return netns.is_elsewhere(known)


def test_an_identity_is_that_of_the_namespace(make_netns: Callable[[], Netns], tmp_path: Path) -> None:
    one, other = make_netns(), make_netns()
    known = identity_of(one.path)
    assert known
    assert identity_of(other.path) != known
    file = tmp_path / "file"
    file.touch()
    found = {path: is_elsewhere(path, known) for path in (one.path, other.path, str(file), str(tmp_path / "no"))}
    assert found == {one.path: False, other.path: True, str(file): True, str(tmp_path / "no"): False}
    assert not is_elsewhere(other.path, "")
    assert is_elsewhere(str(file), "")
    with namespaces.opened(one.path) as descriptor:
        assert namespaces.identity(descriptor, namespaces.cookie_of(known)) == known
        # Of a record that has no cookie, device and inode count.
        assert not is_elsewhere(one.path, namespaces.identity(descriptor))


def make_with_the_inode_of(path: Path, inode: int) -> bool:
    """Make a namespace at the path until it has that inode; the kernel gives the lowest that is free."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        make_at(path)
        if path.stat().st_ino == inode:
            return True
        remove_netns(path)
        # The kernel takes namespaces apart in the background.
        time.sleep(0.02)
    return False


def test_a_namespace_with_the_inode_of_an_earlier_one_is_another(make_netns: Callable[[], Netns]) -> None:
    netns = make_netns()
    path = Path(netns.path)
    known, inode = identity_of(netns.path), path.stat().st_ino
    if not namespaces.cookie_of(known):
        pytest.skip("the kernel gives namespaces no cookie: Linux 5.14 or newer does")
    remove_netns(path)
    if not make_with_the_inode_of(path, inode):
        pytest.skip("the kernel did not use the inode again within 5 s: other tests make namespaces too")
    assert is_elsewhere(netns.path, known)
    assert not is_elsewhere(netns.path, identity_of(netns.path))


@pytest.mark.parametrize("has_cookie", [True, False])
def test_a_late_del_strips_no_newer_container(
    make: Callable[[], tuple[Daemon, WarmStore]], netns: Netns, tmp_path: Path, has_cookie: bool
) -> None:
    """The newer one is at the same path, in a namespace with the same inode."""
    path = Path(netns.path)
    inode = path.stat().st_ino
    assert call(make, "ADD", netns.path, "a") == 200
    if not has_cookie:
        forget_cookies(tmp_path)
    remove_netns(path)
    if not make_with_the_inode_of(path, inode):
        pytest.skip("the kernel did not use the inode again within 5 s: other tests make namespaces too")
    Netns(str(path)).detect_duplicates(False)
    assert call(make, "ADD", netns.path, "b") == 200
    if not has_cookie:
        forget_cookies(tmp_path)
    links = netns.links()
    assert {"eth0", "net1", "net2"} <= links
    assert call(make, "DEL", netns.path, "a") == 200
    assert netns.links() == links
    assert call(make, "CHECK", netns.path, "b") == 200
    assert len(leases(tmp_path)) == 3
    assert call(make, "DEL", netns.path, "b") == 200
    assert leases(tmp_path) == []


def forget_cookies(folder: Path) -> None:
    """Write all records as a daemon before this feature did."""
    store = FileStore(folder / "cni", ResultCache(folder / "cni"))
    for container_id in store.containers():
        record = store.load(container_id)
        assert record is not None
        store.save(replace(record, netns_id=record.netns_id.partition(".")[0]))


def test_the_hosts_own_namespace_is_no_containers(make: Callable[[], tuple[Daemon, WarmStore]], netns: Netns) -> None:
    for known in ("", identity_of(netns.path)):
        assert is_elsewhere("/proc/thread-self/ns/net", known)
    assert call(make, "ADD", netns.path) == 200
    assert call(make, "CHECK", f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net") == 400
    assert call(make, "CHECK", netns.path) == 200
    assert call(make, "DEL", f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net") == 200
    assert netns.links() == set()
