"""Add the requests for devices that a pod's networks need, and its author left out, as a JSON patch (RFC 6902). Pure.

The number of devices, the container and the form of the requests are those of the NPWG's network-resources-injector.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec

from multus_daemon.spec.cni.names import subdomain_problem
from multus_daemon.spec.nad.selection import ELEMENTS_MAX

LABEL: Final = "multus.io/inject"
"""On a namespace: with `true`, requests are added to its pods. The webhook's configuration selects by it."""
ANNOTATION: Final = "multus.io/inject"
"""On a pod: with `false`, no requests are added; with `true`, they are also if it has resource claims."""
VALUES: Final = ("true", "false")
_OTHER_LABEL: Final = "nri.npwg.org/resourcename"
"""On a pod: with `false`, network-resources-injector adds no requests; so does this webhook."""
_ENOUGH: Final = ELEMENTS_MAX + 1
"""No pod needs more devices: one for each network of its annotation, one for the default network."""
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
"""The part of a resource's name after its domain."""

# The API server asks before it validates, and each resource is looked for in each container.
T = TypeVar("T")
_Many = Annotated[T, msgspec.Meta(max_length=1000)]


class _Resources(msgspec.Struct):
    limits: _Many[dict[str, Any]] | None = None
    requests: _Many[dict[str, Any]] | None = None


class _Container(msgspec.Struct, rename="camel"):
    resources: _Resources | None = None
    restart_policy: str | None = None

    @property
    def is_sidecar(self) -> bool:
        """True for an init container that keeps running (a sidecar)."""
        return self.restart_policy == "Always"


class _Claim(msgspec.Struct):
    name: str = ""


class _Metadata(msgspec.Struct):
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None


class _Spec(msgspec.Struct, rename="camel"):
    containers: _Many[list[_Container]] | None = None
    init_containers: _Many[list[_Container]] | None = None
    resource_claims: list[_Claim] | None = None
    host_network: bool | None = None


class Pod(msgspec.Struct):
    """The parts of a new core/v1 Pod that decide which requests are added."""

    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: _Spec = msgspec.field(default_factory=_Spec)

    @property
    def annotations(self) -> Mapping[str, str]:
        """The annotations of the pod."""
        return self.metadata.annotations or {}

    @property
    def is_left_alone(self) -> bool:
        """True if no request may be added, whatever the networks need.

        A pod with resource claims may get its devices from these.
        """
        wish = self.annotations.get(ANNOTATION, "")
        labels = self.metadata.labels or {}
        return (
            wish not in ("", "true")
            or labels.get(_OTHER_LABEL) == "false"
            or bool(self.spec.resource_claims and wish != "true")
            # It gets none of its networks.
            or bool(self.spec.host_network)
        )


def is_extended(resource: str) -> bool:
    """Return True if `resource` is the name of an extended resource, as device plugins offer it."""
    domain, _, name = resource.partition("/")
    is_native = resource.startswith("requests.") or "kubernetes.io/" in resource
    # The API server checks the name with this prefix too, for quotas.
    return not is_native and not subdomain_problem(f"requests.{domain}") and bool(_NAME.fullmatch(name))


def patch(pod: Pod, wanted: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the operations that complete the requests of the pod; empty if it has them.

    `wanted`: devices that its networks need, by extended resource. The first container gets all missing requests.
    """
    containers = pod.spec.containers or ()
    lacking = sorted(name for name, number in wanted.items() if _requested(pod, name) < number)
    if not containers or not lacking:
        return []
    first = containers[0]
    values = {name: str(_count(first, name) + wanted[name] - _while_running(pod, name)) for name in lacking}
    at = "/spec/containers/0/resources"
    operations = [] if first.resources else [_add(at, {})]
    given = first.resources or _Resources()
    for key, present in (("limits", given.limits), ("requests", given.requests)):
        if present is None:
            operations.append(_add(f"{at}/{key}", values))
        else:
            # RFC 6901; an extended resource has no tilde.
            operations += [_add(f"{at}/{key}/{name.replace('/', '~1')}", value) for name, value in values.items()]
    return operations


def _requested(pod: Pod, resource: str) -> int:
    """Return how many devices the kubelet allocates to the pod: it reuses those of init containers."""
    sidecars = most = 0
    for container in pod.spec.init_containers or ():
        number = _count(container, resource)
        most = max(most, sidecars + number)
        if container.is_sidecar:
            sidecars += number
    return max(most, _while_running(pod, resource))


def _while_running(pod: Pod, resource: str) -> int:
    """Return how many devices are requested by the containers that run concurrently."""
    sidecars = [container for container in pod.spec.init_containers or () if container.is_sidecar]
    return sum(_count(container, resource) for container in (*sidecars, *(pod.spec.containers or ())))


def _count(container: _Container, resource: str) -> int:
    """Return how many devices the container requests. (The API server writes 1000 as `1k`.)"""
    given = container.resources or _Resources()
    texts = [str(values[resource]) for values in (given.limits, given.requests) if values and resource in values]
    return max((int(text) if re.fullmatch(r"[0-9]{1,3}", text) else _ENOUGH for text in texts), default=0)


def _add(path: str, value: Any) -> dict[str, Any]:
    return {"op": "add", "path": path, "value": value}
