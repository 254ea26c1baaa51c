"""Network sysctls of the namespace that the calling thread is in.

/proc/sys/net shows each thread the values of its own network namespace; `netlink.ops.Session` decides which that is.
The files are the kernel's, never below a chrootDir.
"""

from __future__ import annotations

import os
from typing import Final

_ROOT: Final = "/proc/sys/net"


def _path(parts: tuple[str, ...]) -> str:
    # An interface name is one part, dots in it included; nothing may lead elsewhere.
    if any(not part or "/" in part or part in (".", "..") for part in parts):
        raise ValueError(f"no name of a sysctl: {parts!r}")
    return "/".join((_ROOT, *parts))


def read(*parts: str) -> str:
    """The value of e.g. `("ipv6", "conf", "eth0", "accept_ra")`, without its newline. Raises OSError, path included."""
    with open(_path(parts), encoding="ascii") as file:
        return file.read().strip()


def write(*parts: str, value: str) -> None:
    """Set a value; parts as for `read`. Raises OSError, path included."""
    path = _path(parts)
    # One write(2) without buffering: the kernel's refusal comes from here, not from a later close.
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, value.encode("ascii"))
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.close(descriptor)


def ensure(*parts: str, value: str) -> None:
    """Set a value only where it is another one, so that a read-only /proc is fine where it holds. Raises OSError."""
    if read(*parts) != value:
        write(*parts, value=value)
