"""The daemon keeps a DHCP lease, with the rights of the manifest: through its own restart, and to the DEL."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.node import Node, ping
from tests.programs import needed

SERVER = "10.149.0.1"
LEASES = "dhcp"


@pytest.fixture
def lan(make_node: Callable[..., Node]) -> Node:
    """A node with a bridge on which a server may listen, and a pod that asks for its network."""
    node = make_node()
    node.ptp("cluster", "10.81.0.0/24")
    node.ip("link", "add", "lan0", "type", "bridge")
    node.ip("address", "add", f"{SERVER}/24", "dev", "lan0")
    node.ip("link", "set", "lan0", "up")
    lan = {"cniVersion": "1.0.0", "name": "lan", "type": "bridge", "bridge": "lan0", "ipam": {"type": "dhcp"}}
    node.network("lan", lan, "default")
    node.pod("web", "lan")
    return node


@contextlib.contextmanager
def serving(node: Node, seconds: int) -> Iterator[None]:
    """A server with leases of some seconds."""
    lines = [f"start 10.149.0.10\nend 10.149.0.250\ninterface lan0\noption lease {seconds}\nmin_lease 1"]
    lines += [f"option subnet 255.255.255.0\nlease_file {node.root}/given\npidfile {node.root}/pid\n"]
    config = node.root / "udhcpd.conf"
    config.write_text("\n".join(lines))
    (node.root / "given").touch()
    command = [needed("ip"), "netns", "exec", Path(node.host).name, needed("busybox"), "udhcpd", "-f", "-a", "1"]
    server = subprocess.Popen([*command, str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        server.kill()
        server.wait()


def files(node: Node) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (node.cni_dir / LEASES).glob("lan-*")}


def drift(node: Node) -> list[str]:
    command = node.contained(sys.executable, "-m", "multus_tools.ctl", "drift", "--json", "--config", str(node.config))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    return [item["difference"] for item in found["differences"]]


def test_a_lease_from_add_to_del(lan: Node) -> None:
    netns = lan.add_netns()
    with serving(lan, seconds=8):
        lan.start()
        assert not (lan.cni_dir / LEASES).exists()
        answer = lan.cni("ADD", "c1", netns, "web")
        assert answer.code == 0, answer.stdout
        assert ping(netns, SERVER)
        before = files(lan)
        lan.wait_until(lambda: files(lan) != before, "a renewal")
        lan.kill()
        before = files(lan)
        lan.start()
        lan.wait_until(lambda: files(lan) != before, "the lease is asked for again")
        assert drift(lan) == []
    lan.wait_for_log("is lost")
    (lost,) = drift(lan)
    assert "the server may give it to another" in lost
    with serving(lan, seconds=60):
        lan.wait_until(lambda: drift(lan) == [], "the same address again")
        assert ping(netns, SERVER)
        assert lan.cni("DEL", "c1", netns, "web").code == 0
    assert lan.leftovers() == []
