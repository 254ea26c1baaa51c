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

NO_NAMESPACE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ENAMETOOLONG})
"""errno values of opening a path if there is certainly no namespace."""
SOMETHING_ELSE: Final = frozenset({errno.ENOTDIR, errno.EINVAL, errno.ENXIO, errno.ENAMETOOLONG})
"""errno values of opening a path at which there is something that is not a container's namespace; ENXIO: a socket."""
_NO_RIGHT: Final = frozenset({errno.EACCES, errno.EPERM})

OWN: Final = "/proc/thread-self/ns/net"
"""Path of the network namespace of the calling thread."""
COOKIE_MARK: Final = "."
"""Separates device and inode from the cookie in an `identity`."""

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
            raise NamespaceError(errno.EINVAL, "not a network namespace, nor one of another kind", path)
        try:
            kind = fcntl.ioctl(descriptor, _NS_GET_NSTYPE)
        except OSError as error:
            raise NamespaceError(errno.EINVAL, "not a network namespace, but a plain file", path) from error
        if kind != _CLONE_NEWNET:
            raise NamespaceError(errno.EINVAL, "not a network namespace, but a namespace of another kind", path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _missing_right(error: OSError, path: str) -> str:
    """Return a text with the capability that the daemon may lack; /proc/<pid> of a container needs CAP_SYS_PTRACE."""
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
    """Return True if there is a network namespace at `path`. Does not block, whatever kind of file it is."""
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

    A file that is not a namespace counts as existing: a namespace whose mount is not visible to the daemon looks so.
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

    Examines each process's main thread. A path that cannot be examined is returned. All of `paths` are returned if a
    process may not be examined (CAP_SYS_PTRACE) or the host's processes are not visible. Raises OSError if /proc cannot
    be read.
    """
    identities: dict[str, tuple[int, int]] = {}
    doubtful: set[str] = set()
    for path in paths:
        try:
            with opened(path) as descriptor:
                identities[path] = _identity(os.fstat(descriptor))
        except NamespaceError as error:
            if error.errno not in NO_NAMESPACE:
                doubtful.add(path)
    if not identities:
        return doubtful
    if not sees_every_process():
        log.warning("the daemon can't see containers' processes (set hostPID): it treats all namespaces as in use")
        return doubtful | set(identities)
    lived_in: set[tuple[int, int]] = set()
    for path in of_processes():
        try:
            lived_in.add(_identity(os.stat(path)))
        except (FileNotFoundError, ProcessLookupError):
            # It has ended.
            continue
        except PermissionError:
            log.warning("the daemon may not examine %s (CAP_SYS_PTRACE): it treats all namespaces as in use", path)
            return doubtful | set(identities)
    return doubtful | {path for path, identity in identities.items() if identity in lived_in}


def of_processes() -> list[str]:
    """Return the path of each process's namespace; the process may have ended. Raises OSError."""
    with os.scandir("/proc") as entries:
        # Not the node's init: it is in the node's namespace, and a policy may forbid to look at it.
        return [f"/proc/{entry.name}/ns/net" for entry in entries if entry.name.isdecimal() and entry.name != "1"]


def _identity(status: os.stat_result) -> tuple[int, int]:
    # namespaces(7): same namespace, same device and inode.
    return status.st_dev, status.st_ino


def sees_every_process() -> bool:
    """Return True in the first PID namespace, and in a container with the PID namespace of its node (`hostPID`).

    There, pid 1 is not of this container, also if the node is a container. In a container with a PID namespace of its
    own, pid 1 is the container's program, in the same mount namespace.
    """
    if os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE:
        return True
    try:
        return _identity(os.stat("/proc/1/ns/mnt")) != _identity(os.stat("/proc/self/ns/mnt"))
    except PermissionError:
        return False


def identity(descriptor: int, cookie: str = "") -> str:
    """Return the identity of a namespace: boot, device and inode, and its cookie if that is known. Raises OSError.

    The kernel may reuse the inode of a removed namespace at once. It never reuses a cookie.
    """
    device, inode = _identity(os.fstat(descriptor))
    # The numbers start again after a reboot.
    return f"{fs.boot()}-{device}-{inode}{COOKIE_MARK}{cookie}" if cookie else f"{fs.boot()}-{device}-{inode}"


def cookie_of(identity: str) -> str:
    """Return the cookie in an `identity`; empty if it has none."""
    return identity.partition(COOKIE_MARK)[2]


def differ(known: str, found: str) -> bool:
    """Return True if the identities are of different namespaces; compares the cookies if both have one."""
    if not (cookie_of(known) and cookie_of(found)):
        known, found = known.partition(COOKIE_MARK)[0], found.partition(COOKIE_MARK)[0]
    return known != found


def require_at(path: str, descriptor: int) -> None:
    """Raise NamespaceError if `path` is no longer the namespace of `descriptor`, which was opened there."""
    try:
        found = _identity(os.stat(path))
    except OSError as error:
        raise NamespaceError(error.errno, error.strerror, path) from error
    if found != _identity(os.fstat(descriptor)):
        raise NamespaceError(errno.EINVAL, "replaced by another network namespace during the request", path)


def enter(descriptor: int) -> None:
    """Move the calling thread into the namespace. Only for a thread that ends afterwards. Raises OSError."""
    if _libc.setns(descriptor, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}")


def _sysctl_path(parts: tuple[str, ...]) -> str:
    # An interface name is one part, dots included; no part may lead elsewhere.
    if any(not part or "/" in part or part in (".", "..") for part in parts):
        raise ValueError(f"not the name of a sysctl: {parts!r}")
    return "/".join((_SYSCTLS, *parts))


def read_sysctl(*parts: str) -> str:
    """Return the value of a network sysctl, e.g. `("ipv6", "conf", "eth0", "accept_ra")`, without its newline.

    /proc/sys/net has the values of the calling thread's namespace, and is never below a chrootDir. Raises OSError.
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
    """Open the sysctl's file in another mount of /proc: /proc/sys is read-only in an unprivileged container.

    Raises `refusal` if there is none.
    """
    if refusal.errno == errno.EROFS:
        for mount in _other_mounts():
            try:
                return os.open(mount + path.removeprefix("/proc"), os.O_WRONLY | os.O_CLOEXEC)
            except OSError:
                continue
    raise refusal


def _other_mounts() -> Iterator[str]:
    """Yield other directories where /proc is mounted as a whole, writable. Format: proc_pid_mountinfo(5)."""
    with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            root, mount_point, options = before.split()[3:6]
            if after.startswith("proc ") and root == "/" and mount_point != "/proc" and "rw" in options.split(","):
                yield re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), mount_point)


def ensure_sysctl(*parts: str, value: str) -> None:
    """Set a value if it is another one, so that a read-only /proc with the right value is no error. Raises OSError."""
    if read_sysctl(*parts) != value:
        write_sysctl(*parts, value=value)
