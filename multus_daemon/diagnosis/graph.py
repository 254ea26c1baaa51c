"""Show pods and networks as a tree, below the bridges and masters of the node.

{"schema": "multusctl.graph/v1", "parents": [
  {"name": "cni0" or "" for routed networks, "networks": [
    {"name": "default/blue", "plugin": "bridge", "interfaces": [
      {"pod": "default/web", "container": …, "interface": "net1", "addresses": ["10.1.0.2/24"],
       "hostInterfaces": ["veth1234"]}]}]}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def of(attachments: Mapping[str, Any]) -> dict[str, Any]:
    """Build the tree from the answer of `diagnosis.attachments`."""
    parents: dict[str, dict[str, dict[str, Any]]] = {}
    for container in attachments["containers"]:
        for item in container["attachments"]:
            networks = parents.setdefault(item["parent"], {})
            plugin = item["plugins"][0]["type"] if item["plugins"] else ""
            network = networks.setdefault(item["network"], {"plugin": plugin, "interfaces": []})
            network["interfaces"].append(
                {
                    "pod": container["pod"],
                    "container": container["container"],
                    "interface": item["interface"],
                    "addresses": item["addresses"],
                    "hostInterfaces": [name for name in item["hostInterfaces"] if name != item["parent"]],
                }
            )
    return {
        "schema": "multusctl.graph/v1",
        "parents": [
            {"name": name, "networks": [{"name": network, **networks[network]} for network in sorted(networks)]}
            for name, networks in sorted(parents.items())
        ],
    }
