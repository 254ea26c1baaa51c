"""CNI_ARGS: `KEY=value;KEY2=value2`, no escaping (CNI SPEC section 2; containernetworking/cni `pkg/types/args.go`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from multus_daemon.spec.cni.errors import InvalidEnvironmentError
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid

Pairs = tuple[tuple[str, str], ...]

KUBERNETES_KEYS = ("IgnoreUnknown", "K8S_POD_NAMESPACE", "K8S_POD_NAME", "K8S_POD_INFRA_CONTAINER_ID", "K8S_POD_UID")


def parse(text: str) -> Pairs:
    """The pairs of `text` in their order.

    More lenient than the Go library where that only ever loses a DEL: an empty item (a trailing `;`) is passed
    over, and a value may hold `=`. Keys and values are stripped of white space, as the upstream daemon does.
    Raises InvalidEnvironmentError for an item without `=` or without a key.
    """
    pairs = []
    for item in text.split(";"):
        if not item.strip():
            continue
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise InvalidEnvironmentError("CNI_ARGS: an item is not of the form KEY=value", repr(item))
        pairs.append((key.strip(), value.strip()))
    return tuple(pairs)


def render(pairs: Iterable[tuple[str, str]]) -> str:
    """`pairs` as the text of CNI_ARGS."""
    return ";".join(f"{key}={value}" for key, value in pairs)


@dataclass(frozen=True, slots=True)
class KubernetesArgs:
    """What kubelet's runtimes say of the pod in CNI_ARGS; empty strings where they say nothing."""

    namespace: Namespace
    name: PodName
    uid: PodUid
    infra_container_id: str
    others: Pairs
    """Everything that is not a Kubernetes key (and not IgnoreUnknown): handed on to the plugins."""

    @property
    def has_pod(self) -> bool:
        """True where a pod is named."""
        return bool(self.namespace and self.name)


def kubernetes(text: str) -> KubernetesArgs:
    """The pod that CNI_ARGS names. Raises InvalidEnvironmentError as `parse` does."""
    pairs = parse(text)
    found = dict(pairs)
    return KubernetesArgs(
        namespace=Namespace(found.get("K8S_POD_NAMESPACE", "")),
        name=PodName(found.get("K8S_POD_NAME", "")),
        uid=PodUid(found.get("K8S_POD_UID", "")),
        infra_container_id=found.get("K8S_POD_INFRA_CONTAINER_ID", ""),
        others=tuple((key, value) for key, value in pairs if key not in KUBERNETES_KEYS),
    )


def for_delegate(pod: KubernetesArgs, extra: Iterable[tuple[str, str]] = ()) -> Pairs:
    """CNI_ARGS for a plugin: upstream's five keys in upstream's order, what else the runtime gave, then `extra`."""
    return (
        ("IgnoreUnknown", "true"),
        ("K8S_POD_NAMESPACE", pod.namespace),
        ("K8S_POD_NAME", pod.name),
        ("K8S_POD_INFRA_CONTAINER_ID", pod.infra_container_id),
        ("K8S_POD_UID", pod.uid),
        *pod.others,
        *extra,
    )
