"""The kernel's settings and the disk of the node."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from multus_daemon.diagnosis.doctor.finding import Finding, Node

_LEAST_FREE_BYTES: Final = 16 * 1024 * 1024
_LEAST_FREE_INODES: Final = 1000
_IP_FORWARD: Final = {"IPv4": "net/ipv4/ip_forward", "IPv6": "net/ipv6/conf/all/forwarding"}


def kernel(node: Node) -> Iterator[Finding]:
    """Check that the kernel forwards."""
    for family, name in _IP_FORWARD.items():
        path = node.proc / "sys" / name
        try:
            is_on = path.read_text().strip() == "1"
        except FileNotFoundError:
            yield Finding("kernel", "info", family, "this kernel has no such networking", "nothing, if no pod needs it")
            continue
        if not is_on:
            evidence = "is 0: pods of routed networks and of bridges reach nobody beyond the node"
            advice = f"sysctl -w {name.replace('/', '.')}=1, if this node routes for pods"
            yield Finding("kernel", "info", str(path), evidence, advice)


def disk(node: Node) -> Iterator[Finding]:
    """Check room and modes of `cniDir`, and DELs that could not be served."""
    directory = Path(node.settings.paths.cni_dir)
    room = os.statvfs(directory)
    if room.f_flag & os.ST_RDONLY:
        yield Finding("disk", "error", str(directory), "is read-only: no pod can be attached", "mount it for writing")
    elif room.f_bavail * room.f_frsize < _LEAST_FREE_BYTES:
        evidence = f"{room.f_bavail * room.f_frsize // 1024} KiB are free: ADDs fail where a record can't be written"
        yield Finding(
            "disk", "error", str(directory), evidence, f"make room; see du -x {directory} and its file system"
        )
    elif room.f_files and room.f_favail < _LEAST_FREE_INODES:
        evidence = f"{room.f_favail} inodes are free: ADDs fail where a record can't be written"
        yield Finding("disk", "error", str(directory), evidence, "remove small files from this file system")
    for path in (directory / "attachments", directory / "results"):
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except FileNotFoundError:
            continue
        if mode & 0o077:
            evidence = f"mode {mode:04o}: others can see, or change, what is attached"
            advice = f"chmod 700 {path}"
            yield Finding("disk", "warning", str(path), evidence, advice, _chmod(path, 0o700), "chmod 700")
    rejected = directory / "spool" / "rejected"
    if rejected.is_dir() and (entries := sorted(os.listdir(rejected))):
        evidence = f"{len(entries)} DELs could not be served, {entries[0]} for one"
        advice = "the daemon's log says why; multusctl attachments --leaks shows what is left, then remove the files"
        yield Finding("spool", "warning", str(rejected), evidence, advice)


def _chmod(path: Path, mode: int) -> Callable[[], None]:
    return lambda: path.chmod(mode)
