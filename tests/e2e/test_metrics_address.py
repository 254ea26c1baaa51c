"""The addresses of the metrics port: those of the node, and no others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from multus_daemon.api import metrics_port
from tests.e2e.node import Node
from tests.programs import needed

PORT = 9900
NODE = {"192.0.2.5", "2001:db8::5"}
PUBLIC = {"198.51.100.5", "2001:db8:1::5"}
LOOPBACK = {"127.0.0.1", "::1"}


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    """A node with a private and a public link, each with addresses of both families."""
    made = make_node(settings={"metricsPort": PORT})
    for name, addresses in (("private", NODE), ("public", PUBLIC)):
        made.ip("link", "add", name, "type", "veth", "peer", "name", f"{name}-wire")
        for end in (name, f"{name}-wire"):
            made.ip("link", "set", end, "up")
        for address in addresses:
            # No duplicate address detection, during which the address can't be bound.
            made.ip("address", "add", address, "dev", name, *(["nodad"] if ":" in address else []))
    return made


def start_in_a_cluster(node: Node) -> None:
    """Start the daemon with an API server that is away: metrics do not need it."""
    config = node.root / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    users = [{"name": "u", "user": {}}]
    config.write_text(
        json.dumps({"clusters": [cluster], "contexts": [context], "users": users, "current-context": "x"})
    )
    node.standalone, node.node_name = False, "node-a"
    node.settings["kubeconfig"] = str(config)
    node.start(ready=False)


def open_at(node: Node) -> set[str]:
    """Return the addresses of the node at which the port answers."""
    ask = (
        "import sys, urllib.request as u\n"
        "for a in sys.argv[1:]:\n"
        '    try: u.urlopen(f\'http://{f"[{a}]" if ":" in a else a}:9900/metrics\', timeout=20).read(); print(a)\n'
        "    except OSError: pass\n"
    )
    command = [
        needed("ip"),
        "netns",
        "exec",
        Path(node.host).name,
        sys.executable,
        "-c",
        ask,
        *NODE,
        *PUBLIC,
        *LOOPBACK,
    ]
    return set(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split())


@pytest.mark.parametrize(
    ("variable", "setting", "wanted"),
    [
        ("192.0.2.5", "", {"192.0.2.5"}),
        ("2001:db8::5", "", {"2001:db8::5"}),
        ("192.0.2.5,2001:db8::5", "", NODE),
        ("192.0.2.5", "198.51.100.5", {"198.51.100.5"}),
        ("192.0.2.5", "0.0.0.0", {"192.0.2.5", "198.51.100.5", "127.0.0.1"}),
        ("192.0.2.5", "::", NODE | PUBLIC | LOOPBACK),
        ("", "", NODE | PUBLIC | LOOPBACK),
    ],
)
def test_the_port_is_open_at_the_addresses_of_the_node_only(
    node: Node, variable: str, setting: str, wanted: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(metrics_port.NODE_IPS, variable)
    node.settings |= {"metricsAddress": setting}
    start_in_a_cluster(node)
    node.wait_until(lambda: open_at(node) >= wanted, "the port is open")
    assert open_at(node) == wanted
    node.wait_for_log("metrics on ")
    assert ("is open on all addresses" in node.log.read_text()) is (not variable and not setting)


def test_an_address_that_the_node_lacks_does_not_close_the_others(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(metrics_port.NODE_IPS, "203.0.113.5,192.0.2.5")
    start_in_a_cluster(node)
    node.wait_until(lambda: open_at(node) == {"192.0.2.5"}, "the port is open")
    node.wait_for_log(f"no metrics: can't listen on 203.0.113.5 port {PORT}")
    node.ip("address", "add", "203.0.113.5", "dev", "public")
    node.wait_for_log(f"metrics on 203.0.113.5 port {PORT}")


def test_without_a_cluster_the_port_stays_on_the_machine(node: Node) -> None:
    node.start()
    node.wait_until(lambda: open_at(node) == {"127.0.0.1"}, "the port is open")
