"""The daemon does not touch foreign files and log settings when it starts, serves and stops."""

from __future__ import annotations

import pytest

from tests.e2e.node import Node


@pytest.mark.weak_spot(29)
def test_only_the_socket_in_its_directory_is_ours(node: Node) -> None:
    foreign = node.socket.parent / "kubeconfig"
    foreign.parent.mkdir()
    foreign.write_text("precious")
    node.start()
    assert node.stop() == 0
    node.start()
    node.kill()
    node.start()
    assert node.stop() == 0
    assert foreign.read_text() == "precious"


@pytest.mark.weak_spot(46)
@pytest.mark.conformance("config-3")
def test_requests_do_not_change_where_the_log_goes(node: Node) -> None:
    node.settings |= {"logToStderr": False, "logFile": str(node.root / "own.log")}
    node.pod("hello")
    node.start()
    netns = node.add_netns()
    for verb in ("ADD", "DEL"):
        assert node.cni(verb, "c1", netns, "hello").code == 0
    assert node.stop() == 0
    # Standard output and standard error; the one line is no log.
    assert node.log.read_text() == f"multus-daemon: ready, {node.socket}\n"
    assert "multus-daemon stops" in (node.root / "own.log").read_text()
