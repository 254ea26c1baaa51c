"""Search CNI_PATH for a plugin's binary, as seen from inside the chroot; recognize programs of Multus, and releases.

Rules: containernetworking/cni `pkg/invoke/find.go` (first regular file, links followed). Unlike there, a file without
an execute bit is skipped; if there is no other file, the error says so.

Multus as a plugin would call itself until no slot is left for other pods. It is recognized by the names in `OWN_TYPES`
and by its file: our shim contains a media type that only it requests, and upstream's programs have their main package
in Go's build information (https://pkg.go.dev/debug/buildinfo).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from multus_daemon.runtime import elf, fs
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError, IoFailureError

_STDOUT_TYPE: Final = b"application/vnd.multus.cni-stdout"
_OUR_SHIM_MAX_BYTES: Final = 4 * 1024 * 1024
_BUILD_INFO_MAX_BYTES: Final = 64 * 1024
_UPSTREAM: Final = re.compile(r"\S*/multus-cni(\.v\d+)?((/cmd)?/(multus|multus-shim|multus-daemon)|/cmd)")
_PACKAGE: Final = re.compile(rb"path\t(\S+)\n")
_MODULE: Final = re.compile(rb"\n(?:mod|dep)\t(\S+)\t(v[\w.+-]+)")
# A checkout has no version; the makers of releases, and of packages of them, give the linker one.
_STAMP: Final = re.compile(rb"-X \S*(?:buildversion\.BuildVersion|main\.[vV]ersion)=(v[\w.+-]+)")


class PluginNotFoundError(InvalidNetworkConfigError):
    """No directory of CNI_PATH has the plugin; code 7, since the configuration names a plugin that the node lacks."""

    def __init__(self, plugin_type: str, bin_dirs: Iterable[str], details: str = "", *, caller: str = "") -> None:
        """`caller`: for an IPAM plugin, the plugin that calls it."""
        called = f", the IPAM of {caller}" if caller else ""
        super().__init__(
            f'failed to find plugin "{plugin_type}" in path [{" ".join(bin_dirs)}]{called}',
            details,
            remedy="install the plugin on the node (executable, in that path), or correct 'type' in the network's "
            "configuration",
        )
        self.plugin_type = plugin_type


class PluginIsMultusError(InvalidNetworkConfigError):
    """A network names Multus as its plugin."""

    def __init__(self, plugin_type: str, path: str = "") -> None:
        """`path`: the file that was recognized as Multus; empty if the type's name was."""
        shown = f"{path} is a program of Multus; " if path else ""
        super().__init__(
            f'plugin "{plugin_type}" is Multus itself',
            f"{shown}name the plugin that makes the interface, such as macvlan",
        )


@dataclass(frozen=True, slots=True)
class Program:
    """The file of a plugin, if there is one, and whether it may run."""

    path: str = ""
    """The path as plugins see it; empty if there is no file."""
    refusal: CniError | None = field(default=None, compare=False)
    """Why the file cannot run, or must not because it is Multus; None if it can."""


@dataclass(frozen=True, slots=True)
class Build:
    """Go's build information of a program."""

    package: str = ""
    """The main package; empty for another program."""
    version: str = ""
    """The release of the package's module, such as `v1.10.0`; empty if not known."""


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
        problem = f'plugin "{plugin_type}" is not executable: {not_executable}'
        raise IoFailureError(problem, where, remedy="set its execute bit (chmod +x)")
    raise PluginNotFoundError(plugin_type, bin_dirs, where)


def find_plugin(bin_dirs: Sequence[str], plugin_type: str, *, root: str = "") -> str:
    """Return the path as `find` does. Also raises PluginIsMultusError."""
    path = find(bin_dirs, plugin_type, root=root)
    # Running a file that is gone reports it.
    with contextlib.suppress(OSError):
        refuse_multus(plugin_type, fs.resolve(root, path))
    return path


def program(bin_dirs: Sequence[str], plugin_type: str, *, root: str = "") -> Program:
    """Return the program that `find_plugin` finds; its error is the program's `refusal`."""
    try:
        return Program(find_plugin(bin_dirs, plugin_type, root=root))
    except (PluginIsMultusError, IoFailureError) as error:
        return Program(refusal=error)
    except CniError:
        return Program()


def refuse_multus(plugin_type: str, path: str) -> None:
    """Raise PluginIsMultusError if the file at `path` is our shim or a program of upstream. Raises OSError.

    Each file is read once, and again after it has changed.
    """
    is_multus, _ = _identified(path)
    if is_multus:
        raise PluginIsMultusError(plugin_type, path)


def build(path: str) -> Build:
    """Return the build information of the file at `path`, read as for `refuse_multus`. Raises OSError."""
    return _identified(path)[1]


def builds(bin_dirs: Sequence[str], types: Iterable[str], *, root: str = "") -> dict[str, Build]:
    """Return those of the plugins that there are, by type."""
    found = {}
    for name in types:
        with contextlib.suppress(CniError, OSError):
            found[name] = build(fs.resolve(root, find(bin_dirs, name, root=root)))
    return found


def _identified(path: str) -> tuple[bool, Build]:
    status = os.stat(path)
    return _read(path, status.st_size, (status.st_dev, status.st_ino, status.st_mtime_ns))


@functools.lru_cache(maxsize=256)
def _read(path: str, size: int, identity: tuple[int, int, int]) -> tuple[bool, Build]:
    """Return whether the file is a program of Multus, and its build information."""
    with open(path, "rb") as file:
        text = elf.read_section(file.fileno(), ".go.buildinfo", _BUILD_INFO_MAX_BYTES)
        if not text:
            # A script has no build information either, and may mention the media type.
            is_shim = size <= _OUR_SHIM_MAX_BYTES and file.read(4) == b"\x7fELF" and _STDOUT_TYPE in file.read()
            return is_shim, Build()
    package = found[1].decode("utf-8", "replace") if (found := _PACKAGE.search(text)) else ""
    modules = {name.decode("utf-8", "replace"): version for name, version in _MODULE.findall(text)}
    version = next((version for name, version in modules.items() if f"{package}/".startswith(f"{name}/")), b"")
    if found := _STAMP.search(text):
        version = found[1]
    return _UPSTREAM.fullmatch(package) is not None, Build(package, version.decode())
