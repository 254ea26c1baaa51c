"""Pods and NetworkAttachmentDefinitions as the API sends them: only what is needed is decoded, nothing else is kept."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar
from urllib.parse import quote

import msgspec

from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad import definition
from multus_daemon.spec.nad.definition import NetworkAttachmentDefinition

T = TypeVar("T")

Key = tuple[str, str]
"""Namespace and name."""

DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what was expected."""

_NOT_KEPT: Final = frozenset({"kubectl.kubernetes.io/last-applied-configuration"})
"""Annotations that repeat the whole object, and that nothing here reads."""


class Metadata(msgspec.Struct, rename="camel"):
    """meta/v1 ObjectMeta."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    annotations: dict[str, str] | None = None

    def kept_annotations(self) -> dict[str, str]:
        """The annotations, each name one object for the whole process."""
        found = self.annotations or {}
        return {sys.intern(key): value for key, value in found.items() if key not in _NOT_KEPT}


class ListMetadata(msgspec.Struct, rename="camel"):
    """meta/v1 ListMeta."""

    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Page(msgspec.Struct):
    """A list, or a part of one. The items refer to the answer's bytes: not to be kept."""

    metadata: ListMetadata
    items: list[msgspec.Raw] | None = None


class WatchEvent(msgspec.Struct):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class Versioned(msgspec.Struct):
    """Of an object that is of no use otherwise."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)


class _Claim(msgspec.Struct, rename="camel"):
    """core/v1 PodResourceClaim, or PodResourceClaimStatus: there for claims that are made from a template."""

    name: str
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None


class _PodSpec(msgspec.Struct, rename="camel"):
    host_network: bool = False
    resource_claims: list[_Claim] | None = None


class _PodStatus(msgspec.Struct, rename="camel"):
    phase: str = ""
    resource_claim_statuses: list[_Claim] | None = None


class _Pod(msgspec.Struct):
    metadata: Metadata
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)

    def claims(self) -> dict[str, tuple[str, ...]]:
        """Names of ResourceClaims by the one in the pod's own specification, and by their template's."""
        wanted = self.spec.resource_claims or ()
        found = [*wanted, *(self.status.resource_claim_statuses or ())]
        own = {claim.name: (claim.resource_claim_name,) for claim in found if claim.resource_claim_name}
        by_template: dict[str, tuple[str, ...]] = {}
        for claim in wanted:
            if (template := claim.resource_claim_template_name) and claim.name in own:
                by_template[template] = (*by_template.get(template, ()), *own[claim.name])
        return by_template | own


class _NetworkSpec(msgspec.Struct):
    config: str | None = None


class _Network(msgspec.Struct):
    metadata: Metadata
    spec: _NetworkSpec | None = None


decode_page: Final = msgspec.json.Decoder(Page).decode
decode_event: Final = msgspec.json.Decoder(WatchEvent).decode
decode_versioned: Final = msgspec.json.Decoder(Versioned).decode
_decode_pod: Final = msgspec.json.Decoder(_Pod).decode
_decode_network: Final = msgspec.json.Decoder(_Network).decode


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """One object, and the resourceVersion that it came with."""

    key: Key
    version: str
    value: T


@dataclass(frozen=True, slots=True)
class Resource(Generic[T]):
    """One kind of object that is listed and watched."""

    name: str
    """`pods` or `networks`, for messages, gates and metrics."""
    path: str
    """Of the list over all namespaces."""
    decode: Callable[[bytes | msgspec.Raw], Found[T]]
    """Raises one of `DECODE_ERRORS`."""
    uid: Callable[[T], str]
    """What tells two objects of the same name apart; empty where nothing has to."""
    query: Mapping[str, str] = field(default_factory=dict)
    first_version: str = ""
    """resourceVersion of the first list: `0` takes what the API server has in memory, empty the newest in pages."""


def decode_pod(data: bytes | msgspec.Raw) -> Found[Pod]:
    """A core/v1 Pod. Raises one of `DECODE_ERRORS`."""
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
    )
    return Found((pod.namespace, pod.name), meta.resource_version, pod)


def decode_network(data: bytes | msgspec.Raw) -> Found[NetworkAttachmentDefinition]:
    """A k8s.cni.cncf.io/v1 NetworkAttachmentDefinition. Raises one of `DECODE_ERRORS`."""
    item = _decode_network(data)
    meta = item.metadata
    config = (item.spec.config if item.spec else None) or ""
    network = NetworkAttachmentDefinition(sys.intern(meta.namespace), meta.name, config, meta.kept_annotations())
    return Found((network.namespace, network.name), meta.resource_version, network)


def pods_of(node: str) -> Resource[Pod]:
    """The pods that are bound to `node`.

    The first list comes from the API server's memory, by its index: from etcd it would read every pod of the cluster,
    for every node.
    """
    return Resource(
        "pods",
        "/api/v1/pods",
        decode_pod,
        uid=lambda pod: pod.uid,
        query={"fieldSelector": f"spec.nodeName={node}"},
        first_version="0",
    )


def networks() -> Resource[NetworkAttachmentDefinition]:
    """All NetworkAttachmentDefinitions. In pages: a list from memory comes as one answer, of tens of megabytes."""
    return Resource(
        "networks",
        f"/apis/{definition.GROUP}/{definition.VERSION}/{definition.PLURAL}",
        decode_network,
        uid=lambda _: "",
    )


def pod_path(namespace: str, name: str) -> str:
    """Of one pod."""
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"


def network_path(namespace: str, name: str) -> str:
    """Of one NetworkAttachmentDefinition."""
    group = f"/apis/{definition.GROUP}/{definition.VERSION}"
    return f"{group}/namespaces/{quote(namespace, safe='')}/{definition.PLURAL}/{quote(name, safe='')}"
