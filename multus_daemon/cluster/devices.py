"""The devices of pods: those that the kubelet knows, and those of ResourceClaims."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from multus_daemon.runtime.portal import Portal
from multus_daemon.spec import claims
from multus_daemon.spec.attachment import Allocation, Pod

if TYPE_CHECKING:
    from multus_daemon.cluster.kube.claims import Claims
    from multus_daemon.cluster.kubelet.source import KubeletDevices


class Devices:
    """The `ports.DeviceSource` over the kubelet's and the claims', which live on the event loop."""

    def __init__(self, source: KubeletDevices, portal: Portal, claims: Claims | None = None) -> None:
        """`claims`: None if pods have none."""
        self._source = source
        self._portal = portal
        self._claims = claims

    def allocated(self, pod: Pod, resources: Collection[str]) -> Allocation:
        """Return the devices of the pod. Raises DevicesUnavailableError."""
        of_claims = self._claims.known(pod) if self._claims else Allocation()
        if self._claims and of_claims is None:
            of_claims = self._portal.call(self._claims.allocated, pod)
        if of_claims and not pod.asks_for_extended_resources and of_claims.devices.keys() >= set(resources):
            # The kubelet knows no more. Its client is 10 MB.
            return of_claims
        of_kubelet = Allocation(self._portal.call(self._source.allocated, pod))
        return claims.merged(of_kubelet, of_claims or Allocation())
