"""Our own CNI network configuration: what the runtime hands to the shim (`00-multus.conf`), as values.

Keys and defaults: upstream's `NetConf`, with the daemon's keys laid over those of the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from multus_daemon.spec.cni.conf import NetworkConfig


@dataclass(frozen=True, slots=True)
class NetConf:
    """Which networks every pod gets and what pods may ask for."""

    name: str
    cni_version: str
    cluster_network: str = ""
    """A name or a path; where it is empty, the first of `delegates` is the cluster network."""
    delegates: tuple[NetworkConfig, ...] = ()
    default_networks: tuple[str, ...] = ()
    system_namespaces: tuple[str, ...] = ("kube-system",)
    multus_namespace: str = "kube-system"
    namespace_isolation: bool = False
    global_namespaces: frozenset[str] = frozenset({"default"})
    conf_dir: str = "/etc/cni/multus/net.d"
    auxiliary_chain: str = ""
    """Name of the auxiliary chain; empty: there is none."""
    force_cni_version: bool = False
    """The cluster network is called with `cni_version`, whatever its configuration says."""
    strict_requests: bool = False
    """A request that no plugin of its network can take is an error."""
    strict_check: bool = False
    """A plugin whose CHECK fails fails the CHECK of the pod, also where nothing is missing."""
    max_port_mappings: ClassVar[int] = 128
    """Ports of the host that one pod may ask for, the runtime's and those of its annotations together.

    The reference `portmap` takes 5 s for 128, 11 s for 256, 87 s for 1000.
    """
    max_requested_addresses: ClassVar[int] = 256
    """Addresses that a pod may ask for on one network."""
    runtime_config: Mapping[str, Any] = field(default_factory=dict)
    """Capability arguments of the runtime; they go to the cluster network only (NPWG SPEC 7.5)."""
    valid_attachments: tuple[tuple[str, str], ...] | None = None
    """GC: (container id, interface name) of what the runtime still knows; None where it did not say."""

    def allows(self, pod_namespace: str, network_namespace: str) -> bool:
        """Whether a pod of `pod_namespace` may use a network of `network_namespace`."""
        return (
            not self.namespace_isolation
            or network_namespace == pod_namespace
            or network_namespace in self.global_namespaces
        )
