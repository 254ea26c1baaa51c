"""CNI_ARGS: `KEY=value;KEY2=value2`, no escaping (CNI SPEC section 2; containernetworking/cni `pkg/types/args.go`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from multus_daemon.spec.cni.errors import InvalidEnvironmentError
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid

Pairs = tuple[tuple[str, str], ...]
KUBERNETES_KEYS = ("IgnoreUnknown", "K8S_POD_NAMESPACE", "K8S_POD_NAME", "K8S_POD_INFRA_CONTAINER_ID", "K8S_POD_UID")


def parse(text: str) -> Pairs:
    """Return the pairs of `text` in their order, stripped of white space as in upstream's daemon.

    Unlike the Go library it allows empty items (a trailing `;`) and `=` in a value, so that no DEL fails. Raises
    InvalidEnvironmentError for an item without `=` or without a key.
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
    """Return the text of CNI_ARGS."""
    return ";".join(f"{key}={value}" for key, value in pairs)


@dataclass(frozen=True, slots=True)
class KubernetesArgs:
    """The pod in CNI_ARGS of a Kubernetes runtime; absent values are empty strings."""

    namespace: Namespace
    name: PodName
    uid: PodUid
    infra_container_id: str
    others: Pairs
    """All other pairs except IgnoreUnknown, for the plugins."""

    @property
    def has_pod(self) -> bool:
        """True if a pod is named."""
        return bool(self.namespace and self.name)


def kubernetes(text: str) -> KubernetesArgs:
    """Return the pod in CNI_ARGS. Raises as `parse` does."""
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
    """Return CNI_ARGS for a plugin: upstream's five keys in upstream's order, the other pairs, then `extra`."""
    values = ("true", pod.namespace, pod.name, pod.infra_container_id, pod.uid)
    return (*zip(KUBERNETES_KEYS, values, strict=True), *pod.others, *extra)
