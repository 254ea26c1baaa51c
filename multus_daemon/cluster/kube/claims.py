"""Finds the devices of ResourceClaims (resource.k8s.io/v1), usually before the ADD.

The API server is not asked for pods without a claim, nor while no network has a resource name. The claims of a pod are
read when it comes to the node, with the slices of their drivers on this node: an allocation does not change while its
claim is reserved for the pod. So nothing is watched.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final
from urllib.parse import quote

import msgspec

from multus_daemon import deadlines
from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import ApiError, KubeError
from multus_daemon.cluster.kube.informer import Informer
from multus_daemon.cluster.kube.objects import DECODE_ERRORS, Key, Metadata
from multus_daemon.runtime.aio import SharedCalls
from multus_daemon.runtime.recent import Recent
from multus_daemon.runtime.workqueue import WorkQueue
from multus_daemon.spec import claims
from multus_daemon.spec.attachment import Allocation, ClaimedDevice, Pod
from multus_daemon.spec.claims import Pools, ResourceClaim, ResourceSlice, SliceDevice
from multus_daemon.spec.cni import names
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_daemon.spec.ports import DevicesUnavailableError

log = logging.getLogger(__name__)

AT_ONCE: Final = 4
"""Number of pods whose claims are read concurrently, before their ADDs."""
KEPT_MAX: Final = 1024
"""Pods whose devices are kept in memory."""
API_VERSION: Final = "resource.k8s.io/v1"
SLICES_PATH: Final = f"/apis/{API_VERSION}/resourceslices"
_STARTS: Final = frozenset({"", "Pending"})
"""Phases of a pod whose ADD may still come."""


class Claims:
    """The devices of ResourceClaims. `run` is a root task."""

    def __init__(self, client: ApiClient, node: str, pods: Informer[Pod]) -> None:
        self._client = client
        self._node = node
        self._pods = pods
        self._kept: Recent[str, tuple[Sequence[str], Allocation | None]] = Recent(
            KEPT_MAX, deadlines.CLAIMS_KEPT_SECONDS
        )
        """By the UID of the pod: the names of its claims, and their devices; None until they are known."""
        self._reading = SharedCalls()
        self._is_wanted = False
        self._reads = WorkQueue[Key](self._read_ahead, retry=(1, 1), at_once=AT_ONCE, name="claims ahead")
        self._is_refused = False

    async def run(self) -> None:
        """Read the claims of new pods before their ADDs."""
        await self._reads.run()

    def network_changed(self, network: NetworkAttachmentDefinition) -> None:
        """Note a new or changed network: claims are read only if a network has a resource name."""
        if network.resource_name and not self._is_wanted:
            self._is_wanted = True
            for pod in self._pods.known().values():
                self.pod_changed(pod)

    def pod_changed(self, pod: Pod) -> None:
        """Have the claims of a new pod read."""
        asked = claims.names_of(pod) if self._is_wanted and pod.phase in _STARTS else []
        before, _ = self._kept.get(pod.uid) or ([], None)
        if asked and before != asked:
            self._kept[pod.uid] = asked, None
            self._reads.add((pod.namespace, pod.name))

    def known(self, pod: Pod) -> Allocation | None:
        """Return the devices of the pod's claims; None if the API server must be asked. Safe in any thread."""
        asked = claims.names_of(pod)
        if not asked:
            return Allocation()
        before, allocation = self._kept.get(pod.uid) or ([], None)
        return allocation if before == asked else None

    async def allocated(self, pod: Pod) -> Allocation:
        """Return the devices of the pod's claims; ask once for unknown ones. Raises DevicesUnavailableError."""
        if (known := self.known(pod)) is not None:
            return known
        return await self._reading.of((pod.uid, *claims.names_of(pod)), partial(self._read, pod))

    async def _read_ahead(self, key: Key) -> None:
        pod = self._pods.get(key)
        try:
            if pod is not None:
                await self.allocated(pod)
        except Exception as error:
            # Not tried again: the ADD asks, and reports it.
            log.debug("pod %s: %s", pod, error)

    async def _read(self, pod: Pod) -> Allocation:
        """Ask the API server; keep the devices if no ADD of the pod can get others. Raises DevicesUnavailableError."""
        asked, found, refused = claims.names_of(pod), list[ResourceClaim](), list[str]()
        for name in asked:
            claim = await self._claim(pod, name)
            if isinstance(claim, str):
                refused.append(claim)
            else:
                found.append(claim)
        drivers = sorted({device.driver for claim in found for _, device in claim.devices})
        # Many pods may ask for the slices of a driver at the same time.
        slices = [await self._reading.of(driver, partial(self._slices, driver)) for driver in drivers]
        pools = Pools(item for listed in slices for item in listed)
        allocation = claims.allocation(pod, found, pools)
        allocation = replace(allocation, left_out=(*refused, *allocation.left_out))
        is_reserved = all(pod.uid in claim.reserved_for for claim in found)
        if is_reserved and not refused and not claims.unknown_pools(found, pools):
            self._kept[pod.uid] = asked, allocation
        return allocation

    async def _claim(self, pod: Pod, name: str) -> ResourceClaim | str:
        """Return the claim, or why the API server does not give it. Raises DevicesUnavailableError."""
        what = f"ResourceClaim {pod.namespace}/{name}"
        if problem := names.subdomain_problem(name):
            return f"{what}: the name {problem}"
        try:
            body = await self._client.request(
                "GET", claim_path(pod.namespace, name), timeout=deadlines.API_READ_SECONDS
            )
            claim = decode_claim(body)
        except ApiError as error:
            return self._refused(what, error)
        except (KubeError, *DECODE_ERRORS) as error:
            raise DevicesUnavailableError(f"{what} can't be read: {error}") from error
        if claim is None:
            raise DevicesUnavailableError(f"{what} is not allocated")
        self._is_refused = False
        return claim

    def _refused(self, what: str, error: ApiError) -> str:
        """Return why the API server refuses the claim. That alone is no error: the kubelet may know the device, too."""
        advice = ""
        if error.status == 403:
            advice = "; grant the daemon's ClusterRole the verb get on resourceclaims"
        elif error.status == 404:
            advice = "; it is deleted, or the cluster does not serve resource.k8s.io/v1 (Kubernetes 1.34)"
        # Once, not for each pod.
        log.log(logging.DEBUG if self._is_refused else logging.WARNING, "%s: %s%s", what, error, advice)
        self._is_refused = True
        return f"{what} can't be read: {error}{advice}"

    async def _slices(self, driver: str) -> list[ResourceSlice]:
        """Return the slices of the driver on this node. Raises DevicesUnavailableError."""
        query = {"fieldSelector": f"spec.nodeName={self._node},spec.driver={driver}"}
        try:
            body = await self._client.request("GET", SLICES_PATH, query=query, timeout=deadlines.API_READ_SECONDS)
            return [decode_slice(item) for item in objects.decode_page(body).items or ()]
        except (KubeError, *DECODE_ERRORS) as error:
            advice = "; grant the daemon's ClusterRole list on resourceslices"
            advice = advice if getattr(error, "status", None) == 403 else ""
            raise DevicesUnavailableError(
                f"ResourceSlices of driver {driver} can't be read: {error}{advice}"
            ) from error


# --- what the API sends; only the needed fields are decoded -----------------------------------------------------------


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


def claim_path(namespace: str, name: str) -> str:
    """Return the path of one ResourceClaim."""
    return f"/apis/{API_VERSION}/namespaces/{quote(namespace, safe='')}/resourceclaims/{quote(name, safe='')}"


def decode_slice(data: bytes | msgspec.Raw) -> ResourceSlice:
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
    return ResourceSlice(
        item.metadata.name, (spec.driver, pool.name), pool.generation, pool.resource_slice_count, devices
    )


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
