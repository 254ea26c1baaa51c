"""The node's CNI configuration, `00-multus.conf`: what makes the runtime call the shim for every pod.

Form: upstream's (v4.3.0), byte for byte: one plugin object, compact, keys in upstream's order, what is empty left out.
A key that was set to its default counts as set.
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
"""That of upstream's manifest, for a primary network without one."""

PLACEHOLDER: Final = (
    b'{"cniVersion":"' + FALLBACK_VERSION.encode() + b'","name":"' + NETWORK_NAME.encode() + b'",'
    b'"waitsFor":"the configuration of the cluster network"}'
)
"""What keeps the place of `00-multus.conf` on a node that has no configuration yet.

Without a `type` it is no configuration: containerd, which looks at the first file only (go-cni, `loadFromConfDir`),
says that there is no network, also when the cluster network's file has come and ours is about to be written. CRI-O,
cri-dockerd and those who add to the first configuration pass it over.
"""

_KEYS: Final = (
    *("binDir", "capabilities", "cniVersion", "logFile", "logLevel", "logToStderr", "logOptions", "name"),
    *("clusterNetwork", "namespaceIsolation", "globalNamespaces", "type", "cniDir", "auxiliaryCNIChainName"),
    *("daemonSocketDir", "overrideNetworkName"),
)
_LOG_OPTIONS: Final = ("maxAge", "maxSize", "maxBackups", "compress")


def generate(given: Mapping[str, Any], primary: NetworkConfig, path: str) -> bytes:
    """The configuration for the primary network in the file `path`, as the daemon sees it.

    `given`: the keys that the daemon's configuration sets. Capabilities are those of `given` and all that some plugin
    of `primary` declares as true. Raises IncompatibleVersionError (1) for a `cniVersion` that there is not.
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
    """The version that the runtime is to call with: `wanted`, else the primary network's.

    The two need not fit: every delegate is called with its own, and results are converted. A primary of a version
    that the libraries do not have gets the newest that they have; one without any, the fallback. Raises
    IncompatibleVersionError for such a `wanted`.
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
