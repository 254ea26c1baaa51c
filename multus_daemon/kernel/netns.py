"""Network namespaces as paths and file descriptors, and their sysctls.

`enter` changes the namespace of the calling thread. Only a request's thread calls it, which ends with the request
(`runtime.portal`); the daemon's own threads stay in the host's namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import stat
from collections.abc import Collection, Iterator
from typing import Final

from multus_daemon.runtime import fs

_SYSCTLS: Final = "/proc/sys/net"
_MOUNTS: Final = "/proc/self/mountinfo"
_SYSCTL_MAX_BYTES: Final = 4096
_CLONE_NEWNET: Final = 0x40000000
# ioctl_ns(2); since Linux 4.11. Unlike statfs, it reports the kind of the namespace.
_NS_GET_NSTYPE: Final = 0xB703
# PROC_PID_INIT_INO of linux/proc_ns.h.
_FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC

# Opening a path fails with these if there is certainly no namespace.
_NO_NAMESPACE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ENAMETOOLONG})
# Opening a path fails with these if it holds something else; ENXIO: a socket.
_SOMETHING_ELSE: Final = frozenset({errno.ENOTDIR, errno.EINVAL, errno.ENXIO, errno.ENAMETOOLONG})
_NO_RIGHT: Final = frozenset({errno.EACCES, errno.EPERM})

OWN: Final = "/proc/thread-self/ns/net"
"""The namespace of the calling thread."""
COOKIE_MARK: Final = "."
"""Separates an identity's device and inode from its cookie."""

log = logging.getLogger(__name__)

# os.setns is new in Python 3.12.
_libc = ctypes.CDLL(None, use_errno=True)


class NamespaceError(OSError):
    """A path is not a network namespace that can be entered; `filename` is the path, `errno` ENOENT if absent."""

    @property
    def is_absent(self) -> bool:
        """True if nothing is at the path."""
        return self.errno == errno.ENOENT


def open_path(path: str) -> int:
    """Return a descriptor of the network namespace at `path`; the caller closes it. Raises NamespaceError."""
    try:
        # O_NONBLOCK: opening returns at once, whatever is at the path (a FIFO would wait for its writer).
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise NamespaceError(error.errno, f"{error.strerror}{_missing_right(error, path)}", path) from error
    except ValueError as error:
        raise NamespaceError(errno.EINVAL, str(error), path) from error
    try:
        # Only a regular file: the ioctl's number can mean something else to a device.
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NamespaceError(errno.EINVAL, "not a network namespace, nor any other namespace", path)
        try:
            kind = fcntl.ioctl(descriptor, _NS_GET_NSTYPE)
        except OSError as error:
            raise NamespaceError(errno.EINVAL, "not a network namespace, but a plain file", path) from error
        if kind != _CLONE_NEWNET:
            raise NamespaceError(errno.EINVAL, "not a network namespace, but one of another kind", path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _missing_right(error: OSError, path: str) -> str:
    """Name the capability that the daemon may lack; access below the /proc/<pid> of a container is ptrace(2)'s."""
    if error.errno not in _NO_RIGHT:
        return ""
    right = "SYS_PTRACE" if path.startswith("/proc/") else "DAC_OVERRIDE"
    return f" (the daemon needs the capability {right} for this path; add it to its container's securityContext)"


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """Open the namespace at `path` for the duration of a block. Raises NamespaceError."""
    descriptor = open_path(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_netns(path: str) -> bool:
    """Report whether `path` is a network namespace that exists. Does not wait, whatever is there."""
    return not problem(path)


def problem(path: str) -> str:
    """Return why `path` cannot be used as a network namespace, to follow the path in a message; empty if it can."""
    try:
        os.close(open_path(path))
    except NamespaceError as error:
        return f"may not be opened: {error.strerror}" if error.errno in _NO_RIGHT else "is no network namespace"
    return ""


def vanished(paths: Collection[str]) -> set[str]:
    """Return those of `paths` that do not exist, in a directory that does, and not below /proc. Blocks.

    A file that is not a namespace counts as existing: a namespace whose mount is not visible here looks like that.
    """
    gone = set()
    for path in paths:
        try:
            os.lstat(path)
        except FileNotFoundError:
            if not path.startswith("/proc/") and os.path.isdir(os.path.dirname(path)):
                gone.add(path)
        except (OSError, ValueError):
            continue
    return gone


def inhabited(paths: Collection[str]) -> set[str]:
    """Return those of `paths` that are network namespaces with a process in them; looks once at every process. Blocks.

    Looks at each process' main thread. A path that cannot be examined counts. Every namespace of `paths` counts if a
    process may not be examined (CAP_SYS_PTRACE) or if the processes of the host are not visible. Raises OSError if
    /proc cannot be read.
    """
    identities: dict[str, tuple[int, int]] = {}
    doubtful: set[str] = set()
    for path in paths:
        try:
            with opened(path) as descriptor:
                identities[path] = _identity(os.fstat(descriptor))
        except NamespaceError as error:
            if error.errno not in _NO_NAMESPACE:
                doubtful.add(path)
    if not identities:
        return doubtful
    if not _sees_every_process():
        log.warning("processes of containers can't be seen from here (hostPID): all namespaces count as in use")
        return doubtful | set(identities)
    lived_in: set[tuple[int, int]] = set()
    with os.scandir("/proc") as entries:
        # Not the node's init: it is in the node's namespace, and a policy may forbid to look at it.
        processes = [entry.name for entry in entries if entry.name.isdecimal() and entry.name != "1"]
    for process in processes:
        try:
            lived_in.add(_identity(os.stat(f"/proc/{process}/ns/net")))
        except (FileNotFoundError, ProcessLookupError):
            # It has ended.
            continue
        except PermissionError:
            log.warning("process %s may not be looked at (CAP_SYS_PTRACE): all namespaces count as in use", process)
            return doubtful | set(identities)
    return doubtful | {path for path, identity in identities.items() if identity in lived_in}


def _identity(status: os.stat_result) -> tuple[int, int]:
    # namespaces(7): same namespace, same device and inode.
    return status.st_dev, status.st_ino


def _sees_every_process() -> bool:
    """Report whether this is the first PID namespace, or a container with the PID namespace of its node.

    There pid 1 is outside the container, also on a node that is itself a container. In a PID namespace of its own a
    container has its own program as pid 1, which shares its mount namespace.
    """
    if os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE:
        return True
    try:
        return _identity(os.stat("/proc/1/ns/mnt")) != _identity(os.stat("/proc/self/ns/mnt"))
    except PermissionError:
        return False


def identity(descriptor: int, cookie: str = "") -> str:
    """Return the identity of a namespace: boot, device and inode, and its cookie if that is known. Raises OSError.

    The kernel gives the inode of a removed namespace to the next one at once. The cookie is never given twice.
    """
    device, inode = _identity(os.fstat(descriptor))
    # The numbers start again after a reboot.
    return f"{fs.boot()}-{device}-{inode}{COOKIE_MARK}{cookie}" if cookie else f"{fs.boot()}-{device}-{inode}"


def cookie_of(identity: str) -> str:
    """Return the cookie in an `identity`; empty if it has none."""
    return identity.partition(COOKIE_MARK)[2]


def differ(known: str, found: str) -> bool:
    """Report whether two identities are of different namespaces, by their cookies if both have one."""
    if not (cookie_of(known) and cookie_of(found)):
        known, found = known.partition(COOKIE_MARK)[0], found.partition(COOKIE_MARK)[0]
    return known != found


def is_something_else(error: NamespaceError) -> bool:
    """Report whether the path of the error holds something that is not a container's namespace."""
    return error.errno in _SOMETHING_ELSE


def is_same(descriptor: int, other: int) -> bool:
    """Report whether both descriptors are of the same namespace."""
    return os.path.sameopenfile(descriptor, other)


def require_at(path: str, descriptor: int) -> None:
    """Raise NamespaceError if `path` is no longer the namespace of `descriptor`, which was opened there."""
    try:
        found = _identity(os.stat(path))
    except OSError as error:
        raise NamespaceError(error.errno, error.strerror, path) from error
    if found != _identity(os.fstat(descriptor)):
        raise NamespaceError(errno.EINVAL, "another network namespace than the one that was opened here", path)


def enter(descriptor: int) -> None:
    """Move the calling thread into the namespace. Only for a thread that ends afterwards. Raises OSError."""
    if _libc.setns(descriptor, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}")


def _sysctl_path(parts: tuple[str, ...]) -> str:
    # An interface name is one part, dots included; no part may lead elsewhere.
    if any(not part or "/" in part or part in (".", "..") for part in parts):
        raise ValueError(f"no name of a sysctl: {parts!r}")
    return "/".join((_SYSCTLS, *parts))


def read_sysctl(*parts: str) -> str:
    """Return the value of a network sysctl, e.g. `("ipv6", "conf", "eth0", "accept_ra")`, without its newline.

    /proc/sys/net has the values of the namespace that the calling thread is in, and is never below a chrootDir. Raises
    OSError, path included.
    """
    # As `write_sysctl`: a buffered file in text mode takes four times as long.
    descriptor = os.open(_sysctl_path(parts), os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _SYSCTL_MAX_BYTES).decode("ascii").strip()
    finally:
        os.close(descriptor)


def write_sysctl(*parts: str, value: str) -> None:
    """Set a value; parts as for `read_sysctl`. Raises OSError, path included."""
    path = _sysctl_path(parts)
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


def ensure_sysctl(*parts: str, value: str) -> None:
    """Set a value unless it is set already, so that a read-only /proc with that value is fine. Raises OSError."""
    if read_sysctl(*parts) != value:
        write_sysctl(*parts, value=value)
