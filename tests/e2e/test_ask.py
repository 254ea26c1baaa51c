"""`multusctl` asks a running daemon."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.node import Node


def multusctl(node: Node, *words: str) -> subprocess.CompletedProcess[str]:
    """Run it with the node's configuration."""
    command = [sys.executable, "-m", "multus_daemon.ctl", *words, "--config", str(node.config)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def asked(node: Node, *words: str) -> dict[str, Any]:
    """The JSON object of an answer."""
    done = multusctl(node, *words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        node.ptp("cluster", "10.77.1.0/24")
        node.ptp("other", "10.77.2.0/24", namespace="default")
        node.pod("a", "other")
        node.start()
        yield node


def test_trace_shows_the_steps_of_a_pod_in_order(node: Node) -> None:
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "a").code == 0
    assert node.cni("DEL", "c1", netns, "a").code == 0
    found = asked(node, "trace", "default/a")
    assert found["schema"] == "multusctl.trace/v1"
    added, deleted = found["requests"]
    assert (added["verb"], added["pod"], added["container"], added["error"]) == ("ADD", "default/a", "c1", None)
    steps = [step["what"] for step in added["steps"]]
    expected = [
        "its turn",
        "networks: kube-system/cluster, default/other",
        "planned",
        "plugin host-local",
        "plugin ptp",
    ]
    places = [next(place for place, step in enumerate(steps) if step.startswith(start)) for start in expected]
    assert places == sorted(places)
    assert (
        sum(step["seconds"] for step in added["steps"] if step["what"] == "plugin ptp: ADD success") < added["seconds"]
    )
    assert deleted["verb"] == "DEL"
    assert asked(node, "trace", "default/b")["requests"] == []
    shown = multusctl(node, "trace", "default/a").stdout
    assert "ADD" in shown
    assert "plugin ptp: ADD success" in shown


def test_trace_has_the_error_of_a_request_that_failed(node: Node) -> None:
    node.pod("b", "missing")
    assert node.cni("ADD", "c2", node.add_netns(), "b").code != 0
    (failed,) = asked(node, "trace", "default/b")["requests"]
    assert "default/missing" in failed["error"]["text"]


def test_without_a_daemon_it_says_so_at_once(node: Node) -> None:
    assert node.stop() == 0
    began = time.monotonic()
    done = multusctl(node, "trace", "default/a")
    assert done.returncode == 3
    assert "multus-daemon run" in done.stderr
    assert time.monotonic() - began < 10
