"""ResourceClaims and ResourceSlices (resource.k8s.io/v1) as a scheduler and a DRA driver make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

API: Final = "resource.k8s.io/v1"
DRIVER: Final = "nic.example.com"
ID: Final = "k8s.cni.cncf.io/deviceID"
RESOURCE: Final = "k8s.cni.cncf.io/resourceName"

Manifest = dict[str, Any]


def nic(name: str, device_id: str | None = None, resource: str | None = "vendor.com/vf", **more: Any) -> Manifest:
    """A device of a slice; its id is `id-<name>` unless given, None for neither attribute."""
    attributes: Manifest = {"example.com/speed": {"int": 100}, **more}
    if resource is not None:
        attributes[RESOURCE] = {"string": resource}
        attributes[ID] = {"string": f"id-{name}" if device_id is None else device_id}
    return {"name": name, "attributes": attributes}


def resource_slice(
    name: str,
    *devices: Manifest,
    node: str = "node-a",
    driver: str = DRIVER,
    pool: str = "pool",
    generation: int = 1,
    count: int = 1,
) -> Manifest:
    """A slice with the devices."""
    spec = {
        "driver": driver,
        "nodeName": node,
        "pool": {"name": pool, "generation": generation, "resourceSliceCount": count},
        "devices": list(devices),
    }
    return {"apiVersion": API, "kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec}


def result(device: str, *, request: str = "nic", driver: str = DRIVER, pool: str = "pool") -> Manifest:
    """A device that is allocated to a claim."""
    return {"request": request, "driver": driver, "pool": pool, "device": device}


def claim_spec(requests: Sequence[str]) -> Manifest:
    """The spec of a claim with these requests."""
    named = [{"name": name, "exactly": {"deviceClassName": "nic.example.com"}} for name in requests]
    return {"devices": {"requests": named}}


def claim_status(results: Sequence[Manifest], pods: Mapping[str, str]) -> Manifest:
    """The status of an allocated claim; `pods`: UIDs of its users by their names."""
    return {
        "allocation": {"devices": {"results": list(results)}},
        "reservedFor": [{"resource": "pods", "name": name, "uid": uid} for name, uid in pods.items()],
    }


def claim(
    name: str,
    *results: Manifest,
    namespace: str = "web",
    pods: Mapping[str, str] | None = None,
    is_allocated: bool = True,
) -> Manifest:
    """A claim with its allocation."""
    found: Manifest = {
        "apiVersion": API,
        "kind": "ResourceClaim",
        "metadata": {"namespace": namespace, "name": name},
        "spec": claim_spec(list(dict.fromkeys(item["request"] for item in results)) or ["nic"]),
    }
    if is_allocated:
        found["status"] = claim_status(results, pods or {})
    return found


def pod_claims(*names: str) -> tuple[Manifest, Manifest]:
    """Spec and status of a pod with claims from templates: `nic-0` and so on, made as `names`."""
    declared = [{"name": f"nic-{number}", "resourceClaimTemplateName": "nics"} for number in range(len(names))]
    made = [{"name": f"nic-{number}", "resourceClaimName": name} for number, name in enumerate(names)]
    return {"resourceClaims": declared}, {"resourceClaimStatuses": made}


def extended(name: str, *requests: tuple[str, str]) -> Manifest:
    """The pod's status of extended resources: request of the claim and resource, for each."""
    mappings = [
        {"containerName": "main", "requestName": request, "resourceName": resource} for request, resource in requests
    ]
    return {"extendedResourceClaimStatus": {"resourceClaimName": name, "requestMappings": mappings}}
