"""A daemon that stops serves DELs and leaves ADDs to its successor; it touches no foreign file and no log setting."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.node import Node
from tests.e2e.upstream import NEW, StandIn, shim_of

WAITING = """\
echo "$CNI_COMMAND $CNI_CONTAINERID" >>{root}/calls
[ "$CNI_COMMAND $CNI_CONTAINERID" != "ADD running" ] || until [ -e {root}/go ]; do sleep 0.02; done
[ "$CNI_COMMAND" = DEL ] || echo '{{"cniVersion":"1.0.0"}}'
"""


def shim_of_others(node: Node, which: str) -> Callable[..., bool]:
    """A call of upstream's new shim, or of its stand-in; True if it succeeds."""
    if which == "stand-in":
        return StandIn(node).cni
    program = shim_of(NEW)

    def call(*request: str) -> bool:
        env = node.environment(*request) | {"PATH": os.environ["PATH"]}
        return subprocess.run([program], env=env, input=node.stdin, timeout=120, check=False).returncode == 0

    return call


@pytest.mark.weak_spot(41)
@pytest.mark.conformance("server-12", "server-13")
@pytest.mark.parametrize("which", ["stand-in", NEW])
def test_a_daemon_that_stops_serves_dels_and_leaves_adds_to_its_successor(node: Node, which: str) -> None:
    theirs = shim_of_others(node, which)
    node.plugin("waiting", WAITING.format(root=node.root))
    node.network("cluster", {"cniVersion": "1.0.0", "name": "cluster", "type": "waiting"})
    node.pod("hello")
    # A comparison by the daemon itself runs CHECK, too.
    node.settings["keep"] = "off"
    node.start()
    assert node.daemon is not None
    spaces = {name: node.add_netns() for name in ("native-old", "their-old", "running", "native", "their")}

    def calls() -> list[str]:
        path = node.root / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def native(verb: str, container: str) -> int:
        return node.cni(verb, container, spaces[container], "hello", timeout=120).code

    assert native("ADD", "native-old") == 0
    assert theirs("ADD", "their-old", spaces["their-old"], "hello")
    with ThreadPoolExecutor() as pool:
        running = pool.submit(native, "ADD", "running")
        node.wait_until(lambda: "ADD running" in calls(), "the plugin begins")
        node.daemon.send_signal(signal.SIGTERM)
        node.wait_until(lambda: node.ask("POST", "/readyz", b"null")[0] == 500, "it does not take an ADD")
        assert (node.get("/healthz"), node.get("/readyz")) == ((200, b""), (500, b""))
        assert node.get("/readyz?gates") == (503, b'{"podsGetNetworks":"no","closed":{"socket":"shutting down"}}')
        added: list[Future[Any]] = [
            pool.submit(native, "ADD", "native"),
            pool.submit(theirs, "ADD", "their", spaces["their"], "hello"),
        ]
        assert native("DEL", "native-old") == 0
        assert theirs("DEL", "their-old", spaces["their-old"], "hello")
        assert calls()[3:] == ["DEL native-old", "DEL their-old"]
        (node.root / "go").touch()
        assert running.result() == 0
        assert node.daemon.wait(timeout=30) == 0
        assert not node.socket.exists()
        assert calls()[5:] == []
        node.start()
        assert [each.result() for each in added] == [0, True]
    assert sorted(calls()[5:]) == ["ADD native", "ADD their"]


@pytest.mark.weak_spot(46)
@pytest.mark.conformance("config-3")
def test_requests_do_not_change_where_the_log_goes(node: Node) -> None:
    node.settings |= {"logToStderr": False, "logFile": node.below_chroot(node.root / "own.log")}
    node.pod("hello")
    node.start()
    netns = node.add_netns()
    for verb in ("ADD", "DEL"):
        assert node.cni(verb, "c1", netns, "hello").code == 0
    assert node.stop() == 0
    # Standard output and standard error; the one line is no log.
    assert node.log.read_text() == f"multus-daemon: ready, {node.socket}\n"
    assert "multus-daemon stops" in (node.root / "own.log").read_text()
