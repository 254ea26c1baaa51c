"""Which plugins there are on this node: the built-in ones, and the binaries of `binDir`.

    {"schema": "multusctl.plugins/v1", "plugins": [
      {"type": "bridge", "servedBy": "built-in" or a path as the host names it,
       "problem": <why it can't be run; empty: it can>}]}

`servedBy` is who attaches a network of that type where both know all of its configuration.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Final

from multus_daemon.plugins.builtin.runner import PLUGINS
from multus_daemon.runtime import elf, fs
from multus_daemon.settings import Settings
from multus_daemon.spec.attachment import BUILT_IN

SCHEMA: Final = "multusctl.plugins/v1"


def of(settings: Settings) -> dict[str, Any]:
    """By type. Raises OSError where the directory can't be listed."""
    binaries = _binaries(settings)
    found = []
    for name in sorted({*binaries, *PLUGINS}):
        mode = settings.plugins.builtin_plugins
        if name not in PLUGINS or name in settings.plugins.builtin_plugins_except:
            mode = "off"
        if mode == "prefer" or (mode == "fallback" and name not in binaries):
            served_by, problem = BUILT_IN, ""
        elif name in binaries:
            served_by, problem = f"{settings.paths.bin_dir.rstrip('/')}/{name}", binaries[name]
        else:
            continue
        found.append({"type": name, "servedBy": served_by, "problem": problem})
    return {"schema": SCHEMA, "plugins": found}


def _binaries(settings: Settings) -> dict[str, str]:
    """Why each file of the directory can't be run, by its name; empty where it can."""
    directory = Path(fs.resolve(settings.paths.chroot_dir, settings.paths.bin_dir))
    found = {}
    for name in os.listdir(directory):
        if name == settings.primary.plugin_type or name.startswith("."):
            continue
        # A link that leads nowhere, a file that is replaced now.
        with contextlib.suppress(OSError):
            path = Path(fs.resolve(settings.paths.chroot_dir, f"{settings.paths.bin_dir.rstrip('/')}/{name}"))
            if path.is_file():
                found[name] = _problem(path)
    return found


def _problem(path: Path) -> str:
    if not path.stat().st_mode & 0o111:
        return "is not executable; chmod +x it"
    try:
        with path.open("rb") as file:
            foreign = elf.foreign_machine(file.read(elf.HEAD_BYTES))
    except elf.NoProgramError:
        # A script, as far as can be seen.
        return ""
    return f"is a program for {foreign}, and this node is {os.uname().machine}" if foreign else ""
