"""Bursts, restarts and shims that are killed: from the outside, with the real shim and plugin processes."""

from __future__ import annotations

import itertools
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import multus_shim
from tests.e2e.node import Answer, Node

PAIRS = 200
AT_ONCE = 8
RESTARTS = 5


def marks(node: Node, name: str) -> list[str]:
    """Return the lines that the plugins of a test wrote."""
    path = node.root / name
    return path.read_text().splitlines() if path.exists() else []


def dummy(node: Node, name: str, seconds: float) -> None:
    """A plugin that makes no interface: it notes that it begins and ends, and is slow in between."""
    log = node.root / "marks"
    node.plugin(
        name,
        f'echo "begin $CNI_COMMAND $CNI_CONTAINERID" >>{log}; sleep {seconds}; '
        f'echo "end $CNI_COMMAND $CNI_CONTAINERID" >>{log}; '
        '[ "$CNI_COMMAND" = DEL ] || echo \'{"cniVersion":"1.0.0"}\'',
    )


def start_shim(node: Node, verb: str, container_id: str, netns: str) -> subprocess.Popen[bytes]:
    shim = subprocess.Popen(
        [str(multus_shim.binary())],
        env=node.environment(verb, container_id, netns, "hello"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert shim.stdin is not None
    shim.stdin.write(node.stdin)
    shim.stdin.close()
    shim.stdin = None
    return shim


def in_a_slow_add(make_node: Callable[..., Node]) -> tuple[Node, str, subprocess.Popen[bytes]]:
    """A node whose plugin works on the ADD of `c1` for two seconds; the pod's namespace, and the shim that waits."""
    node = make_node()
    dummy(node, "slow", 2)
    node.network("cluster", {"cniVersion": "1.0.0", "name": "cluster", "type": "slow"})
    node.pod("hello")
    node.start()
    netns = node.add_netns()
    shim = start_shim(node, "ADD", "c1", netns)
    node.wait_until(lambda: bool(marks(node, "marks")), "the plugin begins")
    return node, netns, shim


# --- restarts --------------------------------------------------------------------------------------------------------


class Pairs:
    """ADD and DEL of one container after the other, some at a time: PAIRS of them, and more until `finish`."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.done = 0
        self.failed: list[Answer] = []
        self._lock = threading.Lock()
        self._namespaces = [node.add_netns() for _ in range(AT_ONCE)]
        self._numbers = itertools.count()
        self._finishing = False
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._workers = [self._pool.submit(self._work, netns) for netns in self._namespaces]

    def _next(self) -> int | None:
        with self._lock:
            number = next(self._numbers)
            return None if self._finishing and number >= PAIRS else number

    def _work(self, netns: str) -> None:
        while (number := self._next()) is not None:
            for verb in ("ADD", "DEL"):
                answer = self.node.cni(verb, f"c{number}", netns, "hello", timeout=120)
                if answer.code != 0 or answer.stderr:
                    self.failed.append(answer)
                elif verb == "ADD":
                    assert "eth0" in {item["name"] for item in answer.json["interfaces"]}
            with self._lock:
                self.done += 1

    def go_on(self) -> None:
        """Until more are through than can have been on their way."""
        wanted = self.done + 2 * AT_ONCE
        self.node.wait_until(lambda: self.done >= wanted, f"{wanted} pairs", timeout=60)

    def finish(self) -> None:
        """Until all are through; what failed in a thread fails here."""
        self._finishing = True
        for worker in self._workers:
            worker.result(timeout=240)
        self._pool.shutdown()


@pytest.fixture
def pairs(node: Node) -> Iterator[Pairs]:
    node.pod("hello")
    node.start()
    made = Pairs(node)
    yield made
    made.finish()


def expect_nothing_left(pairs: Pairs) -> None:
    node = pairs.node
    assert pairs.failed == []
    assert pairs.done >= PAIRS
    assert node.links() == ["lo"]
    assert node.leftovers() == []
    log = node.log.read_text()
    assert "spooled request" not in log
    assert "cut off" not in log


@pytest.mark.weak_spot(41)
def test_a_restart_is_a_pause(node: Node, pairs: Pairs) -> None:
    for _ in range(RESTARTS):
        pairs.go_on()
        assert node.stop() == 0
        node.start()
    pairs.go_on()
    pairs.finish()
    expect_nothing_left(pairs)


@pytest.mark.weak_spot(41)
def test_a_successor_that_is_there_before_the_old_one_ends(node: Node, pairs: Pairs) -> None:
    for _ in range(RESTARTS):
        pairs.go_on()
        old = node.daemon
        assert old is not None
        before = node.socket.stat().st_ino
        node.start()
        while node.socket.stat().st_ino == before:
            time.sleep(0.02)
        old.send_signal(signal.SIGTERM)
        assert old.wait(timeout=30) == 0
        node.wait_until(lambda: node.get("/readyz?gates")[0] == 200, "the successor is ready")
    pairs.go_on()
    pairs.finish()
    expect_nothing_left(pairs)


def test_a_del_by_the_successor_waits_for_the_add_of_the_old_one(make_node: Callable[..., Node]) -> None:
    """Else what the ADD makes meanwhile is of a container that nobody knows."""
    node, netns, shim = in_a_slow_add(make_node)
    old, before = node.daemon, node.socket.stat().st_ino
    assert old is not None
    node.start()
    node.wait_until(lambda: node.socket.stat().st_ino != before, "the successor has the socket")
    old.send_signal(signal.SIGTERM)
    shim.kill()
    shim.communicate()
    assert node.cni("DEL", "c1", netns, "hello").code == 0
    assert marks(node, "marks") == ["begin ADD c1", "end ADD c1", "begin DEL c1", "end DEL c1"]
    assert node.leftovers() == []
    assert old.wait(timeout=30) == 0


# --- clients that go -------------------------------------------------------------------------------------------------


# --- bursts ----------------------------------------------------------------------------------------------------------
