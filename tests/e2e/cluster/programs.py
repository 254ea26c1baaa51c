"""The programs that a node needs from the machine that the tests run on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

PACKAGES: Final = {
    "containerd": "containerd",
    "ctr": "containerd",
    "containerd-shim-runc-v2": "containerd",
    "runc": "runc",
    "busybox": "busybox-static",
    "iptables": "iptables",
    "nsenter": "util-linux",
    "ip": "iproute2",
}
"""Debian's package of each program that is needed besides those that `build_tools` makes."""

REFERENCE: Final = Path(os.environ.get("CNI_REFERENCE_DIR", "/usr/lib/cni"))
"""Where the reference plugins come from."""


class NodeError(Exception):
    """The machine can't run a node; the message says what is missing, or the node did not do what was asked in time."""


def require() -> None:
    """Raises NodeError where the machine can't run a node."""
    if os.geteuid() != 0:
        raise NodeError("a node needs root")
    missing = {package for program, package in PACKAGES.items() if not shutil.which(program)}
    if not (REFERENCE / "bridge").exists():
        missing.add("containernetworking-plugins")
    if missing:
        raise NodeError(f"a node needs programs that are not here: apt-get install {' '.join(sorted(missing))}")
    if not any(line.split()[-1] == "overlay" for line in Path("/proc/filesystems").read_text().splitlines()):
        raise NodeError("a node needs the overlay file system, which this kernel does not have: modprobe overlay")
