"""Our own CNI network configuration, `00-multus.conf`: keys and defaults are those of upstream's `NetConf`.

`load` reads it, and `generate` makes it from the primary configuration. The directory of the primary configuration is
shared: other container engines write their networks there, and some plugins put files there before the cluster network
does. Upstream takes the first file by name; `name_problem` and `content_problem` leave out such files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from multus_daemon.spec.cni import conf, gojson, versions
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import (
    DecodingFailureError,
    IncompatibleVersionError,
    InvalidNetworkConfigError,
    Origin,
)

SUFFIXES: Final = (".conf", ".conflist")
"""Suffixes that upstream looks for. A `.json` file is used only if the settings name it."""
OWN_PREFIX: Final = "00-multus"

OWN_TYPES: Final = frozenset({"multus", "multus-cni", "multus-shim"})
"""Plugin types that are Multus itself: if it called one of them, the calls would never end."""
# Prefixes of files that packages of other engines install on any node before the cluster's network comes.
_FILES_OF_ENGINES: Final = {
    "87-podman": "podman's default network",
    "cni-podman": "a network of podman",
    "nerdctl-": "a network of nerdctl",
    **dict.fromkeys(("10-crio-bridge", "11-crio-ipv4-bridge", "100-crio-bridge"), "CRI-O's default network"),
    **dict.fromkeys(("99-loopback", "200-loopback"), "the loopback of CRI-O's package"),
}
_NETWORKS_OF_ENGINES: Final = {
    "podman": "podman's default network",
    **dict.fromkeys(("crio", "crio-bridge"), "CRI-O's default network"),
}
# They modify the results of other plugins; istio-cni and linkerd-cni write files of their own until there is a list.
_MAKE_NO_INTERFACE: Final = frozenset(
    {"bandwidth", "firewall", "istio-cni", "linkerd-cni", "loopback", "passthru", "portmap", "sbr", "tuning", "vrf"}
)

FILE_NAME: Final = "00-multus.conf"
NETWORK_NAME: Final = "multus-cni-network"
PLUGIN_TYPE: Final = "multus-shim"
FALLBACK_VERSION: Final = "0.3.1"
"""CNI version of `00-multus.conf` if the primary configuration has none; as in upstream's manifest."""

PLACEHOLDER: Final = (
    b'{"cniVersion":"' + FALLBACK_VERSION.encode() + b'","name":"' + NETWORK_NAME.encode() + b'",'
    b'"waitsFor":"the configuration of the cluster network"}'
)
"""Content of `00-multus.conf` while the node has no primary configuration.

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


# --- the configuration of a request ----------------------------------------------------------------------------------

_VALID_ATTACHMENTS: Final = ("cni.dev/valid-attachments", "cni.dev/attachments")


@dataclass(frozen=True, slots=True)
class NetConf:
    """A request's configuration of Multus: the networks of every pod, and what pods may ask for."""

    name: str
    cni_version: str
    cluster_network: str = ""
    """A name or a path; if empty, the first of `delegates` is the cluster network."""
    delegates: tuple[NetworkConfig, ...] = ()
    default_networks: tuple[str, ...] = ()
    system_namespaces: tuple[str, ...] = ("kube-system",)
    multus_namespace: str = "kube-system"
    namespace_isolation: bool = False
    global_namespaces: frozenset[str] = frozenset({"default"})
    conf_dir: str = "/etc/cni/multus/net.d"
    auxiliary_chain: str = ""
    """Name of the auxiliary chain; empty: none."""
    force_cni_version: bool = False
    """True: call the cluster network with `cni_version`, whatever its configuration says."""
    strict_requests: bool = False
    """True: a request that no plugin of its network supports is an error."""
    strict_check: bool = False
    """True: a failed CHECK of a plugin fails the CHECK of the pod, even if nothing is missing."""
    max_port_mappings: ClassVar[int] = 128
    """Maximum number of host ports of one pod, by the runtime and by annotations. The reference plugin `portmap` takes
    5 s for 128, 11 s for 256, 87 s for 1000.
    """
    max_requested_addresses: ClassVar[int] = 256
    """Maximum number of addresses that a pod may request on one network."""
    runtime_config: Mapping[str, Any] = field(default_factory=dict)
    """Capability arguments of the runtime; they go to the cluster network only (NPWG SPEC 7.5)."""
    valid_attachments: tuple[tuple[str, str], ...] | None = None
    """GC: (container id, interface name) of the runtime's attachments; None if it gave no list."""

    def allows(self, pod_namespace: str, network_namespace: str) -> bool:
        """Return True if a pod of `pod_namespace` may use a network of `network_namespace`."""
        return (
            not self.namespace_isolation
            or network_namespace == pod_namespace
            or network_namespace in self.global_namespaces
        )


@conf.reads("Multus CNI configuration", Origin.SETTINGS)
def load(stdin: bytes, overlay: Mapping[str, Any]) -> NetConf:
    """Read the configuration of one request. `overlay`: keys of the settings that replace its keys, as upstream's do.

    Raises DecodingFailureError (6) and InvalidNetworkConfigError (7).
    """
    defaults = NetConf(name="", cni_version="")
    fields = gojson.with_keys(gojson.loads_object(stdin), overlay)
    cluster_network = gojson.get_str(fields, "clusterNetwork") or ""
    delegates = (None if cluster_network else gojson.get_objects(fields, "delegates")) or ()
    namespaces = gojson.get_str(fields, "globalNamespaces") or "default"
    system_namespaces = gojson.get_strings(fields, "systemNamespaces")
    # Both names of the key (CNI SPEC 1.1.0 before and after the tag), the newer one first.
    lists = (gojson.get_objects(fields, key) for key in _VALID_ATTACHMENTS)
    valid = next((found for found in lists if found is not None), None)
    if valid is None and any(key.lower() in _VALID_ATTACHMENTS for key in fields):
        # libcni writes an empty list as null (`GCNetworkList` with a nil slice).
        valid = []
    return NetConf(
        name=gojson.get_str(fields, "name") or "",
        cni_version=gojson.get_str(fields, "cniVersion") or "",
        cluster_network=cluster_network,
        default_networks=tuple(gojson.get_strings(fields, "defaultNetworks") or ()),
        system_namespaces=defaults.system_namespaces if system_namespaces is None else tuple(system_namespaces),
        multus_namespace=gojson.get_str(fields, "multusNamespace") or defaults.multus_namespace,
        namespace_isolation=gojson.get_bool(fields, "namespaceIsolation") or False,
        global_namespaces=frozenset(name.strip() for name in namespaces.split(",") if name.strip()),
        conf_dir=gojson.get_str(fields, "confDir") or defaults.conf_dir,
        auxiliary_chain=gojson.get_str(fields, "auxiliaryCNIChainName") or "",
        force_cni_version=gojson.get_bool(fields, "forceCNIVersion") or False,
        strict_requests=gojson.get_bool(fields, "strictRequests") or False,
        strict_check=gojson.get_bool(fields, "strictCheck") or False,
        runtime_config=gojson.get_object(fields, "runtimeConfig") or {},
        valid_attachments=None if valid is None else tuple(_attachment(item) for item in valid),
        delegates=tuple(_delegate(index, gojson.dumps(item)) for index, item in enumerate(delegates)),
    )


def _attachment(item: Mapping[str, Any]) -> tuple[str, str]:
    return gojson.get_str(item, "containerID") or "", gojson.get_str(item, "ifname") or ""


def _delegate(index: int, raw: bytes) -> NetworkConfig:
    try:
        return conf.parse(raw)
    except (DecodingFailureError, InvalidNetworkConfigError) as error:
        raise error.with_context(f"delegates[{index}] of the Multus CNI configuration") from error


# --- election --------------------------------------------------------------------------------------------------------


def name_problem(file_name: str) -> str:
    """Return why a file of this name can't be elected as the primary configuration; empty if it can."""
    if file_name.startswith("."):
        return "hidden"
    if not file_name.endswith(SUFFIXES):
        return f"ends in neither {' nor '.join(SUFFIXES)}"
    if file_name.startswith(OWN_PREFIX):
        return "a configuration of Multus"
    return next((owner for prefix, owner in _FILES_OF_ENGINES.items() if file_name.startswith(prefix)), "")


def own_problem(config: NetworkConfig, plugin_type: str) -> str:
    """Return why a file that the settings name can't be the primary configuration: it calls Multus. Empty if it can.

    `plugin_type`: the type of the shim on this node.
    """
    for plugin in config.plugins:
        if plugin.type in OWN_TYPES or plugin.type == plugin_type:
            return f"a configuration of Multus (type {plugin.type})"
    return ""


def content_problem(config: NetworkConfig, plugin_type: str) -> str:
    """Return why a file with this content can't be elected as the primary configuration; empty if it can."""
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
    `given`: the keys that the daemon's configuration file has, even with their default values. Capabilities are those
    of `given` and of the plugins of `primary`. Raises IncompatibleVersionError (1) for an unknown `cniVersion`.
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
    """Return the CNI version of `00-multus.conf`, with which the runtime calls Multus: `wanted`, else `primary`.

    Each delegate is called with its own version, and results are converted. An unknown newer `primary` gives the newest
    supported version, an empty one `FALLBACK_VERSION`. Raises IncompatibleVersionError for an unknown `wanted`.
    """
    if wanted:
        if not versions.is_supported(wanted):
            raise IncompatibleVersionError(
                f"cniVersion {wanted!r} is not supported",
                f"use one of {', '.join(versions.SUPPORTED)}",
                origin=Origin.SETTINGS,
            )
        return wanted
    if not primary:
        return FALLBACK_VERSION
    if versions.is_supported(primary):
        return primary
    return versions.CURRENT if versions.parse(primary) > versions.parse(versions.CURRENT) else FALLBACK_VERSION
