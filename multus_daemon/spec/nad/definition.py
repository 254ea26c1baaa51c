"""NetworkAttachmentDefinition, the custom resource `k8s.cni.cncf.io/v1` (NPWG multi-network SPEC section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.conf import NetworkConfig

GROUP = "k8s.cni.cncf.io"
VERSION = "v1"
PLURAL = "network-attachment-definitions"
KIND = "NetworkAttachmentDefinition"
RESOURCE_NAME_ANNOTATION = "k8s.v1.cni.cncf.io/resourceName"


@dataclass(frozen=True, slots=True)
class NetworkAttachmentDefinition:
    """A named network: `spec.config` is the text of a CNI configuration; empty means one on the node's disk."""

    namespace: str
    name: str
    config: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def resource_name(self) -> str:
        """The device plugin resource that a pod must hold to use the network, else empty."""
        return self.annotations.get(RESOURCE_NAME_ANNOTATION, "")

    @property
    def network(self) -> NetworkConfig | None:
        """The network of `config`, None where that is empty. Raises as `conf.parse` does."""
        if not self.config.strip():
            return None
        # What JSON let in as half a surrogate pair is no text; the parser says so.
        return conf.parse_written(self.config.encode("utf-8", "surrogatepass"), default_name=self.name)

    def __str__(self) -> str:
        """`namespace/name`, as the status names it."""
        return f"{self.namespace}/{self.name}"
