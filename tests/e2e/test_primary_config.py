"""The node's CNI configuration and a real daemon: generated, kept through restarts and kills, defended, told."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.node import Answer, Node

PRIMARY = "10-net.conflist"


class CniDirectory:
    """The runtime's directory of CNI configurations on a node, with a daemon that takes care of it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.path = node.root / "net.d"
        self.path.mkdir()
        node.settings |= {"cniConfigDir": str(self.path), "multusAutoconfigDir": str(self.path), "metricsPort": 9091}
        del node.settings["clusterNetwork"]

    @property
    def ours(self) -> Path:
        return self.path / "00-multus.conf"

    def primary(self, **more: Any) -> bytes:
        """A ptp network with addresses of the node."""
        ipam = {"type": "host-local", "subnet": "10.82.0.0/24", "dataDir": str(self.node.networks_dir)}
        plugins = [{"type": "ptp", "ipam": ipam, **more}]
        return json.dumps({"cniVersion": "1.0.0", "name": "primary", "plugins": plugins}).encode()

    def put(self, data: bytes | None = None, name: str = PRIMARY) -> None:
        (self.path / name).write_bytes(self.primary() if data is None else data)

    def reasons(self) -> dict[str, str]:
        """Why the daemon is not ready."""
        status, body = self.node.get("/readyz?gates")
        return json.loads(body)["closed"] if status == 503 else {}

    def call(self, verb: str, netns: str) -> Answer:
        """The shim, called by a runtime that has read our file."""
        return self.node.cni(verb, "c1", netns, "hello", stdin=self.ours.read_bytes())

    def identity(self) -> tuple[int, int, bytes]:
        """Return a value that changes with every write of the file."""
        status = self.ours.stat()
        return status.st_ino, status.st_mtime_ns, self.ours.read_bytes()


@pytest.fixture
def cni(make_node: Callable[..., Node]) -> CniDirectory:
    node = make_node(cni_version="1.1.0")
    node.pod("hello")
    return CniDirectory(node)


def test_the_runtime_gets_the_primary_network_by_the_generated_file(cni: CniDirectory) -> None:
    cni.put()
    cni.node.start()
    assert json.loads(cni.ours.read_text())["clusterNetwork"] == f"{cni.path}/{PRIMARY}"
    netns = cni.node.add_netns()
    added = cni.call("ADD", netns)
    assert added.code == 0, added.stdout
    assert added.json["ips"][0]["address"].startswith("10.82.0.")
    assert cni.call("CHECK", netns).code == 0
    assert cni.call("DEL", netns).code == 0
    assert cni.node.leftovers() == []


@pytest.mark.weak_spot(27, 50)
def test_sigterm_kill_and_restart_remove_nothing(cni: CniDirectory) -> None:
    cni.put()
    cni.node.start()
    before = cni.identity()
    assert cni.node.stop() == 0
    assert cni.identity() == before
    cni.node.start()
    assert cni.identity() == before
    cni.node.kill()
    assert cni.identity() == before
    cni.node.start(ready=False)
    assert cni.node.stop() == 0, "as early as it can be"
    assert cni.identity() == before
    cni.node.start()
    assert cni.identity() == before


@pytest.mark.weak_spot(26)
def test_killed_while_it_writes_it_leaves_a_whole_file(cni: CniDirectory) -> None:
    cni.put()
    cni.node.start()
    for number in range(6):
        cni.put(cni.primary(capabilities={f"capability{number}": True}))
        # The change is seen after 0.1 s or a little more.
        time.sleep(0.09 + 0.01 * number)
        cni.node.kill()
        assert json.loads(cni.ours.read_text())["name"] == "multus-cni-network"
        cni.node.start()
        assert list(json.loads(cni.ours.read_text())["capabilities"]) == [f"capability{number}"]
    assert sorted(path.name for path in cni.path.iterdir()) == ["00-multus.conf", PRIMARY]


def ctl(node: Node, *arguments: str) -> Any:
    """The answer of multusctl on the node."""
    command = [sys.executable, "-m", "multus_tools.ctl", *arguments, "--json", "--config", str(node.config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_a_file_that_comes_before_ours_is_named_everywhere_until_it_goes(cni: CniDirectory) -> None:
    cni.put()
    cni.node.start()
    assert ctl(cni.node, "explain", "default/hello")["problem"] == ""
    before = cni.path / "00-eth.conflist"
    cni.put(name=before.name)
    cni.node.wait_until(lambda: str(before) in cni.reasons().get("runtime", ""), "/readyz names the file")
    status = ctl(cni.node, "status")
    assert (status["ready"], list(status["gates"])) == (False, ["runtime"])
    assert str(before) in ctl(cni.node, "explain", "default/hello")["problem"]
    subjects = {item["subject"] for item in ctl(cni.node, "doctor")["findings"] if item["severity"] == "error"}
    assert {"readiness gate runtime", str(before)} <= subjects
    assert 'multus_ready{condition="runtime"} 0.0' in cni.node.metrics(9091)
    cni.node.wait_for_log("event for the node: CNIConfigShadowed")
    assert cni.node.get("/healthz")[0] == 200, "a restart would not help"
    netns = cni.node.add_netns()
    assert cni.call("ADD", netns).code == 0, "what still comes to the daemon is served"
    assert cni.call("DEL", netns).code == 0
    before.unlink()
    cni.node.wait_until(lambda: not cni.reasons(), "ready again")
    assert ctl(cni.node, "explain", "default/hello")["problem"] == ""
    assert 'multus_ready{condition="runtime"} 1.0' in cni.node.metrics(9091)


@pytest.mark.weak_spot(24, 26)
@pytest.mark.parametrize("content", [b'{"cniVersion":"1.0.0","na', b'{"name":"net","plugins":{}}', b"[]"])
def test_a_broken_primary(cni: CniDirectory, content: bytes) -> None:
    cni.put()
    cni.node.start()
    before = cni.identity()
    cni.put(content)
    cni.node.wait_until(lambda: "can't be read" in cni.reasons().get("primary", ""), "the reason is told", 30)
    assert cni.identity() == before
    netns = cni.node.add_netns()
    added, status = cni.call("ADD", netns), cni.node.cni("STATUS", "", "", "", stdin=versioned(cni))
    assert added.code == 1
    assert PRIMARY in added.stdout.decode()
    assert (status.code, status.json["code"]) == (1, 50)
    cni.put()
    cni.node.wait_until(lambda: cni.node.get("/readyz?gates")[0] == 200, "ready again", 30)
    assert cni.call("ADD", netns).code == 0
    assert cni.call("DEL", netns).code == 0


def versioned(cni: CniDirectory) -> bytes:
    """Our configuration as a runtime has it that asks for STATUS, which is of 1.1.0."""
    return json.dumps(json.loads(cni.ours.read_text()) | {"cniVersion": "1.1.0"}).encode()


@pytest.mark.weak_spot(51)
def test_with_a_file_of_the_operators_the_daemon_goes_on_serving(cni: CniDirectory) -> None:
    cni.put()
    (cni.node.root / "own").mkdir()
    own = cni.node.root / "own" / "05-mine.conf"
    config = {"cniVersion": "1.1.0", "name": "mine", "type": "multus-shim", "clusterNetwork": f"{cni.path}/{PRIMARY}"}
    own.write_text(json.dumps(config | {"daemonSocketDir": cni.node.settings["daemonSocketDir"]}))
    cni.node.settings["multusConfigFile"] = str(own)
    cni.node.start()
    target = cni.path / own.name
    assert target.read_bytes() == own.read_bytes()
    netns = cni.node.add_netns()
    for verb in ("ADD", "DEL"):
        assert cni.node.cni(verb, "c1", netns, "hello", stdin=target.read_bytes()).code == 0
    own.write_text("{")
    time.sleep(0.5)
    assert json.loads(target.read_text()) == config | {"daemonSocketDir": cni.node.settings["daemonSocketDir"]}
    assert not cni.ours.exists()
    assert cni.node.stop() == 0
    assert target.exists()
