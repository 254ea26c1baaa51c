"""Devices of ResourceClaims (Kubernetes documentation, "Dynamic Resource Allocation", resource.k8s.io/v1).

A claim's allocation names its devices by driver, pool and name. A driver publishes a pool in ResourceSlices. Two
attributes of a device say which network it is for and how plugins know it; their names are upstream's.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from multus_daemon.spec.attachment import Allocation, Attachment, ClaimedDevice, Pod
from multus_daemon.spec.cni.result import Interface, Result

DEVICE_ID: Final = "k8s.cni.cncf.io/deviceID"
RESOURCE_NAME: Final = "k8s.cni.cncf.io/resourceName"
IPS_MAX: Final = 16
"""Maximum number of addresses of a device that the API server accepts."""

PoolKey = tuple[str, str]  # driver and name


@dataclass(frozen=True, slots=True)
class SliceDevice:
    """The two attributes of a device in a ResourceSlice. Each is empty if it is missing or not a string."""

    device_id: str
    resource_name: str


@dataclass(frozen=True, slots=True)
class ResourceSlice:
    """A ResourceSlice: a part of a driver's pool of devices."""

    name: str
    pool: PoolKey
    generation: int
    """Generation of the pool. Slices of an older generation are obsolete."""
    slices: int
    """Number of slices that the pool has in this generation."""
    devices: Mapping[str, SliceDevice] = field(default_factory=dict)
    """The devices with at least one of the two attributes, by name."""


@dataclass(frozen=True, slots=True)
class ResourceClaim:
    """A ResourceClaim to which devices are allocated."""

    name: str
    uid: str
    devices: tuple[tuple[str, ClaimedDevice], ...]
    """Pairs: the name of a request in the claim, and a device that is allocated for it."""
    reserved_for: frozenset[str] = frozenset()
    """UIDs of the pods that use the claim. The allocation does not change while there is such a pod."""


class Pools:
    """The known ResourceSlices of each pool.

    Once all slices of the newest generation are known, only these count. Until then older slices count too, because
    running pods keep their devices.
    """

    def __init__(self, slices: Iterable[ResourceSlice]) -> None:
        self._slices: dict[PoolKey, list[ResourceSlice]] = {}
        for item in sorted(slices, key=lambda item: -item.generation):
            parts = self._slices.setdefault(item.pool, [])
            if not (self.is_complete(item.pool) and parts[0].generation != item.generation):
                parts.append(item)

    def device(self, device: ClaimedDevice) -> SliceDevice | None:
        """Return the attributes of the device; None if it has neither of them, or is in no slice."""
        parts = self._slices.get(device.pool_key, ())
        return next((part.devices[device.device] for part in parts if device.device in part.devices), None)

    def is_complete(self, pool: PoolKey) -> bool:
        """Return True if every slice of the pool's newest generation is known."""
        parts = self._slices.get(pool, [])
        return bool(parts) and sum(part.generation == parts[0].generation for part in parts) >= parts[0].slices


def names_of(pod: Pod) -> list[str]:
    """Return the names of the pod's ResourceClaims, each once."""
    names = [name for claimed in pod.claims.values() for name in claimed]
    if pod.extended_claim:
        names.append(pod.extended_claim.name)
    return list(dict.fromkeys(names))


def unknown_pools(claims: Iterable[ResourceClaim], pools: Pools) -> set[PoolKey]:
    """Return the pools of the claims' devices whose slices are not all known."""
    claimed = (device for claim in claims for _, device in claim.devices)
    return {
        device.pool_key for device in claimed if pools.device(device) is None and not pools.is_complete(device.pool_key)
    }


def allocation(pod: Pod, claims: Iterable[ResourceClaim], pools: Pools) -> Allocation:
    """Return the devices of the claims by the resource that they are for.

    A device without both attributes is for no network, such as a GPU. A device of an extended resource counts only if
    it is of the resource that the pod asks for.
    """
    ids: dict[str, set[str]] = {}
    claimed: dict[tuple[str, str], ClaimedDevice] = {}
    left_out: list[str] = []
    for claim in claims:
        asked: Mapping[str, str] | None = None
        if pod.extended_claim and pod.extended_claim.name == claim.name:
            asked = dict(pod.extended_claim.resources)
        for request, device in claim.devices:
            found = pools.device(device)
            if problem := _problem(found, asked, request):
                left_out.append(f"device {device.device} of claim {claim.name} (driver {device.driver}) {problem}")
            elif found:
                ids.setdefault(found.resource_name, set()).add(found.device_id)
                claimed.setdefault((found.resource_name, found.device_id), device)
    devices = {name: sorted(found) for name, found in ids.items()}
    return Allocation(devices, claimed, tuple(left_out))


def _problem(found: SliceDevice | None, asked: Mapping[str, str] | None, request: str) -> str:
    """Return why the device is not usable for a network; empty if it is. `asked`: resources by request."""
    if found is None:
        return f"is in no ResourceSlice of this node with the attributes {DEVICE_ID} and {RESOURCE_NAME}"
    for name, value in ((DEVICE_ID, found.device_id), (RESOURCE_NAME, found.resource_name)):
        if not value:
            return f"has no attribute {name} that is a string"
    if asked is not None and found.resource_name != asked.get(request):
        wanted = asked.get(request, "no extended resource")
        return f"is of resource {found.resource_name}, and its request {request!r} is for {wanted}"
    return ""


def merged(first: Allocation, second: Allocation) -> Allocation:
    """Return one allocation with the devices of both."""
    names = sorted(first.devices.keys() | second.devices.keys())
    ids = {name: sorted({*first.devices.get(name, ()), *second.devices.get(name, ())}) for name in names}
    return Allocation(ids, {**first.claimed, **second.claimed}, (*first.left_out, *second.left_out))


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """The entries of one pod in the `status.devices` of one ResourceClaim; none if its devices are detached."""

    claim: str
    """Name of the claim, in the pod's namespace."""
    claim_uid: str
    entries: tuple[Mapping[str, Any], ...]


def reports(changed: Iterable[Attachment], present: Iterable[Attachment], since: float) -> list[DeviceReport]:
    """Return a status report for each ResourceClaim of `changed`: the devices that its attachments in `present` have.

    `since`: when they were attached, in Unix seconds. Attachments without a finished ADD are left out.
    """
    entries: dict[tuple[str, str], list[Mapping[str, Any]]] = {
        (item.claimed.claim, item.claimed.claim_uid): [] for item in changed if item.claimed
    }
    for item in present:
        if item.claimed and item.result and item.is_attached:
            claim = item.claimed.claim, item.claimed.claim_uid
            if claim in entries:
                entries[claim].append(_entry(item, item.claimed, item.result, since))
    return [DeviceReport(*claim, tuple(found)) for claim, found in entries.items()]


def _entry(attachment: Attachment, device: ClaimedDevice, result: Result, since: float) -> dict[str, Any]:
    """Return an AllocatedDeviceStatus (resource.k8s.io/v1) with the condition that the driver DraNet sets, too."""
    inside = [(index, item) for index, item in enumerate(result.interfaces) if item.sandbox]
    index, interface = next(
        (found for found in inside if found[1].name == attachment.ifname),
        inside[0] if inside else (None, Interface(attachment.ifname)),
    )
    owned = (ip for ip in result.ips if ip.interface in (index, None) or len(inside) < 2)
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "NetworkDeviceReady",
        "message": f"attached to network {attachment.name}",
        "lastTransitionTime": datetime.datetime.fromtimestamp(since, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    data = {
        "interfaceName": interface.name,
        "hardwareAddress": interface.mac,
        "ips": [ip.address for ip in owned][:IPS_MAX],
    }
    entry = {"driver": device.driver, "pool": device.pool, "device": device.device}
    if device.share_id:
        entry["shareID"] = device.share_id
    return {
        **entry,
        "conditions": [condition],
        "networkData": {key: value for key, value in data.items() if value},
    }
