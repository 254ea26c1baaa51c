"""List the plugins of this node: built-ins and the binaries of `binDir`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from multus_daemon.plugins.builtin.registry import PLUGINS
from multus_daemon.runtime import elf, fs
from multus_daemon.settings import Settings
from multus_daemon.spec.attachment import BUILT_IN


def of(settings: Settings) -> dict[str, Any]:
    """Return the plugins by type. Raises OSError if the directory can't be listed."""
    binaries = _binaries(settings)
    found = []
    for name in sorted({*binaries, *PLUGINS}):
        is_built_in = name in PLUGINS and name not in settings.plugins.builtin_plugins_except
        mode = settings.plugins.builtin_plugins if is_built_in else "off"
        if mode == "prefer" or (mode == "fallback" and name not in binaries):
            served_by, problem = BUILT_IN, ""
        elif name in binaries:
            served_by, problem = f"{settings.paths.bin_dir.rstrip('/')}/{name}", binaries[name]
        else:
            continue
        found.append({"type": name, "servedBy": served_by, "problem": problem})
    return {"schema": "multusctl.plugins/v1", "plugins": found}


def _binaries(settings: Settings) -> dict[str, str]:
    """Return by the name of each file why it can't be run; empty if it can."""
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
