"""Search CNI_PATH for a plugin's binary, as seen from inside the chroot, and recognize programs of Multus.

Rules: containernetworking/cni `pkg/invoke/find.go` (first regular file, links followed). Stricter here: a file without
an execute bit is skipped, and if there is no other one the error says so, unlike exec's "permission denied".

Multus as a plugin would call itself until no request is left for other pods. Besides the names in `OWN_TYPES`, the file
shows it: our shim contains a media type that only it requests, and upstream's programs have their main package in Go's
build information (https://pkg.go.dev/debug/buildinfo).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from typing import Final

from multus_daemon.runtime import elf, fs
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError, IoFailureError

_STDOUT_TYPE: Final = b"application/vnd.multus.cni-stdout"
_OUR_SHIM_MAX_BYTES: Final = 4 * 1024 * 1024
_BUILD_INFO_MAX_BYTES: Final = 64 * 1024
_MAIN_PACKAGE: Final = re.compile(rb"path\t\S*/multus-cni(\.v\d+)?(/cmd)?/(multus|multus-shim|multus-daemon)\n")
_REMEMBERED: Final = 256

_Identity = tuple[int, int, int, int]


class PluginNotFoundError(InvalidNetworkConfigError):
    """No directory of CNI_PATH has the plugin; code 7, since the configuration names a plugin that the node lacks."""


class PluginIsMultusError(InvalidNetworkConfigError):
    """A network names Multus as its plugin."""

    def __init__(self, plugin_type: str, path: str = "") -> None:
        """`path`: the file of Multus; empty if the name shows it."""
        shown = f"{path} is a program of Multus; " if path else ""
        super().__init__(
            f'plugin "{plugin_type}" is Multus itself',
            f"{shown}name the plugin that makes the interface, such as macvlan",
        )


def find(bin_dirs: Sequence[str], plugin_type: str, *, root: str = "") -> str:
    """Return the path of the plugin's binary for a process inside `root`.

    Raises InvalidNetworkConfigError for an invalid name, PluginNotFoundError, and IoFailureError if the only file of
    that name cannot be executed.
    """
    if not plugin_type:
        raise InvalidNetworkConfigError("no plugin name provided", "the configuration's 'type' is empty")
    if "/" in plugin_type or plugin_type in (".", "..") or "\0" in plugin_type:
        raise InvalidNetworkConfigError(
            f"invalid plugin name: {plugin_type}", "a plugin's type is a file name, no path"
        )
    not_executable = ""
    for directory in bin_dirs:
        path = f"{directory.rstrip('/')}/{plugin_type}"
        try:
            mode = os.lstat(fs.resolve(root, path)).st_mode
        except OSError:
            continue
        if not stat.S_ISREG(mode):
            continue
        if mode & 0o111:
            return path
        not_executable = not_executable or path
    where = f"looked in the file system below {root}" if root else "looked in the daemon's own file system"
    if not_executable:
        raise IoFailureError(f'plugin "{plugin_type}" is not executable: {not_executable}', f"{where}; chmod +x it")
    raise PluginNotFoundError(
        f'failed to find plugin "{plugin_type}" in path [{" ".join(bin_dirs)}]',
        f"{where}; install the plugin on the node, or correct the configuration's 'type'",
    )


class ProgramFiles:
    """Examined files of plugins; each is read once, and again after it has changed."""

    def __init__(self) -> None:
        self._is_multus: dict[_Identity, bool] = {}

    def refuse(self, plugin_type: str, path: str) -> None:
        """Raise PluginIsMultusError if the file at `path` is our shim or a program of upstream. Raises OSError."""
        status = os.stat(path)
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        is_multus = self._is_multus.get(identity)
        if is_multus is None:
            is_multus = _is_multus(path, status.st_size)
            if len(self._is_multus) >= _REMEMBERED:
                self._is_multus.clear()
            self._is_multus[identity] = is_multus
        if is_multus:
            raise PluginIsMultusError(plugin_type, path)


def _is_multus(path: str, size: int) -> bool:
    with open(path, "rb") as file:
        build_info = elf.read_section(file.fileno(), ".go.buildinfo", _BUILD_INFO_MAX_BYTES)
        if build_info:
            return _MAIN_PACKAGE.search(build_info) is not None
        # A script has no build information either, and may mention the media type.
        return size <= _OUR_SHIM_MAX_BYTES and file.read(4) == b"\x7fELF" and _STDOUT_TYPE in file.read()
