"""The devices of a pod from the kubelet's podresources API, or from its checkpoint file if there is no such socket.

Format of the checkpoint: kubernetes `pkg/kubelet/cm/devicemanager/checkpoint`, both versions. A pod's device ids are
lists by NUMA node since 1.20, one list before. The checksum, over Go's representation of the structs, is not verified.
"""

from __future__ import annotations

import asyncio
import importlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from multus_daemon.runtime import fs
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.ports import DevicesUnavailableError

MAX_BYTES: Final = 16 * 1024 * 1024
# The UID that the kubelet gives to a static pod; the API has the UID of its mirror.
_STATIC_UID: Final = "kubernetes.io/config.hash"


class KubeletDevices:
    """The half of `ports.DeviceSource` that the kubelet knows, on the event loop."""

    def __init__(self, kubelet_dir: Path) -> None:
        """`kubelet_dir`: the kubelet's root directory."""
        self._socket = kubelet_dir / "pod-resources" / "kubelet.sock"
        self._checkpoint = kubelet_dir / "device-plugins" / "kubelet_internal_checkpoint"

    async def allocated(self, pod: Pod) -> Mapping[str, Sequence[str]]:
        """Return the device ids by resource or claim. Raises DevicesUnavailableError.

        The checkpoint does not replace a socket that does not answer: it has no claims, and keeps removed pods until
        the next admission.
        """
        if not (pod.namespace and pod.name):
            raise DevicesUnavailableError(f"the kubelet knows pods by namespace and name; one is missing: {pod}")
        try:
            is_served = await asyncio.to_thread(self._socket.exists)
        except OSError as error:
            raise DevicesUnavailableError(f"{self._socket}: {error.strerror or error}") from error
        if is_served:
            pairs = await self._ask(pod)
        else:
            pairs = await asyncio.to_thread(read_checkpoint, self._checkpoint, pod)
        devices: dict[str, set[str]] = defaultdict(set)
        for resource, device_id in pairs:
            # A set: containers that share a claim each list its device.
            devices[resource].add(device_id)
        return {resource: sorted(device_ids) for resource, device_ids in devices.items()}

    async def _ask(self, pod: Pod) -> list[tuple[str, str]]:
        try:
            # In a thread: the first import is slow.
            podresources = await asyncio.to_thread(importlib.import_module, f"{__package__}.podresources")
        except ImportError as error:
            raise DevicesUnavailableError(
                f"asking the kubelet for devices needs grpcio and protobuf: {error}; install multus-daemon[devices]"
            ) from error
        pairs: list[tuple[str, str]] = await podresources.ask(self._socket, pod)
        return pairs


class _Entry(msgspec.Struct, rename="pascal"):
    pod_uid: str = msgspec.field(name="PodUID")
    resource_name: str
    device_ids: dict[str, list[str] | None] | list[str] | None = msgspec.field(name="DeviceIDs")


class _Data(msgspec.Struct, rename="pascal"):
    pod_device_entries: list[_Entry] | None


class _Checkpoint(msgspec.Struct, rename="pascal"):
    data: _Data


_decode: Final = msgspec.json.Decoder(_Checkpoint).decode


def read_checkpoint(path: Path, pod: Pod) -> list[tuple[str, str]]:
    """Return (resource, device id) of every device of the pod. Blocks. Raises DevicesUnavailableError."""
    try:
        entries = _decode(fs.read_limited(path, limit=MAX_BYTES)).data.pod_device_entries
    except OSError as error:
        raise DevicesUnavailableError(
            f"neither the kubelet's podresources socket nor its checkpoint can be had: {path}: "
            f"{error.strerror or error}; mount /var/lib/kubelet, or set kubeletDir"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DevicesUnavailableError(f"the kubelet's checkpoint can't be read: {path}: {error}") from error
    uid = pod.annotations.get(_STATIC_UID, "") if pod.is_static else pod.uid
    if not uid:
        raise DevicesUnavailableError(f"the kubelet's checkpoint lists pods by UID, and pod {pod} has none")
    pairs = []
    for entry in entries or ():
        ids = entry.device_ids
        lists = ids.values() if isinstance(ids, dict) else [ids]
        if entry.pod_uid == uid:
            pairs += [(entry.resource_name, device_id) for of_node in lists for device_id in of_node or ()]
    return pairs
