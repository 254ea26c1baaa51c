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
    """A named network: `config` is the text of a CNI configuration; empty means a file on the node."""

    namespace: str
    name: str
    config: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def resource_name(self) -> str:
        """The device plugin resource that a pod needs for the network; empty if none."""
        return self.annotations.get(RESOURCE_NAME_ANNOTATION, "")

    @property
    def network(self) -> NetworkConfig | None:
        """The parsed `config`; None if it is empty. Raises as `conf.parse` does."""
        if not self.config.strip():
            return None
        # The parser refuses half a surrogate pair, which JSON allows.
        return conf.parse_written(self.config.encode("utf-8", "surrogatepass"), default_name=self.name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"
