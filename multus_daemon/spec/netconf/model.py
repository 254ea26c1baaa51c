"""Our own CNI network configuration (`00-multus.conf`) as values, with keys and defaults of upstream's `NetConf`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from multus_daemon.spec.cni.conf import NetworkConfig


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
