"""What somebody breaks of a running pod's network is shown, counted, reported, and repaired by hand or by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.node import Node, ping
from tests.programs import needed

METRICS_PORT = 9191
NETWORK = "default/lan"
DELETED = ("link", "delete", "net1")


@pytest.fixture
def broken(make_node: Callable[..., Node]) -> Callable[..., tuple[Node, str]]:
    """Start a daemon with these settings, and a pod which has an interface of the bridge `lan`; then make a change."""

    def make(*change: str, **settings: Any) -> tuple[Node, str]:
        own = {"metricsPort": METRICS_PORT, "metricsAddress": "127.0.0.1"}
        node = make_node(settings={**own, **settings})
        node.ptp("cluster", "10.81.0.0/24")
        ipam: dict[str, Any] = {"type": "host-local", "subnet": "10.82.0.0/24", "dataDir": str(node.networks_dir)}
        ipam["routes"] = [{"dst": "10.99.0.0/16"}]
        lan = {
            "cniVersion": "1.0.0",
            "name": "lan",
            "type": "bridge",
            "bridge": "lan0",
            "isGateway": True,
            "ipam": ipam,
        }
        node.network("lan", lan, "default")
        node.pod("web", "lan")
        node.start()
        netns = node.add_netns()
        answer = node.cni("ADD", "c1", netns, "web")
        assert answer.code == 0, answer.stdout
        assert ping(netns, "10.82.0.1")
        assert asked(node, "drift", status=0)["differences"] == []
        ip(netns, *change)
        return node, netns

    return make


def ip(netns: str, *words: str) -> None:
    """Change something in a namespace."""
    subprocess.run([needed("ip"), "-n", Path(netns).name, *words], check=True)


def run(node: Node, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `multusctl` with the node's configuration."""
    command = node.contained(sys.executable, "-m", "multus_tools.ctl", *words, "--config", str(node.config))
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def asked(node: Node, *words: str, status: int) -> dict[str, Any]:
    """What `multusctl` answers in JSON."""
    done = run(node, *words, "--json")
    assert done.returncode == status, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def counted(node: Node) -> float:
    """The value of `multus_attachments_broken` for the network."""
    name = f'multus_attachments_broken{{network="{NETWORK}"}} '
    return sum(float(line[len(name) :]) for line in node.metrics(METRICS_PORT).splitlines() if line.startswith(name))


def texts(items: list[dict[str, Any]]) -> list[str]:
    return [item["difference"] for item in items]


@pytest.mark.weak_spot(63)
def test_what_is_broken_is_shown_and_repaired_by_hand(broken: Callable[..., tuple[Node, str]]) -> None:
    node, netns = broken(*DELETED)
    found = asked(node, "drift", status=1)
    assert {(item["pod"], item["network"], item["interface"]) for item in found["differences"]} == {
        ("default/web", NETWORK, "net1")
    }
    assert 'interface "net1" is not there' in texts(found["differences"])
    assert {item["keep"] for item in found["differences"]} == {"report"}
    # The kernel reports it: nobody has asked before.
    node.wait_until(lambda: counted(node) == 1, "the broken attachment is counted")
    status = asked(node, "status", status=0)
    assert status["broken"] == 1
    assert 'interface "net1" is not there' in status["differences"][0]["difference"]
    assert "multusctl drift" in run(node, "status").stdout
    assert "net1" not in node.links(netns)

    dry = asked(node, "repair", "default/web", "--dry-run", status=1)
    assert texts(dry["found"]) == texts(dry["left"]) == texts(found["differences"])
    assert "net1" not in node.links(netns)

    done = asked(node, "repair", "default/web", status=0)
    assert (done["left"], done["errors"]) == ([], [])
    assert ping(netns, "10.82.0.1")
    assert asked(node, "drift", "default/web", status=0)["differences"] == []
    node.wait_until(lambda: counted(node) == 0, "nothing is broken any more")
    assert asked(node, "status", status=0)["differences"] == []


def test_a_repair_that_the_kernel_does_not_report_is_noticed(broken: Callable[..., tuple[Node, str]]) -> None:
    node, netns = broken("route", "delete", "10.99.0.0/16")
    # Only for links and addresses does it report anything.
    ip(netns, "address", "add", "10.250.0.1/32", "dev", "net1")
    ip(netns, "address", "delete", "10.250.0.1/32", "dev", "net1")
    node.wait_until(lambda: counted(node) == 1, "the broken attachment is counted")
    (difference,) = texts(asked(node, "drift", status=1)["differences"])
    assert "10.99.0.0/16" in difference
    asked(node, "repair", "default/web", status=0)
    node.wait_until(lambda: counted(node) == 0, "nothing is broken any more")


def test_the_archive_for_a_bug_report_has_it(broken: Callable[..., tuple[Node, str]], tmp_path: Path) -> None:
    node, _ = broken(*DELETED)
    file = tmp_path / "bundle.tar.gz"
    # The container has no directory for it; `kubectl multus bundle` has it on standard output.
    node.writable.append(tmp_path)
    run(node, "bundle", "--output", str(file))
    done = subprocess.run(["tar", "xzOf", file, "--wildcards", "*/answers/drift.json"], capture_output=True, check=True)
    assert 'interface "net1" is not there' in texts(json.loads(done.stdout)["differences"])
