"""A root file system of Debian's packages, and how pip reaches a package index in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.programs import missing, needed, path_of

SUITE: Final = "bookworm"
_MIRROR: Final = "http://deb.debian.org/debian"
_PIP_KEYS: Final = {"index-url", "extra-index-url", "trusted-host", "proxy", "cert", "timeout"}


class DebianError(Exception):
    """The root file system can't be made; the message says why."""


def mirror() -> str:
    """Return DEBIAN_MIRROR, or the mirror of SUITE in this machine's configuration of apt, or Debian's own."""
    if given := os.environ.get("DEBIAN_MIRROR"):
        return given
    if not (apt := path_of("apt-get")):
        return _MIRROR
    command = [apt, "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    for line in listed.splitlines():
        suite, _, address = line.partition(" ")
        if suite == SUITE:
            return address
    return _MIRROR


def bootstrap(root: Path, packages: Sequence[str]) -> None:
    """Make the root file system of Debian's smallest variant and these packages. Raises DebianError."""
    if reason := missing("debootstrap"):
        raise DebianError(reason)
    command = [
        needed("debootstrap"),
        "--variant=minbase",
        f"--include={','.join(packages)}",
        SUITE,
        str(root),
        mirror(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise DebianError(f"debootstrap failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def pip_settings() -> dict[str, str]:
    """Return this machine's settings of pip that decide how it reaches the index, by their names in `pip.conf`."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    settings = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2].removeprefix("default-")
        if name in _PIP_KEYS:
            settings[name] = value.strip("'")
    return settings


def pip_conf(settings: dict[str, str]) -> str:
    """Return the text of a `pip.conf`."""
    return "[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())
