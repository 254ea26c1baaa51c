"""Networks for the pods of a real node, and what is left of pods."""

from __future__ import annotations

import json
import time
from typing import Any, Final

from tests.e2e.cluster.multus import STORE
from tests.e2e.cluster.real_node import LINKS, RealNode
from tests.e2e.node import NAD

BRIDGE: Final = "br-blue"
_STATUS: Final = "k8s.v1.cni.cncf.io/network-status"
_ADDRESSES: Final = "/var/lib/cni/networks"
_FAILURES: Final = {"FailedCreatePodSandBox", "FailedKillPod", "NetworkNotReleased", "FailedAddingInterface"}


def network(node: RealNode, name: str, *plugins: dict[str, Any]) -> None:
    """Define a network of the namespace `default`."""
    config = {"cniVersion": "1.0.0", "name": name, "plugins": list(plugins)}
    metadata = {"namespace": "default", "name": name}
    node.server.apply({**NAD, "metadata": metadata, "spec": {"config": json.dumps(config)}})


def host_local(subnet: str) -> dict[str, Any]:
    """IPAM of the node's own."""
    return {"type": "host-local", "subnet": subnet}


def two_networks(node: RealNode) -> None:
    """`blue`, of a bridge, and `green`, of macvlan."""
    bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": True, "ipMasq": True}
    network(node, "blue", {**bridge, "ipam": host_local("10.91.0.0/24")})
    network(
        node, "green", {"type": "macvlan", "master": "eth0", "ipam": host_local("10.92.0.0/24")}, {"type": "tuning"}
    )


def status(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the network status in the annotation of a pod."""
    found: list[dict[str, Any]] = json.loads(pod["metadata"].get("annotations", {}).get(_STATUS, "[]"))
    return found


def addresses(node: RealNode) -> list[str]:
    """`NETWORK/ADDRESS` of all that host-local has given away."""
    return [
        name for name in node.files(_ADDRESSES) if not name.endswith("/lock") and "/last_reserved" not in name
    ]  # fmt: skip


def leftovers(node: RealNode) -> list[str]:
    """Files about attachments, addresses, links of pods, rules for them."""
    files = [f"{STORE}/{name}" for name in node.files(STORE) if not name.startswith("networks/")]
    links = sorted(set(node.links()) - {*LINKS, BRIDGE})
    rules = [line for line in node.machine.run("iptables-save").splitlines() if "10.91." in line or "10.88." in line]
    results = node.files("/var/lib/cni/results")
    return files + addresses(node) + links + rules + results


def wait_clean(node: RealNode, timeout: float = 60) -> None:
    """Wait until nothing is left of any pod."""
    deadline = time.monotonic() + timeout
    while left := leftovers(node):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def failures(node: RealNode, namespace: str = "default") -> list[str]:
    """The Events about sandboxes that could not be started or ended.

    That only the workload's own container could not be killed (containerd's shim of it may end at that very moment,
    `ttrpc: closed`) has nothing to do with networks.
    """
    found = node.server.request("GET", f"/api/v1/namespaces/{namespace}/events")["items"]
    told = [f"{item['reason']} {item['message']}" for item in found if item["reason"] in _FAILURES]
    return [text for text in told if 'failed to "KillContainer"' not in text or "KillPodSandbox" in text]


def forget_events(node: RealNode, namespace: str = "default") -> None:
    """Delete the Events of a namespace, those of earlier tests."""
    node.server.request("DELETE", f"/api/v1/namespaces/{namespace}/events")
