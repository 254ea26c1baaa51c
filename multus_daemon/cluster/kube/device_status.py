"""Report claimed devices in `ResourceClaim.status.devices` (KEP-4817), repeated while the API server is away.

A server-side apply of `resourceclaims/status` with the claim's UID: for another claim of the name the API server
answers 409. Each pod is a field manager of its own, so its entries can be removed, and those of others stay. Fields
that another manager has set to something else, as the device's driver may, are left alone (409 too).
"""

from __future__ import annotations

import logging
import time
from typing import Final

import msgspec

from multus_daemon import deadlines
from multus_daemon.cluster.kube import resource
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import ApiError
from multus_daemon.cluster.kube.latest import LatestWriter
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.claims import DeviceReport

log = logging.getLogger(__name__)

APPLY_PATCH: Final = "application/apply-patch+yaml"
MANAGER: Final = "multus-daemon"


class DeviceStatusWriter(LatestWriter[tuple[Pod, DeviceReport]]):
    """Writes device statuses, where the daemon's role allows it."""

    def __init__(self, client: ApiClient) -> None:
        retry = deadlines.CONDITION_RETRY_SECONDS
        super().__init__(client, lambda item: self._apply(*item), retry=retry, least_seconds=retry[0])
        self._forbidden_until = float("-inf")

    def put_report(self, pod: Pod, report: DeviceReport) -> None:
        """Queue the report, in place of one that is not written yet."""
        self.put(
            f"{report.claim_uid}/{pod.uid}",
            f"device status of ResourceClaim {pod.namespace}/{report.claim}",
            (pod, report),
        )

    async def _apply(self, pod: Pod, report: DeviceReport) -> None:
        """Write the report, unless the role does not allow it. Raises KubeError."""
        if time.monotonic() < self._forbidden_until:
            return
        item = {
            "apiVersion": resource.API_VERSION,
            "kind": "ResourceClaim",
            "metadata": {"namespace": pod.namespace, "name": report.claim, "uid": report.claim_uid},
            "status": {"devices": report.entries} if report.entries else {},
        }
        try:
            await self._client.request(
                "PATCH",
                f"{resource.claim_path(pod.namespace, report.claim)}/status",
                query={"fieldManager": f"{MANAGER}/{pod.uid}"},
                body=msgspec.json.encode(item),
                content_type=APPLY_PATCH,
                timeout=deadlines.NETWORK_STATUS_ATTEMPT_SECONDS,
            )
        except ApiError as error:
            if error.status == 403:
                log.info("devices of ResourceClaims are not reported, as the role does not allow it: %s", error)
                self._forbidden_until = time.monotonic() + deadlines.FORBIDDEN_SECONDS
            elif error.status == 409:
                log.info("device status of ResourceClaim %s/%s is left alone: %s", pod.namespace, report.claim, error)
            else:
                raise
