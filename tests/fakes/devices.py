"""Devices and device-info files in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from multus_daemon.cluster.devices import Devices, NodeDeviceFiles
from multus_daemon.spec import claims
from multus_daemon.spec.attachment import Allocation, Attachment, Pod
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.nad import device_info


class FakeDeviceSource(Devices):
    """`pods`: `namespace/name` to the devices by resource; other pods have none. `fail`: what every call raises.

    `claims`: the rest of the pod's allocation.
    """

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, list[str]]] = {}
        self.claims: dict[str, Allocation] = {}
        self.calls: list[str] = []
        self.fail: BaseException | None = None

    def allocated(self, pod: Pod, resources: Collection[str]) -> Allocation:
        self.calls.append(str(pod))
        if self.fail:
            raise self.fail
        return claims.merged(Allocation(self.pods.get(str(pod), {})), self.claims.get(str(pod), Allocation()))


class FakeDeviceFiles(NodeDeviceFiles):
    """`written`: (resource, device) to the content of the device plugin's file; `files`: content by path.

    `fail`: method name to what it raises.
    """

    def __init__(self) -> None:
        self.written: dict[tuple[str, str], bytes] = {}
        self.files: dict[str, bytes] = {}
        self.prepared: list[str] = []
        self.fail: dict[str, BaseException] = {}

    def path(self, attachment: Attachment, container_id: ContainerId) -> str:
        return "/devinfo/" + device_info.cni_file(attachment.name, container_id, attachment.ifname)

    def prepare(self, attachment: Attachment, path: str) -> None:
        self._call("prepare")
        self.prepared.append(path)
        self.files.pop(path, None)
        data = self.written.get((attachment.resource_name, attachment.device_id))
        if data is not None:
            self.files[path] = data

    def read(self, path: str) -> Mapping[str, Any] | None:
        self._call("read")
        return device_info.parse(self.files[path]) if path in self.files else None

    def remove(self, path: str) -> None:
        self._call("remove")
        self.files.pop(path, None)

    def _call(self, method: str) -> None:
        if error := self.fail.get(method):
            raise error
