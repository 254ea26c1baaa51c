"""Our own CNI network configuration (`00-multus.conf`) as values, with keys and defaults of upstream's `NetConf`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import DecodingFailureError, InvalidNetworkConfigError

_VALID_ATTACHMENTS: Final = ("cni.dev/valid-attachments", "cni.dev/attachments")


@dataclass(frozen=True, slots=True)
class NetConf:
    """The networks of every pod, and the requests that pods may make."""

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
    """Maximum host ports of one pod, from the runtime and its annotations; the reference `portmap` takes 5 s for 128,
    11 s for 256, 87 s for 1000."""
    max_requested_addresses: ClassVar[int] = 256
    """Maximum addresses that a pod may request on one network."""
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


def load(stdin: bytes, overlay: Mapping[str, Any]) -> NetConf:
    """Read the configuration of one request; keys of `overlay` override it, as in upstream.

    Raises DecodingFailureError (6) and InvalidNetworkConfigError (7).
    """
    defaults = NetConf(name="", cni_version="")
    try:
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
    except gojson.JsonError as error:
        raise DecodingFailureError(f"Multus CNI configuration: {error}") from error


def _attachment(item: Mapping[str, Any]) -> tuple[str, str]:
    return gojson.get_str(item, "containerID") or "", gojson.get_str(item, "ifname") or ""


def _delegate(index: int, raw: bytes) -> NetworkConfig:
    try:
        return conf.parse(raw)
    except (DecodingFailureError, InvalidNetworkConfigError) as error:
        raise error.with_context(f"delegates[{index}] of the Multus CNI configuration") from error
