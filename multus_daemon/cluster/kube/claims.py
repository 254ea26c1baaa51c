"""The devices of this node's ResourceClaims (resource.k8s.io/v1), so that an ADD finds them in memory.

Nothing is asked for pods without a claim, nor while no network has a resource name. A claim is read once, when its pod
comes to the node: its allocation does not change while the claim is reserved for the pod. So a watch for each claim is
not needed. The slices of this node are watched from the first allocated claim on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Final

from multus_daemon import deadlines
from multus_daemon.cluster.kube import resource
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import ApiError, KubeError
from multus_daemon.cluster.kube.informer import Informer
from multus_daemon.cluster.kube.objects import DECODE_ERRORS
from multus_daemon.metrics import ClusterMetrics
from multus_daemon.runtime import aio
from multus_daemon.runtime.aio import SharedCalls
from multus_daemon.runtime.gates import Gates
from multus_daemon.spec import claims
from multus_daemon.spec.attachment import Allocation, Pod
from multus_daemon.spec.claims import PoolKey, Pools, ResourceClaim, ResourceSlice
from multus_daemon.spec.cni import names
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_daemon.spec.ports import DevicesUnavailableError

log = logging.getLogger(__name__)

AT_ONCE: Final = 4
"""Pods whose claims are read ahead at the same time."""
_STARTS: Final = frozenset({"", "Pending"})
"""Phases of a pod whose ADD may come."""


class Claims:
    """The devices of ResourceClaims. `run` is a root task."""

    def __init__(self, client: ApiClient, node: str, pods: Informer[Pod], metrics: ClusterMetrics) -> None:
        self._client = client
        self._node = node
        self._pods = pods
        # Gates of its own: a cluster without this API, or without the rights, must not make the daemon unready.
        self.slices: Informer[ResourceSlice] = Informer(client, resource.slices_of(node), Gates(), metrics)
        self.slices.changed = lambda _: self._absent.clear()
        self._absent: set[PoolKey] = set()
        """Pools that the API server, asked once, does not have on this node."""
        self._known: dict[str, dict[str, ResourceClaim]] = {}
        """Claims by the UID of their pod, for which they are reserved. The inner ones are replaced, not changed."""
        self._reading = SharedCalls()
        self._is_wanted = False
        self._ahead: OrderedDict[str, Pod] = OrderedDict()
        self._asked: dict[str, list[str]] = {}
        self._arrived, self._needs_slices = asyncio.Event(), asyncio.Event()
        self._is_refused = False
        self._may_watch = True

    async def run(self) -> None:
        """Read claims ahead, and watch the slices from the first one on."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_ahead(), name="claims ahead")
            await self._needs_slices.wait()
            group.create_task(self._watch_slices(), name="slices")

    def network_changed(self, network: NetworkAttachmentDefinition) -> None:
        """Note whether networks need devices."""
        if network.resource_name and not self._is_wanted:
            self._is_wanted = True
            for pod in self._pods.known().values():
                self.pod_changed(pod)

    def pod_changed(self, pod: Pod) -> None:
        """Have the claims of a new pod read."""
        asked = claims.names_of(pod) if self._is_wanted and pod.phase in _STARTS else []
        if asked and self._asked.get(pod.uid) != asked:
            self._asked[pod.uid] = asked
            self._ahead[pod.uid] = pod
            self._arrived.set()

    def known(self, pod: Pod) -> Allocation | None:
        """Return the devices if they are known without asking. Safe in any thread."""
        asked = claims.names_of(pod)
        if not asked:
            return Allocation()
        present = self._known.get(pod.uid, {})
        if not self._are_watched or any(name not in present for name in asked):
            return None
        found = [present[name] for name in asked]
        pools = Pools(self.slices.known().values())
        return None if claims.unknown_pools(found, pools) - self._absent else claims.allocation(pod, found, pools)

    async def allocated(self, pod: Pod) -> Allocation:
        """Return the devices of the pod's claims; ask once for what is not known. Raises DevicesUnavailableError."""
        found: list[ResourceClaim] = []
        refused: list[str] = []
        for name in claims.names_of(pod):
            claim = await self._claim(pod, name)
            if isinstance(claim, str):
                refused.append(claim)
            else:
                found.append(claim)
        pools = await self._pools(found)
        allocation = claims.allocation(pod, found, pools)
        return replace(allocation, left_out=(*refused, *allocation.left_out))

    @property
    def _are_watched(self) -> bool:
        return self._may_watch and self.slices.synced.is_set()

    async def _watch_slices(self) -> None:
        while True:
            self._may_watch = True
            await self.slices.run(until_forbidden=True)
            self._absent.clear()
            # Upstream's role allows to list them only. So they are listed for each pod, as upstream does.
            self._may_watch = False
            await asyncio.sleep(deadlines.FORBIDDEN_SECONDS)

    async def _read_ahead(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            pods = [self._ahead.popitem(last=False)[1] for _ in range(len(self._ahead))]
            await aio.side_by_side(pods, self._read_for, at_once=AT_ONCE)
            living = {pod.uid for pod in self._pods.known().values()}
            for kept in (self._known, self._asked):
                for uid in kept.keys() - living:
                    del kept[uid]

    async def _read_for(self, pod: Pod) -> None:
        try:
            await self.allocated(pod)
        except DevicesUnavailableError as error:
            # The ADD asks again, and reports it.
            log.debug("pod %s: %s", pod, error)

    async def _claim(self, pod: Pod, name: str) -> ResourceClaim | str:
        """Return the claim, or why the API server does not give it. Raises DevicesUnavailableError."""
        if known := self._known.get(pod.uid, {}).get(name):
            return known
        return await self._reading.of((pod.uid, name), partial(self._read, pod, name))

    async def _read(self, pod: Pod, name: str) -> ResourceClaim | str:
        what = f"ResourceClaim {pod.namespace}/{name}"
        if problem := names.subdomain_problem(name):
            return f"{what}: the name {problem}"
        try:
            body = await self._client.request(
                "GET", resource.claim_path(pod.namespace, name), timeout=deadlines.API_READ_SECONDS
            )
            claim = resource.decode_claim(body)
        except ApiError as error:
            return self._refused(what, error)
        except (KubeError, *DECODE_ERRORS) as error:
            raise DevicesUnavailableError(f"{what} can't be read: {error}") from error
        if claim is None:
            raise DevicesUnavailableError(f"{what} is not allocated")
        self._is_refused = False
        self._needs_slices.set()
        if pod.uid in claim.reserved_for:
            self._known[pod.uid] = {**self._known.get(pod.uid, {}), name: claim}
        return claim

    def _refused(self, what: str, error: ApiError) -> str:
        """Return why the claim is left out. A device plugin may have the device, so it is not an error by itself."""
        advice = ""
        if error.status == 403:
            advice = "; grant the daemon's ClusterRole the verb get on resourceclaims"
        elif error.status == 404:
            advice = "; it is deleted, or the cluster does not serve resource.k8s.io/v1 (Kubernetes 1.34)"
        # Once, not for each pod.
        log.log(logging.DEBUG if self._is_refused else logging.WARNING, "%s: %s%s", what, error, advice)
        self._is_refused = True
        return f"{what} can't be read: {error}{advice}"

    async def _pools(self, found: Iterable[ResourceClaim]) -> Pools:
        """Return the pools of the claims' devices. Raises DevicesUnavailableError."""
        if self._needs_slices.is_set() and self._may_watch:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.slices.synced.wait(), deadlines.UNSYNCED_SECONDS)
        known = list(self.slices.known().values()) if self._are_watched else []
        missing = claims.unknown_pools(found, Pools(known)) - self._absent
        if not missing:
            return Pools(known)
        more: list[ResourceSlice] = []
        for driver in sorted({driver for driver, _ in missing}):
            more += await self._reading.of(driver, partial(self._list, driver))
        listed = {item.name: item for item in (*known, *more)}
        pools = Pools(listed.values())
        if self._are_watched:
            # Any change of this node's slices empties it.
            self._absent |= claims.unknown_pools(found, pools)
        return pools

    async def _list(self, driver: str) -> list[ResourceSlice]:
        query = {"fieldSelector": f"spec.nodeName={self._node},spec.driver={driver}"}
        try:
            body = await self._client.request(
                "GET", resource.SLICES_PATH, query=query, timeout=deadlines.API_READ_SECONDS
            )
            return [resource.decode_slice(item).value for item in resource.decode_page(body).items or ()]
        except (KubeError, *DECODE_ERRORS) as error:
            advice = "; grant the daemon's ClusterRole list and watch on resourceslices"
            advice = advice if getattr(error, "status", None) == 403 else ""
            raise DevicesUnavailableError(
                f"ResourceSlices of driver {driver} can't be read: {error}{advice}"
            ) from error
