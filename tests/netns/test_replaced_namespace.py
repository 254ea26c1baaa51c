"""A real namespace at the path of another one that is gone: a DEL leaves it alone, and frees what is on the host."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from multus_daemon.cni.errors import InvalidNetnsError
from multus_daemon.daemon import Daemon
from multus_daemon.netlink import netns as namespaces
from multus_daemon.netlink import ops
from tests.netns.conftest import Netns, make_at, remove_netns
from tests.netns.test_road import Store, make
from tests.unit.engine.conftest import wait_until
from tests.unit.server.harness import body

__all__ = ["make"]


def call(make: Callable[[], tuple[Daemon, Store]], verb: str, netns: str, container: str = "c0ffee") -> int:
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
    make: Callable[[], tuple[Daemon, Store]], netns: Netns, host: Netns, tmp_path: Path, after: str
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
        wait_until(lambda: not {name for name in host.links() if name.startswith("veth")})
    finally:
        remove_netns(beside)


def test_an_identity_is_that_of_the_namespace(make_netns: Callable[[], Netns], tmp_path: Path) -> None:
    links, one, other = ops.KernelLinks(), make_netns(), make_netns()
    known = links.netns_id(one.path)
    assert known
    assert links.netns_id(other.path) != known
    file = tmp_path / "file"
    file.touch()
    found = {path: links.is_elsewhere(path, known) for path in (one.path, other.path, str(file), str(tmp_path / "no"))}
    assert found == {one.path: False, other.path: True, str(file): True, str(tmp_path / "no"): False}
    assert not links.is_elsewhere(other.path, "")
    assert links.is_elsewhere(str(file), "")
    with namespaces.opened(one.path) as descriptor:
        assert namespaces.identity(descriptor) == known


def test_the_hosts_own_namespace_is_no_containers(make: Callable[[], tuple[Daemon, Store]], netns: Netns) -> None:
    links = ops.KernelLinks()
    for known in ("", links.netns_id(netns.path)):
        assert links.is_elsewhere("/proc/thread-self/ns/net", known)
    assert call(make, "ADD", netns.path) == 200
    assert call(make, "CHECK", f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net") == 400
    assert call(make, "CHECK", netns.path) == 200
    assert call(make, "DEL", f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net") == 200
    assert netns.links() == set()
