"""`/delegate` as multus-dynamic-networks-controller calls it."""

from __future__ import annotations

import base64
import http.client
import json
import socket
from typing import Any

from tests.e2e.node import Node


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
