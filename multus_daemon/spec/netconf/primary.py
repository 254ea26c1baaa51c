"""Rules for electing the CNI configuration of the node's primary network, unless it is configured.

The directory is shared: other container engines write their networks there, and plugins that only complete a network
leave files until the network comes. Upstream takes the lexically first file.
"""

from __future__ import annotations

from typing import Final

from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.conf import NetworkConfig

SUFFIXES: Final = (".conf", ".conflist")
"""Suffixes of upstream. A `.json` is used only if it is configured."""
OWN_PREFIX: Final = "00-multus"

OWN_TYPES: Final = frozenset({"multus", "multus-cni", "multus-shim"})
"""Plugin types that are Multus itself; calling one would never end."""
# Prefixes of files that packages of other engines install on any node before the cluster's network comes.
_FILES_OF_ENGINES: Final = {
    "87-podman": "podman's default network",
    "cni-podman": "a network of podman",
    "nerdctl-": "a network of nerdctl",
    "10-crio-bridge": "CRI-O's default network",
    "11-crio-ipv4-bridge": "CRI-O's default network",
    "100-crio-bridge": "CRI-O's default network",
    "99-loopback": "the loopback of CRI-O's package",
    "200-loopback": "the loopback of CRI-O's package",
}
_NETWORKS_OF_ENGINES: Final = {
    "podman": "podman's default network",
    "crio": "CRI-O's default network",
    "crio-bridge": "CRI-O's default network",
}
# They modify the results of other plugins; istio-cni and linkerd-cni write files of their own until there is a list.
_MAKE_NO_INTERFACE: Final = frozenset(
    {"bandwidth", "firewall", "istio-cni", "linkerd-cni", "loopback", "passthru", "portmap", "sbr", "tuning", "vrf"}
)


def name_problem(file_name: str) -> str:
    """Return the reason why a file of this name is not elected; empty if it may be."""
    if file_name.startswith("."):
        return "hidden"
    if not file_name.endswith(SUFFIXES):
        return f"ends in neither {' nor '.join(SUFFIXES)}"
    if file_name.startswith(OWN_PREFIX):
        return "a configuration of Multus"
    return next((owner for prefix, owner in _FILES_OF_ENGINES.items() if file_name.startswith(prefix)), "")


def own_problem(config: NetworkConfig, plugin_type: str) -> str:
    """Return the reason why a configured file can't be the primary network: it calls Multus; empty if it can.

    `plugin_type`: the type of the shim on this node.
    """
    for plugin in config.plugins:
        if plugin.type in OWN_TYPES or plugin.type == plugin_type:
            return f"a configuration of Multus (type {plugin.type})"
    return ""


def content_problem(config: NetworkConfig, plugin_type: str) -> str:
    """Return the reason why a file with this content is not elected; empty if it may be."""
    if problem := own_problem(config, plugin_type):
        return problem
    if config.type in _MAKE_NO_INTERFACE:
        return f"its first plugin, {config.type}, makes no interface"
    if "nerdctlID" in gojson.loads_object(config.raw):
        return "a network of nerdctl"
    bridge = gojson.get(config.plugins[0].fields, "bridge")
    if isinstance(bridge, str) and bridge.startswith("cni-podman"):
        return "a network of podman"
    return _NETWORKS_OF_ENGINES.get(config.name, "")
