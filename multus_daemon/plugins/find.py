"""Where a plugin binary is: the search of CNI_PATH, as seen from inside the chroot.

Rules: containernetworking/cni `pkg/invoke/find.go` (first regular file, links followed). Stricter here: a file without
an execute bit is passed over, and where nothing else is found the error says so, not exec's "permission denied".
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from multus_daemon.runtime import fs
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError, IoFailureError


class PluginNotFoundError(InvalidNetworkConfigError):
    """No directory of CNI_PATH holds the plugin; code 7, as the configuration names what the node does not have."""


def find(bin_dirs: Sequence[str], plugin_type: str, *, root: str = "") -> str:
    """The path of the plugin's binary as a process inside `root` names it.

    Raises InvalidNetworkConfigError for a name that is none, PluginNotFoundError, and IoFailureError where the only
    file of that name can't be executed.
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
