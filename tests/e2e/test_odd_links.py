"""Links of other programs whose names are not UTF-8, on the host and in the pod, disturb nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.e2e.node import Node
from tests.e2e.test_kept import ctl
from tests.programs import needed


def _add(netns: str, name: bytes, peer: bytes) -> None:
    namespace = Path(netns).name.encode()
    words = [b"-n", namespace, b"link", b"add", name, b"type", b"veth", b"peer", b"name", peer]
    subprocess.run([needed("ip").encode(), *words], check=True)


def test_names_that_are_not_text(node: Node) -> None:
    node.settings |= {"keep": "repair"}
    bridge = {"cniVersion": "1.0.0", "name": "lan", "type": "bridge", "bridge": "mltodd0"}
    node.network("lan", {**bridge, "ipam": {"type": "static", "addresses": [{"address": "10.82.0.2/24"}]}}, "default")
    node.pod("a", "lan")
    _add(node.host, b"\xff\xfehost", b"\xe2\x28")
    node.start()
    netns = node.add_netns()
    _add(netns, b"\xff\xfepod", b"\xe2\x28")
    assert node.cni("ADD", "c1", netns, "a").code == 0
    assert node.cni("CHECK", "c1", netns, "a").code == 0
    # After this answer the daemon follows the namespace.
    assert ctl(node, "drift")[0] == 0
    _add(netns, b"\xff\xfelater", b"\xe2\x29")
    subprocess.run([needed("ip"), "-n", Path(netns).name, "address", "del", "10.82.0.2/24", "dev", "net1"], check=True)
    node.wait_until(lambda: "AttachmentRepaired" in node.log.read_text(), "the interface is repaired")
    assert node.get("/healthz")[0] == 200
    assert node.cni("DEL", "c1", netns, "a").code == 0
    assert "Traceback" not in node.log.read_text()
