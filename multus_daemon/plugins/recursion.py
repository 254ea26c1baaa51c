"""Recognize plugins that are Multus itself: it would call itself until no request is left for other pods.

Besides the names in `OWN_TYPES`, the file shows it: our shim contains a media type that only it requests, and
upstream's programs have their main package in Go's build information (https://pkg.go.dev/debug/buildinfo).
"""

from __future__ import annotations

import os
import re
from typing import Final

from multus_daemon.runtime import elf
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError

_STDOUT_TYPE: Final = b"application/vnd.multus.cni-stdout"
_OUR_SHIM_MAX_BYTES: Final = 4 * 1024 * 1024
_BUILD_INFO_MAX_BYTES: Final = 64 * 1024
_MAIN_PACKAGE: Final = re.compile(rb"path\t\S*/multus-cni(\.v\d+)?(/cmd)?/(multus|multus-shim|multus-daemon)\n")
_REMEMBERED: Final = 256

_Identity = tuple[int, int, int, int]


class PluginIsMultusError(InvalidNetworkConfigError):
    """A network names Multus as its plugin."""

    def __init__(self, plugin_type: str, path: str = "") -> None:
        """`path`: the file of Multus; empty if the name shows it."""
        shown = f"{path} is a program of Multus; " if path else ""
        super().__init__(
            f'plugin "{plugin_type}" is Multus itself',
            f"{shown}name the plugin that makes the interface, such as macvlan",
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
