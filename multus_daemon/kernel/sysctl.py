"""Network sysctls of the namespace that the calling thread is in.

/proc/sys/net shows each thread the values of its own network namespace; `kernel.ops.Session` decides which that is.
The files are the kernel's, never below a chrootDir.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from typing import Final

_ROOT: Final = "/proc/sys/net"
_MOUNTS: Final = "/proc/self/mountinfo"
_MAX_BYTES: Final = 4096


def _path(parts: tuple[str, ...]) -> str:
    # An interface name is one part, dots in it included; nothing may lead elsewhere.
    if any(not part or "/" in part or part in (".", "..") for part in parts):
        raise ValueError(f"no name of a sysctl: {parts!r}")
    return "/".join((_ROOT, *parts))


def read(*parts: str) -> str:
    """The value of e.g. `("ipv6", "conf", "eth0", "accept_ra")`, without its newline. Raises OSError, path included."""
    # As `write`: a buffered file in text mode costs four times as much.
    descriptor = os.open(_path(parts), os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MAX_BYTES).decode("ascii").strip()
    finally:
        os.close(descriptor)


def write(*parts: str, value: str) -> None:
    """Set a value; parts as for `read`. Raises OSError, path included."""
    path = _path(parts)
    # One write(2) without buffering: the kernel's refusal comes from here, not from a later close.
    descriptor = _open(path)
    try:
        os.write(descriptor, value.encode("ascii"))
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.close(descriptor)


def _open(path: str) -> int:
    """For writing. A container that is not privileged has /proc/sys read-only; its node's /proc, if mounted, is not."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        for mount in _other_mounts():
            try:
                return os.open(mount + path.removeprefix("/proc"), os.O_WRONLY | os.O_CLOEXEC)
            except OSError:
                continue
        raise


def _other_mounts() -> Iterator[str]:
    """Where else /proc is mounted, writable as a whole: below a chrootDir. Format: proc_pid_mountinfo(5)."""
    with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            root, mount_point, options = before.split()[3:6]
            if after.startswith("proc ") and root == "/" and mount_point != "/proc" and "rw" in options.split(","):
                yield re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), mount_point)


def ensure(*parts: str, value: str) -> None:
    """Set a value only where it is another one, so that a read-only /proc is fine where it holds. Raises OSError."""
    if read(*parts) != value:
        write(*parts, value=value)
