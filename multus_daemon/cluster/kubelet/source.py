"""The DeviceSource of a node: the kubelet's podresources API; its checkpoint where there is no such socket."""

from __future__ import annotations

import asyncio
import importlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from multus_daemon.cluster.kubelet import checkpoint
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.ports import DevicesUnavailableError


class KubeletDevices:
    """See `ports.DeviceSource`."""

    def __init__(self, kubelet_dir: Path) -> None:
        """`kubelet_dir`: the kubelet's root directory."""
        self._socket = kubelet_dir / "pod-resources" / "kubelet.sock"
        self._checkpoint = kubelet_dir / "device-plugins" / "kubelet_internal_checkpoint"

    async def allocated(self, pod: Pod) -> Mapping[str, Sequence[str]]:
        """See `ports.DeviceSource`.

        Where the socket is there and nobody answers, the checkpoint is not asked instead: the kubelet is about to be
        back, and the file knows no claims, and keeps entries of pods that are gone until the next one is admitted.
        """
        if not (pod.namespace and pod.name):
            raise DevicesUnavailableError(
                f"the kubelet knows pods by namespace and name, and this one has not both: {pod}"
            )
        try:
            is_served = await asyncio.to_thread(self._socket.exists)
        except OSError as error:
            raise DevicesUnavailableError(f"{self._socket}: {error.strerror or error}") from error
        if is_served:
            pairs = await self._ask(pod)
        else:
            pairs = await asyncio.to_thread(checkpoint.read, self._checkpoint, pod)
        devices: dict[str, set[str]] = defaultdict(set)
        for resource, device_id in pairs:
            # A set: containers that share a claim both have its device.
            devices[resource].add(device_id)
        return {resource: sorted(device_ids) for resource, device_ids in devices.items()}

    async def _ask(self, pod: Pod) -> list[tuple[str, str]]:
        try:
            # In a thread: the first import takes its time.
            podresources = await asyncio.to_thread(
                importlib.import_module, "multus_daemon.cluster.kubelet.podresources"
            )
        except ImportError as error:
            raise DevicesUnavailableError(
                f"asking the kubelet for devices needs grpcio and protobuf: {error}; install multus-daemon[devices]"
            ) from error
        found: list[tuple[str, str]] = await podresources.ask(self._socket, pod)
        return found
