"""Generate the node's CNI configuration, `00-multus.conf`, with which the runtime calls the shim for every pod.

The bytes are upstream's (v4.3.0): one compact plugin object, keys in upstream's order, empty values omitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from multus_daemon.spec.cni import gojson, versions
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import IncompatibleVersionError

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


def generate(given: Mapping[str, Any], primary: NetworkConfig, path: str) -> bytes:
    """Return the configuration for the primary network in the file `path`, as the daemon sees it.

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
