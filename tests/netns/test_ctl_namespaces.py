"""Namespaces that `multusctl` makes, in the kernel."""

from __future__ import annotations

import ipaddress
import os
import pathlib
import socket
import subprocess
import uuid
from collections.abc import Iterator

import pytest

from multus_daemon.kernel import inet, netns
from multus_daemon.kernel.inet import Route
from multus_daemon.kernel.pod_netns import PodNetns
from multus_tools.ctl import namespaces
from tests.netns.direct import in_pod
from tests.programs import needed


@pytest.fixture
def path(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    if subprocess.run([needed("unshare"), "-nm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("namespaces can't be made here: run the tests as root, or under `unshare -Urnm`")
    found = tmp_path / "netns" / f"t-{uuid.uuid4()}"
    yield found
    namespaces.remove(found)


def test_create_and_remove(path: pathlib.Path) -> None:
    before = os.readlink("/proc/self/ns/net")
    links = socket.if_nameindex()
    namespaces.create(path)
    assert netns.is_netns(str(path))
    assert os.readlink("/proc/self/ns/net") == os.readlink("/proc/thread-self/ns/net") == before
    assert socket.if_nameindex() == links
    for _ in range(2):
        namespaces.remove(path)
        assert not path.exists()


def test_never_over_something(path: pathlib.Path) -> None:
    namespaces.create(path)
    with pytest.raises(FileExistsError):
        namespaces.create(path)
    assert netns.is_netns(str(path))


def test_a_file_left_of_before_a_reboot(path: pathlib.Path) -> None:
    path.parent.mkdir()
    path.touch()
    namespaces.remove(path)
    assert not path.exists()


def test_a_failure_leaves_nothing(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "_MS_BIND", 1 << 30)
    with pytest.raises(OSError, match="mount"):
        namespaces.create(path)
    assert not path.exists()


def test_look(path: pathlib.Path) -> None:
    """Against a dummy link of our own making."""
    namespaces.create(path)
    name, peer = (f"t{kind}{os.getpid()}" for kind in "ab")

    def make(session: PodNetns) -> None:
        lo = session.pod.link("lo")
        assert lo.is_up
        session.pod.add_veth(name, peer, session.host_netns, mtu=1400)
        link = session.pod.link(name)
        session.pod.request(inet.add_address(link.index, ipaddress.ip_interface("10.99.0.2/24")))
        session.pod.change(link.index, up=True)
        session.host.change(session.host.link(peer).index, up=True)
        gateway = ipaddress.ip_address("10.99.0.1")
        session.pod.request(inet.add_route(Route(ipaddress.ip_interface("0.0.0.0/0"), link.index, gateway)))

    in_pod(str(path), make)
    view = namespaces.look(str(path))
    (interface,) = view["interfaces"]
    mac = interface.pop("mac")
    assert len(mac) == 17
    assert interface == {"name": name, "mtu": 1400, "up": True, "addresses": ["10.99.0.2/24"]}
    # Nothing of what the kernel makes for each interface: link-local and multicast routes of IPv6.
    assert view["routes"] == [
        {"dst": "0.0.0.0/0", "gw": "10.99.0.1", "interface": name},
        {"dst": "10.99.0.0/24", "gw": "", "interface": name},
    ]
