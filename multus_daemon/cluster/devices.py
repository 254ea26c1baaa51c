"""The devices of pods: those that the kubelet knows, those of ResourceClaims, and the device-info files on the node.

The kubelet's devices are read from its podresources API, or from its checkpoint file if there is no such socket. Format
of the checkpoint: kubernetes `pkg/kubelet/cm/devicemanager/checkpoint`, both versions. A pod's device ids are lists by
NUMA node since 1.20, one list before. The checksum, over Go's representation of the structs, is not verified.

Device-info files: NPWG device-info SPEC 1.1.0, sections 4 and 5. A device plugin writes
`.../devinfo/dp/<resource>-<device>-device.json`. Each attachment has a copy of that file below `.../devinfo/cni/`,
which the plugins of its chain may change.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from multus_daemon.runtime import fs
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.spec import claims
from multus_daemon.spec.attachment import Allocation, Attachment, Pod
from multus_daemon.spec.cni.names import ContainerId, path_problem
from multus_daemon.spec.nad import device_info
from multus_daemon.spec.ports import DevicesUnavailableError

if TYPE_CHECKING:
    from multus_daemon.cluster.kube.claims import Claims

MAX_BYTES: Final = 64 * 1024
CHECKPOINT_MAX_BYTES: Final = 16 * 1024 * 1024
# The UID that the kubelet gives to a static pod; the API has the UID of its mirror.
_STATIC_UID: Final = "kubernetes.io/config.hash"
# The path in the specification, as plugins see it. `/var/run` is a link to `/run` on most hosts.
_BASE: Final = "/var/run/k8s.cni.cncf.io/devinfo"


class Devices:
    """Finds the devices of a pod, from the kubelet and from ResourceClaims, for the threads of requests."""

    def __init__(
        self, kubelet: Callable[[Pod], Mapping[str, Sequence[str]]], portal: LoopPortal, claims: Claims | None = None
    ) -> None:
        """`kubelet` asks for a pod's devices, as `of_kubelet` does; `claims` is None without a cluster.

        `portal` leads to the event loop.
        """
        self._kubelet = kubelet
        self._portal = portal
        self._claims = claims

    def allocated(self, pod: Pod, resources: Collection[str]) -> Allocation:
        """Return the pod's devices; complete for `resources`, which are names of resources or claims.

        Raises DevicesUnavailableError.
        """
        of_claims = self._claims.known(pod) if self._claims else Allocation()
        if self._claims and of_claims is None:
            of_claims = self._portal.call(self._claims.allocated, pod)
        if of_claims and not pod.asks_for_extended_resources and of_claims.devices.keys() >= set(resources):
            # The kubelet knows no more. Its client is 10 MB.
            return of_claims
        return claims.merged(Allocation(self._kubelet(pod)), of_claims or Allocation())


def of_kubelet(kubelet_dir: Path, portal: LoopPortal, pod: Pod) -> Mapping[str, Sequence[str]]:
    """Return the ids of the devices that the kubelet has given to the pod, by resource or claim. Blocks.

    `kubelet_dir`: the kubelet's root directory. If the socket does not answer, the checkpoint is not read: it has no
    claims, and still has removed pods until the next pod is admitted. Raises DevicesUnavailableError.
    """
    if not (pod.namespace and pod.name):
        raise DevicesUnavailableError(
            f"the kubelet can't be asked for devices without the pod's namespace and name: {pod}"
        )
    socket = kubelet_dir / "pod-resources" / "kubelet.sock"
    pairs: list[tuple[str, str]]
    try:
        if socket.exists():
            # Imported with the first pod that needs it: it takes 10 MB.
            podresources = importlib.import_module("multus_daemon.cluster.kubelet.podresources")
            pairs = portal.call(podresources.ask, socket, pod)
        else:
            pairs = read_checkpoint(kubelet_dir / "device-plugins" / "kubelet_internal_checkpoint", pod)
    except ImportError as error:
        raise DevicesUnavailableError(
            f"asking the kubelet for devices needs grpcio and protobuf: {error}; install multus-daemon[devices]"
        ) from error
    except OSError as error:
        raise DevicesUnavailableError(f"{socket}: {error.strerror or error}") from error
    devices: dict[str, set[str]] = defaultdict(set)
    for resource, device_id in pairs:
        # A set: containers that share a claim each list its device.
        devices[resource].add(device_id)
    return {resource: sorted(device_ids) for resource, device_ids in devices.items()}


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
        entries = _decode(fs.read_limited(path, limit=CHECKPOINT_MAX_BYTES)).data.pod_device_entries
    except OSError as error:
        raise DevicesUnavailableError(
            f"neither the kubelet's podresources socket nor its checkpoint can be read: {path}: "
            f"{error.strerror or error}; mount /var/lib/kubelet, or set kubeletDir"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DevicesUnavailableError(f"the kubelet's checkpoint can't be read: {path}: {error}") from error
    uid = pod.annotations.get(_STATIC_UID, "") if pod.is_static else pod.uid
    if not uid:
        raise DevicesUnavailableError(
            f"the kubelet's checkpoint lists pods by UID, and the runtime gave none for pod {pod}"
        )
    pairs = []
    for entry in entries or ():
        ids = entry.device_ids
        lists = ids.values() if isinstance(ids, dict) else [ids]
        if entry.pod_uid == uid:
            pairs += [(entry.resource_name, device_id) for of_node in lists for device_id in of_node or ()]
    return pairs


class NodeDeviceFiles:
    """The device-info files of device plugins and of attachments, in the file system that plugins see."""

    def __init__(self, host_root: Path) -> None:
        """`host_root`: the root directory of the plugins. Links are resolved inside it."""
        self._host_root = str(host_root)

    def path(self, attachment: Attachment, container_id: ContainerId) -> str:
        """Return the path of the attachment's file, for plugins."""
        return f"{_BASE}/cni/{device_info.cni_file(attachment.name, container_id, attachment.ifname)}"

    def prepare(self, attachment: Attachment, path: str) -> None:
        """Copy the device plugin's file to `path`, or remove a file that a crashed ADD left there. Raises OSError."""
        name = _name(path)
        directory = self._make_directory()
        source = device_info.device_plugin_file(attachment.resource_name, attachment.device_id)
        # The device id comes from an annotation and may have any content.
        is_named = attachment.resource_name and attachment.device_id and not path_problem(source)
        data = self._read("dp", source) if is_named else None
        if data is None:
            fs.remove(directory / name)
        else:
            # No fsync: /run does not survive a power loss.
            fs.write_atomic(directory / name, data, mode=0o444, fsync=False)

    def read(self, path: str) -> Mapping[str, Any] | None:
        """Return the content of the attachment's file, None without a file. Raises OSError, CniError."""
        data = self._read("cni", _name(path))
        return device_info.parse(data) if data is not None else None

    def remove(self, path: str) -> None:
        """Remove the attachment's file, if it exists. Raises OSError."""
        name = _name(path)
        with contextlib.suppress(FileNotFoundError):
            fs.remove(Path(fs.resolve(self._host_root, f"{_BASE}/cni"), name))

    def _read(self, folder: str, name: str) -> bytes | None:
        try:
            directory = fs.resolve(self._host_root, f"{_BASE}/{folder}")
            return fs.read_limited(Path(directory, name), limit=MAX_BYTES, follow=False)
        except FileNotFoundError:
            return None

    def _make_directory(self) -> Path:
        """Make the directory of the attachments' files, readable for others, and return it."""
        directory = Path(fs.resolve(self._host_root, "/var/run"))
        for path in ("/var/run/k8s.cni.cncf.io", _BASE, f"{_BASE}/cni"):
            directory = Path(fs.resolve(self._host_root, path, missing=True))
            fs.ensure_directory(directory, mode=0o755)
            # Upstream makes it without any permission, so that only root can use it.
            if not directory.stat().st_mode & 0o777:
                directory.chmod(0o755)
        return directory


def _name(path: str) -> str:
    """Return the file name of an attachment's path. Raises OSError (EPERM) for any other path."""
    directory, _, name = path.rpartition("/")
    if directory != f"{_BASE}/cni" or name in ("", ".", "..") or path_problem(name):
        raise OSError(errno.EPERM, f"not a file in {_BASE}/cni", path)
    return name
