"""The devices of pods: those that the kubelet knows, those of ResourceClaims, and the device-info files on the node.

Files: NPWG device-info SPEC 1.1.0, sections 4 and 5. A device plugin writes
`.../devinfo/dp/<resource>-<device>-device.json`. Each attachment has a copy of that file below `.../devinfo/cni/`,
which the plugins of its chain may change.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from multus_daemon.runtime import fs
from multus_daemon.runtime.portal import Portal
from multus_daemon.spec import claims
from multus_daemon.spec.attachment import Allocation, Attachment, Pod
from multus_daemon.spec.cni.names import ContainerId, path_problem
from multus_daemon.spec.nad import device_info
from multus_daemon.spec.nad.device_info import DeviceInfo

if TYPE_CHECKING:
    from multus_daemon.cluster.kube.claims import Claims
    from multus_daemon.cluster.kubelet.source import KubeletDevices

MAX_BYTES: Final = 64 * 1024
# The path in the specification, as plugins see it. `/var/run` is a link to `/run` on most hosts.
_BASE: Final = "/var/run/k8s.cni.cncf.io/devinfo"


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


class NodeDeviceFiles:
    """Implements `ports.DeviceFiles` in the file system that plugins see."""

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

    def read(self, path: str) -> DeviceInfo | None:
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
