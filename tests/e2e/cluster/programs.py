"""The programs that a node needs from the machine that the tests run on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tests.programs import missing

PROGRAMS: Final = ("containerd", "ctr", "containerd-shim-runc-v2", "runc", "busybox", "iptables", "nsenter", "ip")
"""The programs of the host that a node needs besides those that `build_tools` makes."""

REFERENCE: Final = Path(os.environ.get("CNI_REFERENCE_DIR", "/usr/lib/cni"))
"""Where the reference plugins come from."""


class NodeError(Exception):
    """The machine can't run a node; the message says what is missing, or the node did not do what was asked in time."""


def require() -> None:
    """Raises NodeError where the machine can't run a node."""
    if os.geteuid() != 0:
        raise NodeError("a node needs root")
    reasons = [reason] if (reason := missing(*PROGRAMS)) else []
    if not (REFERENCE / "bridge").exists():
        reasons.append("needs the reference plugins: apt-get install containernetworking-plugins")
    if reasons:
        raise NodeError(f"a node {'; '.join(reasons)}")
    if not any(line.split()[-1] == "overlay" for line in Path("/proc/filesystems").read_text().splitlines()):
        raise NodeError("a node needs the overlay file system, which this kernel does not have: modprobe overlay")
