"""Network sysctls of the namespace that the calling thread is in.

/proc/sys/net shows each thread the values of its own network namespace; `kernel.ops.PodNetns` decides which that is.
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
    # An interface name is one part, dots included; no part may lead elsewhere.
    if any(not part or "/" in part or part in (".", "..") for part in parts):
        raise ValueError(f"no name of a sysctl: {parts!r}")
    return "/".join((_ROOT, *parts))


def read(*parts: str) -> str:
    """Return the value of e.g. `("ipv6", "conf", "eth0", "accept_ra")`, without its newline.

    Raises OSError, path included.
    """
    # As `write`: a buffered file in text mode takes four times as long.
    descriptor = os.open(_path(parts), os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MAX_BYTES).decode("ascii").strip()
    finally:
        os.close(descriptor)


def write(*parts: str, value: str) -> None:
    """Set a value; parts as for `read`. Raises OSError, path included."""
    path = _path(parts)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        descriptor = _open_elsewhere(path, error)
    try:
        # One write(2) without buffering, so that the kernel's refusal comes from here, not from a later close.
        os.write(descriptor, value.encode("ascii"))
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.close(descriptor)


def _open_elsewhere(path: str, refusal: OSError) -> int:
    """Open the file by another mount: /proc/sys is read-only in an unprivileged container. Raises `refusal`."""
    if refusal.errno == errno.EROFS:
        for mount in _other_mounts():
            try:
                return os.open(mount + path.removeprefix("/proc"), os.O_WRONLY | os.O_CLOEXEC)
            except OSError:
                continue
    raise refusal


def _other_mounts() -> Iterator[str]:
    """Yield where else all of /proc is mounted, writable: below a chrootDir. Format: proc_pid_mountinfo(5)."""
    with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            root, mount_point, options = before.split()[3:6]
            if after.startswith("proc ") and root == "/" and mount_point != "/proc" and "rw" in options.split(","):
                yield re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), mount_point)


def ensure(*parts: str, value: str) -> None:
    """Set a value unless it is set already, so that a read-only /proc with that value is fine. Raises OSError."""
    if read(*parts) != value:
        write(*parts, value=value)
