"""ResourceClaims and ResourceSlices (resource.k8s.io/v1) as the API sends them. Only the needed fields are decoded."""

from __future__ import annotations

import sys
from typing import Final
from urllib.parse import quote

import msgspec

from multus_daemon.cluster.kube.objects import Item, Metadata, Page, Resource
from multus_daemon.spec import claims
from multus_daemon.spec.attachment import ClaimedDevice
from multus_daemon.spec.claims import ResourceClaim, ResourceSlice, SliceDevice

SLICES: Final = "slices"
"""Name of the resource, for messages and metrics."""
API_VERSION: Final = "resource.k8s.io/v1"
API: Final = f"/apis/{API_VERSION}"
SLICES_PATH: Final = f"{API}/resourceslices"
PAGE_SIZE: Final = 16
"""Slices in an answer: each has up to 128 devices, and about 400 KB."""


class _Value(msgspec.Struct):
    string: str | None = None


class _Attributes(msgspec.Struct):
    device_id: _Value | None = msgspec.field(name=claims.DEVICE_ID, default=None)
    resource_name: _Value | None = msgspec.field(name=claims.RESOURCE_NAME, default=None)


class _Device(msgspec.Struct):
    name: str
    attributes: _Attributes | None = None


class _Pool(msgspec.Struct, rename="camel"):
    name: str
    generation: int = 0
    resource_slice_count: int = 0


class _SliceSpec(msgspec.Struct):
    driver: str
    pool: _Pool
    devices: list[_Device] | None = None


class _Slice(msgspec.Struct):
    metadata: Metadata
    spec: _SliceSpec


class _Result(msgspec.Struct, rename="camel"):
    request: str
    driver: str
    pool: str
    device: str
    share_id: str | None = msgspec.field(name="shareID", default=None)


class _Devices(msgspec.Struct):
    results: list[_Result] | None = None


class _Allocation(msgspec.Struct):
    devices: _Devices = msgspec.field(default_factory=_Devices)


class _Consumer(msgspec.Struct):
    uid: str = ""


class _ClaimStatus(msgspec.Struct, rename="camel"):
    allocation: _Allocation | None = None
    reserved_for: list[_Consumer] | None = None


class _Claim(msgspec.Struct):
    metadata: Metadata
    status: _ClaimStatus = msgspec.field(default_factory=_ClaimStatus)


_decode_slice: Final = msgspec.json.Decoder(_Slice).decode
_decode_claim: Final = msgspec.json.Decoder(_Claim).decode
decode_page: Final = msgspec.json.Decoder(Page).decode


def slices_of(node: str) -> Resource[ResourceSlice]:
    """Return the resource of the slices with the devices of `node`."""
    return Resource(
        SLICES,
        SLICES_PATH,
        decode_slice,
        uid=lambda _: "",
        query={"fieldSelector": f"spec.nodeName={node}"},
        page_size=PAGE_SIZE,
    )


def claim_path(namespace: str, name: str) -> str:
    """Return the path of one ResourceClaim."""
    return f"{API}/namespaces/{quote(namespace, safe='')}/resourceclaims/{quote(name, safe='')}"


def decode_slice(data: bytes | msgspec.Raw) -> Item[ResourceSlice]:
    """Decode a ResourceSlice. Raises one of `DECODE_ERRORS`."""
    item = _decode_slice(data)
    spec = item.spec
    devices: dict[str, SliceDevice] = {}
    for device in spec.devices or ():
        found = device.attributes or _Attributes()
        device_id = (found.device_id and found.device_id.string) or ""
        resource_name = (found.resource_name and found.resource_name.string) or ""
        if device_id or resource_name:
            devices[device.name] = SliceDevice(device_id, sys.intern(resource_name))
    pool = spec.pool
    value = ResourceSlice(
        item.metadata.name, (spec.driver, pool.name), pool.generation, pool.resource_slice_count, devices
    )
    return Item(("", item.metadata.name), item.metadata.resource_version, value)


def decode_claim(data: bytes) -> ResourceClaim | None:
    """Decode a ResourceClaim; None if it is not allocated. Raises one of `DECODE_ERRORS`."""
    item = _decode_claim(data)
    name, uid, status = item.metadata.name, item.metadata.uid, item.status
    if status.allocation is None:
        return None
    devices = [
        (result.request, ClaimedDevice(name, uid, result.driver, result.pool, result.device, result.share_id or ""))
        for result in status.allocation.devices.results or ()
    ]
    users = frozenset(user.uid for user in status.reserved_for or ())
    return ResourceClaim(name, uid, tuple(devices), users)
