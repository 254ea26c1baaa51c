"""Device-info files on the node (NPWG device-info SPEC 1.1.0, sections 4 and 5).

A device plugin writes `.../devinfo/dp/<resource>-<device>-device.json`; each attachment has a file of its own below
`.../devinfo/cni/`, a copy of that one to begin with, which the plugins of its chain may write, and which goes with it.
"""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Final

from multus_daemon.runtime import fs
from multus_daemon.spec.attachment import Attachment
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.nad import device_info
from multus_daemon.spec.nad.device_info import DeviceInfo

log = logging.getLogger(__name__)

MAX_BYTES: Final = 64 * 1024
# As plugins see it, and the specification has it. `/var/run` is a link to `/run` on most hosts.
_VOLATILE: Final = "/var/run"
_FOLDERS: Final = ("k8s.cni.cncf.io", "devinfo")
_BASE: Final = "/".join((_VOLATILE, *_FOLDERS))


class NodeDeviceFiles:
    """`ports.DeviceFiles` in the file system that plugins see."""

    def __init__(self, host_root: Path) -> None:
        """`host_root`: the root directory of the plugins. Links in the way are followed inside of it."""
        self._host_root = str(host_root)

    def path(self, attachment: Attachment, container_id: ContainerId) -> str:
        """See `ports.DeviceFiles`."""
        return f"{_BASE}/cni/{device_info.cni_file(attachment.name, container_id, attachment.ifname)}"

    def prepare(self, attachment: Attachment, path: str) -> None:
        """See `ports.DeviceFiles`. What an ADD that a crash cut off has left there is replaced."""
        name = _name(path)
        directory = self._make_directory()
        source = device_info.device_plugin_file(attachment.resource_name, attachment.device_id)
        # A pod's author may write any device id into the annotation.
        is_named = attachment.resource_name and attachment.device_id and "\0" not in source
        data = self._read("dp", source) if is_named else None
        if data is None:
            fs.remove(directory / name)
        else:
            # /run is gone with the power: nothing to fsync.
            fs.write_atomic(directory / name, data, mode=0o444, fsync=False)

    def read(self, path: str) -> DeviceInfo | None:
        """See `ports.DeviceFiles`."""
        data = self._read("cni", _name(path))
        return device_info.parse(data) if data is not None else None

    def remove(self, path: str) -> None:
        """See `ports.DeviceFiles`."""
        name = _name(path)
        try:
            fs.remove(Path(fs.resolve(self._host_root, f"{_BASE}/cni"), name))
        except FileNotFoundError:
            pass

    def _read(self, folder: str, name: str) -> bytes | None:
        try:
            directory = fs.resolve(self._host_root, f"{_BASE}/{folder}")
            return fs.read_limited(Path(directory, name), limit=MAX_BYTES, follow=False)
        except FileNotFoundError:
            return None

    def _make_directory(self) -> Path:
        """The directory of the attachments' files, made where it is missing; others may look into it."""
        path, found = _VOLATILE, Path(fs.resolve(self._host_root, _VOLATILE))
        for folder in (*_FOLDERS, "cni"):
            path, parent = f"{path}/{folder}", found
            try:
                found = Path(fs.resolve(self._host_root, path))
            except FileNotFoundError:
                found = parent / folder
            fs.ensure_directory(found, mode=0o755)
            # Upstream makes it with no permission at all, which only root's privileges get past.
            if not found.stat().st_mode & 0o777:
                found.chmod(0o755)
        return found


def _name(path: str) -> str:
    """The name of an attachment's file. Raises OSError (EPERM) for a path that is none."""
    directory, _, name = path.rpartition("/")
    if directory != f"{_BASE}/cni" or name in ("", ".", "..") or "\0" in name:
        raise OSError(errno.EPERM, f"no file of {_BASE}/cni", path)
    return name
