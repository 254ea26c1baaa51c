"""Recognizes plugins that are Multus itself: it would call itself until no request is left for other pods.

The name tells, or the file: our shim by the media type that only it asks for, upstream's programs by the main package
in Go's build information (https://pkg.go.dev/debug/buildinfo).
"""

from __future__ import annotations

import os
import re
from typing import Final

from multus_daemon.runtime import elf
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError
from multus_daemon.spec.netconf.primary import OWN_TYPES

_STDOUT_TYPE: Final = b"application/vnd.multus.cni-stdout"
_OUR_SHIM_MAX_BYTES: Final = 4 * 1024 * 1024
_BUILD_INFO_MAX_BYTES: Final = 64 * 1024
_MAIN_PACKAGE: Final = re.compile(rb"path\t\S*/multus-cni(\.v\d+)?(/cmd)?/(multus|multus-shim|multus-daemon)\n")
_REMEMBERED: Final = 256

_Identity = tuple[int, int, int, int]


class PluginIsMultusError(InvalidNetworkConfigError):
    """A network names Multus as its plugin."""

    def __init__(self, plugin_type: str, path: str = "") -> None:
        """`path`: the file that shows it; empty if the name does."""
        shown = f"{path} is a program of Multus; " if path else ""
        super().__init__(
            f'plugin "{plugin_type}" is Multus itself',
            f"{shown}name the plugin that makes the interface, such as macvlan",
        )


def refuse_name(plugin_type: str) -> None:
    """Raise PluginIsMultusError if the type is ours or upstream's."""
    if plugin_type in OWN_TYPES:
        raise PluginIsMultusError(plugin_type)


class ProgramFiles:
    """Files of plugins that were looked at; each is read once, and again after it has changed."""

    def __init__(self) -> None:
        self._is_multus: dict[_Identity, bool] = {}

    def refuse(self, plugin_type: str, path: str) -> None:
        """Raise PluginIsMultusError if the file at `path` is our shim or a program of upstream's. Raises OSError."""
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
        # Scripts have no build information either, and may well mention the media type.
        return size <= _OUR_SHIM_MAX_BYTES and file.read(4) == b"\x7fELF" and _STDOUT_TYPE in file.read()
