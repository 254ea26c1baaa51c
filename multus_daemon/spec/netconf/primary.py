"""Which CNI configuration can be that of the node's primary network, where nobody has named it.

Directories of CNI configurations are shared: other container engines put their own networks there, and plugins that
only complete a network leave theirs until the network comes. Upstream takes the lexically first file whatever it is.
"""

from __future__ import annotations

from typing import Final

from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.conf import NetworkConfig

SUFFIXES: Final = (".conf", ".conflist")
"""Upstream's. A `.json` is not elected: it has to be named."""
OWN_PREFIX: Final = "00-multus"

OWN_TYPES: Final = frozenset({"multus", "multus-cni", "multus-shim"})
"""Plugin types that are Multus itself: to call one for a network of ours would never end."""
# Files that packages install on any node, long before the cluster's network comes: taking one would give pods the
# network of another engine. By name, as each of them can be replaced by a file that tells nothing else.
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
# They work on what other plugins of a list have made; istio-cni and linkerd-cni as files of their own wait for a list.
_MAKE_NO_INTERFACE: Final = frozenset(
    {"bandwidth", "firewall", "istio-cni", "linkerd-cni", "loopback", "passthru", "portmap", "sbr", "tuning", "vrf"}
)


def name_problem(file_name: str) -> str:
    """Why a file of this name is not elected; empty if it may be."""
    if file_name.startswith("."):
        return "hidden"
    if not file_name.endswith(SUFFIXES):
        return f"ends in neither {' nor '.join(SUFFIXES)}"
    if file_name.startswith(OWN_PREFIX):
        return "a configuration of Multus"
    return next((owner for prefix, owner in _FILES_OF_ENGINES.items() if file_name.startswith(prefix)), "")


def own_problem(config: NetworkConfig, plugin_type: str) -> str:
    """Why this can't be the primary network even where it is named: it would lead back here. Empty if it can be.

    `plugin_type`: what the shim is called here.
    """
    for plugin in config.plugins:
        if plugin.type in OWN_TYPES or plugin.type == plugin_type:
            return f"a configuration of Multus (type {plugin.type})"
    return ""


def content_problem(config: NetworkConfig, plugin_type: str) -> str:
    """Why a file with this content is not elected; empty if it may be."""
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
