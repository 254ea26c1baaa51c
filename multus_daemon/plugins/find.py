"""Search CNI_PATH for a plugin's binary, as seen from inside the chroot.

Rules: containernetworking/cni `pkg/invoke/find.go` (first regular file, links followed). Stricter here: a file without
an execute bit is skipped, and if there is no other one the error says so, unlike exec's "permission denied".
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from multus_daemon.runtime import fs
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError, IoFailureError


class PluginNotFoundError(InvalidNetworkConfigError):
    """No directory of CNI_PATH has the plugin; code 7, since the configuration names a plugin that the node lacks."""


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
