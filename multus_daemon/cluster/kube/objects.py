"""Pods, NetworkAttachmentDefinitions and taints as the API sends them. Only the needed fields are decoded and kept."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote

import msgspec

from multus_daemon.spec.attachment import ExtendedClaim, Pod, PodCondition
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.selection import NETWORKS_READY, NetworkAttachmentDefinition

T = TypeVar("T")

Key = tuple[str, str]  # namespace and name
DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions that msgspec raises for malformed input."""
PAGE_SIZE: Final = 500
"""Objects in one answer to a list."""
# Repeats the whole object and is not kept.
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
# In the image's name, whatever the registry; OpenShift's images have no names, and its pods are those of the DaemonSet.
_HOTPLUG_IMAGE: Final = "multus-dynamic-networks-controller"
_HOTPLUG_PODS: Final = "dynamic-networks-controller-ds-"
API: Final = f"/apis/{selection.GROUP}/{selection.VERSION}"


class Metadata(msgspec.Struct, rename="camel"):
    """meta/v1 ObjectMeta and ListMeta."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None
    continue_: str = msgspec.field(default="", name="continue")

    def kept_annotations(self) -> dict[str, str]:
        """Return the annotations without kubectl's last-applied one. Their names are interned."""
        annotations = self.annotations or {}
        return {sys.intern(key): value for key, value in annotations.items() if key != _LAST_APPLIED}


class Page(msgspec.Struct):
    """A list or one page of it. Don't keep the items: they refer to the bytes of the whole answer."""

    metadata: Metadata
    items: list[msgspec.Raw] | None = None


class WatchEvent(msgspec.Struct):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class Versioned(msgspec.Struct):
    """The metadata of any object."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)


class _Claim(msgspec.Struct, rename="camel"):
    """core/v1 PodResourceClaim, or PodResourceClaimStatus for a claim made from a template."""

    name: str
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None


class _ExtendedRequest(msgspec.Struct, rename="camel"):
    resource_name: str
    request_name: str


class _ExtendedClaim(msgspec.Struct, rename="camel"):
    """core/v1 PodExtendedResourceClaimStatus."""

    resource_claim_name: str
    request_mappings: list[_ExtendedRequest] | None = None


class _Resources(msgspec.Struct):
    limits: dict[str, msgspec.Raw] | None = None


class _Container(msgspec.Struct):
    image: str = ""
    resources: _Resources | None = None

    def asks_for_extended_resources(self) -> bool:
        """Return True if it has a limit for an extended resource; Kubernetes requires a limit for each."""
        limits = (self.resources and self.resources.limits) or {}
        return any("/" in name and "kubernetes.io/" not in name for name in limits)


class _Condition(msgspec.Struct, rename="camel"):
    type: str = ""
    status: str = ""
    reason: str | None = None
    message: str | None = None
    last_transition_time: str | None = None


class _PodSpec(msgspec.Struct, rename="camel"):
    host_network: bool = False
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    volumes: list[dict[str, msgspec.Raw]] | None = None
    resource_claims: list[_Claim] | None = None


class _PodStatus(msgspec.Struct, rename="camel"):
    phase: str = ""
    conditions: list[_Condition] | None = None
    resource_claim_statuses: list[_Claim] | None = None
    extended_resource_claim_status: _ExtendedClaim | None = None

    def extended_claim(self) -> ExtendedClaim | None:
        """Return the claim of the pod's extended resources."""
        if (claim := self.extended_resource_claim_status) is None:
            return None
        requests = ((item.request_name, sys.intern(item.resource_name)) for item in claim.request_mappings or ())
        return ExtendedClaim(claim.resource_claim_name, tuple(requests))


class _Pod(msgspec.Struct):
    metadata: Metadata
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)

    def claims(self) -> dict[str, tuple[str, ...]]:
        """Return the names of ResourceClaims by their name in the pod's spec and by their template's name."""
        declared = self.spec.resource_claims or ()
        claims = [*declared, *(self.status.resource_claim_statuses or ())]
        own = {claim.name: (claim.resource_claim_name,) for claim in claims if claim.resource_claim_name}
        by_template: dict[str, tuple[str, ...]] = {}
        for claim in declared:
            if (template := claim.resource_claim_template_name) and claim.name in own:
                by_template[template] = (*by_template.get(template, ()), *own[claim.name])
        return by_template | own

    def asks_for_extended_resources(self) -> bool:
        """Return True if a container asks for an extended resource, which a device plugin may serve."""
        containers = [*(self.spec.containers or ()), *(self.spec.init_containers or ())]
        return any(container.asks_for_extended_resources() for container in containers)

    def is_hotplug_controller(self) -> bool:
        """Return whether it is a pod of multus-dynamic-networks-controller that is not being deleted."""
        images = (container.image for container in self.spec.containers or ())
        if not self.metadata.name.startswith(_HOTPLUG_PODS) and not any(_HOTPLUG_IMAGE in image for image in images):
            return False
        # It needs the sockets of the runtime and of Multus. The Pod Security Standards forbid them to tenants, who
        # could otherwise stop the node's hot-plug with a name.
        has_sockets = any("hostPath" in volume for volume in self.spec.volumes or ())
        return has_sockets and self.metadata.deletion_timestamp is None

    def networks_ready(self) -> PodCondition | None:
        """Return the condition `multus.io/NetworksReady`, which an earlier daemon may have written."""
        for item in self.status.conditions or ():
            if item.type == NETWORKS_READY:
                reason, since = sys.intern(item.reason or ""), item.last_transition_time or ""
                return PodCondition(item.status == "True", reason, item.message or "", since)
        return None


class _NetworkSpec(msgspec.Struct):
    config: str | None = None


class _Network(msgspec.Struct):
    metadata: Metadata
    spec: _NetworkSpec | None = None


class _NodeSpec(msgspec.Struct):
    taints: list[dict[str, Any]] | None = None


class _Node(msgspec.Struct):
    spec: _NodeSpec


decode_page: Final = msgspec.json.Decoder(Page).decode
decode_event: Final = msgspec.json.Decoder(WatchEvent).decode
decode_versioned: Final = msgspec.json.Decoder(Versioned).decode
_decode_pod: Final = msgspec.json.Decoder(_Pod).decode
_decode_network: Final = msgspec.json.Decoder(_Network).decode
_decode_node: Final = msgspec.json.Decoder(_Node).decode


@dataclass(frozen=True, slots=True)
class Item(Generic[T]):
    """One object and its resourceVersion."""

    key: Key
    version: str
    value: T


@dataclass(frozen=True, slots=True)
class Resource(Generic[T]):
    """A kind of object that is listed and watched."""

    name: str  # for messages, gates and metrics
    path: str
    decode: Callable[[bytes | msgspec.Raw], Item[T]]  # raises one of DECODE_ERRORS
    uid: Callable[[T], str] = lambda _: ""
    """Returns a UID that distinguishes objects of the same name; empty if that is not needed."""
    query: Mapping[str, str] = field(default_factory=dict)
    page_size: int = PAGE_SIZE
    first_version: str = ""
    """resourceVersion of the first list: `0` reads the API server's memory; empty reads the newest state, in pages."""


def decode_pod(data: bytes | msgspec.Raw) -> Item[Pod]:
    """Decode a core/v1 Pod. Raises one of `DECODE_ERRORS`."""
    item = _decode_pod(data)
    meta = item.metadata
    pod = Pod(
        Namespace(sys.intern(meta.namespace)),
        PodName(meta.name),
        PodUid(meta.uid),
        meta.kept_annotations(),
        item.spec.host_network,
        item.claims(),
        sys.intern(item.status.phase),
        item.is_hotplug_controller(),
        item.networks_ready(),
        item.status.extended_claim(),
        item.asks_for_extended_resources(),
    )
    return Item((pod.namespace, pod.name), meta.resource_version, pod)


def decode_network(data: bytes | msgspec.Raw) -> Item[NetworkAttachmentDefinition]:
    """Decode a k8s.cni.cncf.io/v1 NetworkAttachmentDefinition. Raises one of `DECODE_ERRORS`."""
    item = _decode_network(data)
    meta = item.metadata
    config = (item.spec.config if item.spec else None) or ""
    network = NetworkAttachmentDefinition(sys.intern(meta.namespace), meta.name, config, meta.kept_annotations())
    return Item((network.namespace, network.name), meta.resource_version, network)


def pods_of(node: str) -> Resource[Pod]:
    """Return the resource of the pods bound to `node`."""
    # The API server's memory has an index by node. From etcd, each node's list would read all pods of the cluster.
    query = {"fieldSelector": f"spec.nodeName={node}"}
    return Resource("pods", "/api/v1/pods", decode_pod, uid=lambda pod: pod.uid, query=query, first_version="0")


def networks() -> Resource[NetworkAttachmentDefinition]:
    """Return the resource of all NetworkAttachmentDefinitions, listed in pages: all are tens of megabytes."""
    return Resource("networks", f"{API}/{selection.PLURAL}", decode_network)


def pod_path(namespace: str, name: str) -> str:
    """Return the path of one pod."""
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"


def node_path(name: str) -> str:
    """Return the path of one node."""
    return f"/api/v1/nodes/{quote(name, safe='')}"


def taints_of(node: bytes) -> list[dict[str, Any]]:
    """Return the taints of a core/v1 Node. Raises one of `DECODE_ERRORS`."""
    return _decode_node(node).spec.taints or []
