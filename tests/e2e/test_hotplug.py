"""`/delegate` as multus-dynamic-networks-controller calls it: a network for a pod that runs already."""

from __future__ import annotations

import base64
import http.client
import json
import socket
from typing import Any

from tests.e2e.node import Node, ping


def post(node: Node, verb: str, netns: str, ifname: str, config: dict[str, Any], **attributes: Any) -> tuple[int, Any]:
    """The controller's request, byte for byte what its specification says; status and decoded body."""
    env = {
        "CNI_ARGS": "K8S_POD_NAMESPACE=default;K8S_POD_NAME=hello;K8S_POD_UID=uid-hello",
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": "c1",
        "CNI_IFNAME": ifname,
        "CNI_NETNS": netns,
    }
    body: dict[str, Any] = {"env": env, "config": base64.b64encode(json.dumps(config).encode()).decode()}
    if attributes:
        body["interfaceAttributes"] = {"cni-args": None, **attributes}
    connection = http.client.HTTPConnection("dummy", timeout=30)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(30)
    connection.sock.connect(str(node.socket))
    try:
        connection.request("POST", "/delegate", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        data = answer.read()
        return answer.status, json.loads(data) if data else None
    finally:
        connection.close()


def network(node: Node, subnet: str = "10.87.0.0/24", version: str = "0.4.0") -> dict[str, Any]:
    ipam = {"type": "host-local", "subnet": subnet, "dataDir": str(node.networks_dir)}
    return {"cniVersion": version, "name": "plugged", "type": "ptp", "ipam": ipam}


def test_a_running_pod_gets_and_loses_a_network(node: Node) -> None:
    node.pod("hello")
    node.start()
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "hello").code == 0
    held = node.leftovers()

    status, body = post(node, "ADD", netns, "net5", network(node))
    assert status == 200, body
    assert body["Result"]["cniVersion"] == "1.1.0"
    assert [item["name"] for item in body["Result"]["interfaces"] if "sandbox" in item] == ["net5"]
    assert ping(netns, "10.87.0.1", "net5")
    assert post(node, "CHECK", netns, "net5", network(node)) == (200, None)
    assert post(node, "DEL", netns, "net5", network(node)) == (200, None)
    assert set(node.links(netns)) == {"lo", "eth0"}
    assert node.leftovers() == held
    assert post(node, "DEL", netns, "net5", network(node)) == (200, None), "DEL can be repeated"


def test_the_pods_own_del_takes_what_was_plugged_in_also_after_a_crash(node: Node) -> None:
    node.pod("hello")
    node.start()
    before = node.links()
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "hello").code == 0
    assert post(node, "ADD", netns, "net5", network(node))[0] == 200
    node.kill()
    node.start()
    assert node.cni("CHECK", "c1", netns, "hello").code == 0
    assert node.cni("DEL", "c1", netns, "hello").code == 0
    assert (node.links(netns), node.links()) == (["lo"], before)
    assert node.leftovers() == []


def test_a_network_that_fails_is_undone_and_the_pod_keeps_the_others(node: Node) -> None:
    node.pod("hello")
    node.start()
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "hello").code == 0
    held = node.leftovers()
    status, body = post(node, "ADD", netns, "eth0", network(node))
    assert (status, body["code"]) == (400, 7)
    assert "eth0" in body["msg"]
    status, body = post(node, "ADD", netns, "net5", {**network(node), "type": "no-such-plugin"})
    assert status == 400
    assert "no-such-plugin" in body["msg"]
    assert set(node.links(netns)) == {"lo", "eth0"}
    assert node.leftovers() == held
    assert node.cni("CHECK", "c1", netns, "hello").code == 0
