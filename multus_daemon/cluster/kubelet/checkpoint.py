"""The device manager's checkpoint file, for kubelets without the podresources API.

Format: kubernetes `pkg/kubelet/cm/devicemanager/checkpoint`, both versions: a pod's device ids are lists by NUMA node
since 1.20, one list before. It has no claims (DRA). The checksum, over Go's way to print the structs, is not verified.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from multus_daemon.runtime import fs
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.ports import DevicesUnavailableError

MAX_BYTES: Final = 16 * 1024 * 1024
# The UID that the kubelet itself gave a pod from its own files; in the API the pod has that of its mirror.
_STATIC_UID: Final = "kubernetes.io/config.hash"


class _Entry(msgspec.Struct, rename="pascal"):
    pod_uid: str = msgspec.field(name="PodUID")
    resource_name: str
    device_ids: dict[str, list[str] | None] | list[str] | None = msgspec.field(name="DeviceIDs")


class _Data(msgspec.Struct, rename="pascal"):
    pod_device_entries: list[_Entry] | None


class _Checkpoint(msgspec.Struct, rename="pascal"):
    data: _Data


_decode: Final = msgspec.json.Decoder(_Checkpoint).decode


def read(path: Path, pod: Pod) -> list[tuple[str, str]]:
    """(resource, device id) of every device of the pod. Blocks. Raises DevicesUnavailableError."""
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
        raise DevicesUnavailableError(f"the kubelet's checkpoint knows pods by their UID, and pod {pod} has none")
    return [
        (entry.resource_name, device_id)
        for entry in entries or ()
        if entry.pod_uid == uid
        for device_id in _flat(entry.device_ids)
    ]


def _flat(device_ids: dict[str, list[str] | None] | list[str] | None) -> list[str]:
    if isinstance(device_ids, dict):
        return [device_id for of_node in device_ids.values() for device_id in of_node or ()]
    return device_ids or []
