"""Devices of ResourceClaims (Kubernetes documentation, "Dynamic Resource Allocation", resource.k8s.io/v1).

A claim's allocation names its devices by driver, pool and name. A driver publishes a pool in ResourceSlices. Two
attributes of a device say which network it is for and how plugins know it; their names are upstream's.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from multus_daemon.spec.attachment import Allocation, Attachment, ClaimedDevice, Pod
from multus_daemon.spec.cni.result import Interface, IpConfig, Result

DEVICE_ID: Final = "k8s.cni.cncf.io/deviceID"
RESOURCE_NAME: Final = "k8s.cni.cncf.io/resourceName"
IPS_MAX: Final = 16
"""Addresses of a device that the API server takes."""

PoolKey = tuple[str, str]  # driver and name


@dataclass(frozen=True, slots=True)
class SliceDevice:
    """The two attributes of a device; empty if the attribute is missing or is not a string."""

    device_id: str
    resource_name: str


@dataclass(frozen=True, slots=True)
class ResourceSlice:
    """A part of a pool."""

    name: str
    pool: PoolKey
    generation: int
    """Slices of an older generation of the pool are obsolete."""
    slices: int
    """Number of slices of this generation."""
    devices: Mapping[str, SliceDevice] = field(default_factory=dict)
    """The devices that have one of the two attributes at least, by name."""


@dataclass(frozen=True, slots=True)
class ResourceClaim:
    """A claim that is allocated."""

    name: str
    uid: str
    devices: tuple[tuple[str, ClaimedDevice], ...]
    """Each device with the request that it is for."""
    reserved_for: frozenset[str] = frozenset()
    """UIDs of the pods that use it. The allocation does not change while there is one."""


class Pools:
    """The slices of each pool.

    Only the newest generation counts once all its slices are known; until then the older ones count too, because the
    devices of running pods stay.
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
    """Return the pools that may have a claimed device in a slice that is not known."""
    claimed = (device for claim in claims for _, device in claim.devices)
    return {
        device.pool_key for device in claimed if pools.device(device) is None and not pools.is_complete(device.pool_key)
    }


def allocation(pod: Pod, claims: Iterable[ResourceClaim], pools: Pools) -> Allocation:
    """Return the devices of the claims by the resource that they are for.

    A device without both attributes is for no network, such as a GPU. A device of an extended resource must be of the
    resource that the pod asks for.
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
    """Return the devices of both."""
    names = sorted(first.devices.keys() | second.devices.keys())
    ids = {name: sorted({*first.devices.get(name, ()), *second.devices.get(name, ())}) for name in names}
    return Allocation(ids, {**first.claimed, **second.claimed}, (*first.left_out, *second.left_out))


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """The entries of `status.devices` that a pod has in one claim; none if its devices are detached."""

    claim: str
    """Name of the claim, in the pod's namespace."""
    claim_uid: str
    entries: tuple[Mapping[str, Any], ...]


def reports(changed: Iterable[Attachment], present: Iterable[Attachment], since: float) -> list[DeviceReport]:
    """Return a report for each claim of `changed`, with the devices of those of `present` that are attached.

    `since`: Unix time in seconds of the attachment.
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
    """Return resource.k8s.io/v1 AllocatedDeviceStatus, with DraNet's condition."""
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
        "ips": list(filter(None, map(_canonical, owned)))[:IPS_MAX],
    }
    entry = {"driver": device.driver, "pool": device.pool, "device": device.device}
    if device.share_id:
        entry["shareID"] = device.share_id
    return {
        **entry,
        "conditions": [condition],
        "networkData": {key: value for key, value in data.items() if value},
    }


def _canonical(ip: IpConfig) -> str:
    """Return the address and prefix length as the API server takes them; empty if it is not an address."""
    try:
        return ipaddress.ip_interface(ip.address).with_prefixlen
    except ValueError:
        return ""
