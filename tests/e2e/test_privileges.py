"""With the rights of the shipped manifest, as every daemon here, the reference plugins work; each right is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.node import Answer, Node
from tests.e2e.rights import SHIPPED
from tests.programs import needed

IPAM = {"type": "host-local", "subnet": "10.91.0.0/24"}
BRIDGE = {"type": "bridge", "bridge": "br0", "isGateway": True, "ipMasq": True, "hairpinMode": True, "ipam": IPAM}
PTP = {"type": "ptp", "ipMasq": True, "ipam": IPAM}
MACVLAN = {"type": "macvlan", "master": "up0", "ipam": IPAM}
PORTMAP = {"type": "portmap", "snat": True, "capabilities": {"portMappings": True}}
TUNING = {"type": "tuning", "sysctl": {"net.ipv4.conf.all.arp_filter": "1"}, "mac": "c2:b0:57:49:47:f1", "mtu": 1400}
RATES = {f"{way}{what}": 1_000_000 for way in ("ingress", "egress") for what in ("Rate", "Burst")}
LISTS: dict[str, list[dict[str, Any]]] = {
    "bridge, portmap": [BRIDGE, PORTMAP],
    "bridge, firewall": [BRIDGE, {"type": "firewall", "backend": "iptables"}],
    "ptp, tuning": [PTP, TUNING],
    "ptp, bandwidth": [PTP, {"type": "bandwidth", **RATES}],
    "ptp, sbr": [PTP, {"type": "sbr"}],
    "macvlan": [MACVLAN],
    "host-device": [{"type": "host-device", "device": "up1"}],
}


@pytest.fixture
def contained(make_node: Callable[..., Node]) -> Callable[..., Node]:
    """Start a node with the plugins of a list, whose daemon may lack a capability."""

    def start(plugins: list[dict[str, Any]], bin_dir: Path, without: str = "", **settings: str) -> Node:
        node = make_node(
            rights=replace(SHIPPED, capabilities=SHIPPED.capabilities - {without}),
            settings={"binDir": str(bin_dir), "builtinPlugins": "off", **settings},
        )
        host = Path(node.host).name
        subprocess.run(
            [needed("ip"), "-n", host, "link", "add", "up0", "type", "veth", "peer", "name", "up1"], check=True
        )
        for name in ("up0", "up1"):
            subprocess.run([needed("ip"), "-n", host, "link", "set", name, "up"], check=True)
        chain = [
            {**plugin, "ipam": {**IPAM, "dataDir": str(node.networks_dir)}} if "ipam" in plugin else plugin
            for plugin in plugins
        ]
        node.network("cluster", {"cniVersion": "1.0.0", "name": "cluster", "plugins": chain})
        node.pod("hello")
        node.start()
        return node

    return start


def call(node: Node, verb: str, netns: str) -> Answer:
    ports = [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]
    more = {"capabilities": {"portMappings": True}, "runtimeConfig": {"portMappings": ports}}
    return node.cni(verb, "c1", netns, "hello", stdin=json.dumps(json.loads(node.stdin) | more).encode())


@pytest.mark.parametrize("name", LISTS)
def test_what_the_manifest_grants_is_enough(contained: Callable[..., Node], reference: Path, name: str) -> None:
    if missing := [plugin["type"] for plugin in LISTS[name] if not (reference / plugin["type"]).exists()]:
        pytest.skip(f"the reference plugins lack {', '.join(missing)}")
    node = contained(LISTS[name], reference)
    netns = node.add_netns()
    added = call(node, "ADD", netns)
    assert added.code == 0, added.stdout
    assert "eth0" in node.links(netns)
    assert call(node, "DEL", netns).code == 0
    assert node.links(netns) == ["lo"]
    assert node.leftovers() == []


@pytest.mark.parametrize("plugin", [BRIDGE, PTP], ids=lambda plugin: str(plugin["type"]))
def test_built_in_plugins_write_sysctls_of_the_node_and_the_pod(
    contained: Callable[..., Node], tmp_path: Path, plugin: dict[str, Any]
) -> None:
    node = contained([plugin], tmp_path, builtinPlugins="prefer")
    netns = node.add_netns()
    added = call(node, "ADD", netns)
    assert added.code == 0, added.stdout
    forwarding = [needed("ip"), "netns", "exec", Path(node.host).name, "cat", "/proc/sys/net/ipv4/ip_forward"]
    assert subprocess.run(forwarding, check=True, capture_output=True, text=True).stdout == "1\n"
    assert call(node, "DEL", netns).code == 0
    assert node.links(netns) == ["lo"]


def deleted(
    contained: Callable[..., Node], tmp_path: Path, plugin: dict[str, Any], keep: str, without: str = ""
) -> tuple[Node, str]:
    """Delete the interface of a running pod whose network has this plugin; return the node and the namespace."""
    node = contained([plugin], tmp_path, without, builtinPlugins="prefer", keep=keep)
    netns = node.add_netns()
    added = call(node, "ADD", netns)
    assert added.code == 0, added.stdout
    subprocess.run([needed("ip"), "-n", Path(netns).name, "link", "delete", "eth0"], check=True)
    return node, netns


@pytest.mark.parametrize("plugin", [BRIDGE, PTP, MACVLAN], ids=lambda plugin: str(plugin["type"]))
@pytest.mark.parametrize(("keep", "event"), [("report", "AttachmentBroken"), ("repair", "AttachmentRepaired")])
def test_a_deleted_interface_is_noticed_at_once(
    contained: Callable[..., Node], tmp_path: Path, plugin: dict[str, Any], keep: str, event: str
) -> None:
    node, netns = deleted(contained, tmp_path, plugin, keep)
    # Measured: 0.2 s. Without the kernel's reports it takes KEEP_INTERVAL_SECONDS.
    node.wait_until(lambda: event in node.log.read_text(), "the Event", 10)
    assert ("eth0" in node.links(netns)) == (keep == "repair")
    assert node.get("/readyz?gates")[1] == b"ok"


def test_without_net_broadcast_the_daemon_says_what_it_can_not_do(
    contained: Callable[..., Node], tmp_path: Path
) -> None:
    node, netns = deleted(contained, tmp_path, MACVLAN, "repair", without="NET_BROADCAST")
    status, body = node.get("/readyz?gates")
    said = json.loads(body)["degraded"]["interfaces"]
    assert (status, "NET_BROADCAST is missing" in said) == (200, True)
    words = ("-m", "multus_tools.ctl", "doctor", "--json", "--config", str(node.config))
    done = subprocess.run(
        node.contained(sys.executable, *words), capture_output=True, text=True, timeout=60, check=False
    )
    (found,) = [item for item in json.loads(done.stdout)["findings"] if item["subject"] == "degraded: interfaces"]
    assert (found["severity"], "NET_BROADCAST" in found["evidence"]) == ("warning", True)
    assert "eth0" not in node.links(netns)


@pytest.mark.parametrize(
    ("right", "name", "said"),
    [
        ("NET_ADMIN", "macvlan", "operation not permitted"),
        ("SYS_ADMIN", "macvlan", "setns: Operation not permitted"),
        ("SYS_CHROOT", "macvlan", "could not be started"),
        # It makes its directory without permission to enter it.
        ("DAC_OVERRIDE", "ptp, tuning", "permission denied"),
    ],
)
def test_each_right_is_needed(
    contained: Callable[..., Node], reference: Path, right: str, name: str, said: str
) -> None:
    if right == "DAC_OVERRIDE" and Path("/run/cni/tuning").exists():
        Path("/run/cni/tuning").chmod(0o600)
    node = contained(LISTS[name], reference, right)
    added = call(node, "ADD", node.add_netns())
    assert added.code == 1
    assert said in added.stdout.decode()


@pytest.mark.parametrize("without", ["", "SYS_PTRACE"])
def test_a_namespace_that_is_named_by_a_process(contained: Callable[..., Node], reference: Path, without: str) -> None:
    """Looking below the /proc/<pid> of a program that has more capabilities counts as tracing it."""
    node = contained(LISTS["macvlan"], reference, without)
    with node.process_in(node.add_netns()) as program:
        netns = f"/proc/{program.pid}/ns/net"
        try:
            added = call(node, "ADD", netns)
            call(node, "DEL", netns)
        finally:
            program.kill()
    assert added.code == (1 if without else 0), added.stdout
    assert added.json.get("code") == (8 if without else None)
    if without:
        reason = "Permission denied (the daemon needs the capability SYS_PTRACE for this path;"
        assert added.json["msg"].startswith(f"{netns} may not be opened: {reason}")
