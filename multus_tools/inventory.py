"""List the plugins of this node, and the daemons in this network namespace."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

from multus_daemon.plugins import find
from multus_daemon.plugins.builtin.registry import PLUGINS, newer
from multus_daemon.runtime import elf, fs
from multus_daemon.settings import Settings
from multus_daemon.spec.attachment import BUILT_IN


def plugins(settings: Settings) -> dict[str, Any]:
    """Return the answer of `multusctl plugins`: the plugins by type. Raises OSError if `binDir` can't be listed."""
    binaries = _binaries(settings)
    found = []
    for name in sorted({*binaries, *PLUGINS}):
        is_built_in = name in PLUGINS and name not in settings.plugins.builtin_plugins_except
        mode = settings.plugins.builtin_plugins if is_built_in else "off"
        steps_aside = _newer(settings, name) if mode == "prefer" and name in binaries else ""
        if steps_aside:
            mode = "fallback"
        if mode == "prefer" or (mode == "fallback" and name not in binaries):
            served_by, problem = BUILT_IN, ""
        elif name in binaries:
            served_by, problem = f"{settings.paths.bin_dir.rstrip('/')}/{name}", binaries[name]
        else:
            continue
        found.append({"type": name, "servedBy": served_by, "newer": steps_aside, "problem": problem})
    return {"schema": "multusctl.plugins/v1", "plugins": found}


def _newer(settings: Settings, name: str) -> str:
    """Return why the built-in of the type steps aside for its binary; empty if it does not."""
    paths = settings.paths
    return newer(name, find.builds([paths.bin_dir], [name], root=paths.chroot_dir.rstrip("/")).get(name, find.Build()))


def _binaries(settings: Settings) -> dict[str, str]:
    """Return for the name of each file in `binDir` why it can't be run; empty if it can."""
    directory = Path(fs.resolve(settings.paths.chroot_dir, settings.paths.bin_dir))
    found = {}
    for name in os.listdir(directory):
        if name == settings.primary.plugin_type or name.startswith("."):
            continue
        # A dangling link, or a file that is being replaced.
        with contextlib.suppress(OSError):
            path = Path(fs.resolve(settings.paths.chroot_dir, f"{settings.paths.bin_dir.rstrip('/')}/{name}"))
            if path.is_file():
                found[name] = _problem(path)
    return found


def _problem(path: Path) -> str:
    if not path.stat().st_mode & 0o111:
        return "is not executable; chmod +x it"
    # A file that is not an ELF program may be a script.
    with contextlib.suppress(elf.NoProgramError):
        return machine_problem(path)
    return ""


def machine_problem(path: Path) -> str:
    """Return why this machine can't execute the program; empty if it can. Raises OSError, NoProgramError."""
    with path.open("rb") as file:
        foreign = elf.foreign_machine(file.read(elf.HEAD_BYTES))
    return f"is a program for {foreign}, and this node is {os.uname().machine}" if foreign else ""


_SOCKETS: Final = re.compile(r"multus\.sock|\.m[0-9a-f]{8}")
"""Names of daemons' sockets: upstream's, and the temporary one to which our daemon binds before it renames it."""
_ACCEPTS: Final = 0x10000
"""Flag of a listening socket in /proc/net/unix (__SO_ACCEPTCON)."""


def listening() -> set[str]:
    """Return the listening sockets of daemons in the form of /proc/<pid>/fd. Raises OSError."""
    found = set()
    for line in Path("/proc/net/unix").read_text("utf-8", "replace").splitlines()[1:]:
        # Number, references, protocol, flags, type, state, inode, path: proc_pid_net(5).
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and int(fields[3], 16) & _ACCEPTS and _SOCKETS.fullmatch(os.path.basename(fields[7])):
            found.add(f"socket:[{fields[6]}]")
    return found


def holders(sockets: Collection[str]) -> Iterator[str]:
    """Yield a text for each visible process that has one of the sockets open."""
    for directory in Path("/proc").glob("[0-9]*/fd"):
        # A process may end meanwhile, or may not be looked at.
        with contextlib.suppress(OSError):
            if any(os.readlink(directory / name) in sockets for name in os.listdir(directory)):
                yield directory.parent.name
