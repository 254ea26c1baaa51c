"""The CNI configurations of a node: which one is the primary network, and `00-multus.conf`, which calls the shim.

The directory is shared: other container engines write their networks there, and plugins that only complete a network
leave files until the network comes. Upstream takes the lexically first file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from multus_daemon.spec.cni import gojson, versions
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import IncompatibleVersionError

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

FILE_NAME: Final = "00-multus.conf"
NETWORK_NAME: Final = "multus-cni-network"
PLUGIN_TYPE: Final = "multus-shim"
FALLBACK_VERSION: Final = "0.3.1"
"""Version for a primary network without one; as in upstream's manifest."""

PLACEHOLDER: Final = (
    b'{"cniVersion":"' + FALLBACK_VERSION.encode() + b'","name":"' + NETWORK_NAME.encode() + b'",'
    b'"waitsFor":"the configuration of the cluster network"}'
)
"""Placeholder of `00-multus.conf` on a node without a configuration.

Without a `type` it is invalid: containerd, which reads the first file only (go-cni, `loadFromConfDir`), reports that
there is no network, also after the cluster network's file exists and before ours is written. CRI-O, cri-dockerd and
programs that add to the first configuration ignore it.
"""

_KEYS: Final = (
    *("binDir", "capabilities", "cniVersion", "logFile", "logLevel", "logToStderr", "logOptions", "name"),
    *("clusterNetwork", "namespaceIsolation", "globalNamespaces", "type", "cniDir", "auxiliaryCNIChainName"),
    *("daemonSocketDir", "overrideNetworkName"),
)
_LOG_OPTIONS: Final = ("maxAge", "maxSize", "maxBackups", "compress")


# --- election --------------------------------------------------------------------------------------------------------


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


# --- 00-multus.conf --------------------------------------------------------------------------------------------------


def generate(given: Mapping[str, Any], primary: NetworkConfig, path: str) -> bytes:
    """Return `00-multus.conf` for the primary network in the file `path`, as the daemon sees it.

    The bytes are upstream's (v4.3.0): one compact plugin object, keys in upstream's order, empty values omitted.
    `given`: the keys that the daemon's configuration sets, also to their default. Capabilities are those of `given` and
    of the plugins of `primary`. Raises IncompatibleVersionError (1) for an unknown `cniVersion`.
    """
    capabilities = {**(given.get("capabilities") or {}), **dict.fromkeys(primary.capabilities, True)}
    options = given.get("logOptions") or {}
    values = {
        **given,
        "capabilities": dict(sorted(capabilities.items())),
        "cniVersion": choose_version(given.get("cniVersion") or "", primary.cni_version),
        "name": primary.name if given.get("overrideNetworkName") else NETWORK_NAME,
        "clusterNetwork": path,
        "type": given.get("type") or PLUGIN_TYPE,
        "logOptions": {key: options[key] for key in _LOG_OPTIONS if key in options},
    }
    return gojson.dumps({key: values[key] for key in _KEYS if values.get(key)}, sort_keys=False)


def choose_version(wanted: str, primary: str) -> str:
    """Return the version of the runtime's calls: `wanted`, else the primary network's.

    They may differ, as every delegate is called with its own version and results are converted. A primary network with
    an unknown newer version gets the newest known one, without a version the fallback. Raises IncompatibleVersionError
    for an unknown `wanted`.
    """
    if wanted:
        if not versions.is_supported(wanted):
            raise IncompatibleVersionError(
                f"cniVersion {wanted!r} is not known", f"one of {', '.join(versions.SUPPORTED)} is needed"
            )
        return wanted
    if not primary:
        return FALLBACK_VERSION
    if versions.is_supported(primary):
        return primary
    return versions.CURRENT if versions.parse(primary) > versions.parse(versions.CURRENT) else FALLBACK_VERSION
