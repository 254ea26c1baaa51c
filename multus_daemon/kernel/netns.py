"""Network namespaces as paths and file descriptors, and the one place that enters them.

`enter` changes the namespace of the calling thread for good, so it is called by a request's thread only
(`runtime.portal`), which ends with it; the daemon's own threads stay in the host's namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import socket
import stat
import sys
from collections.abc import Collection, Iterator
from typing import Final

from multus_daemon.runtime import fs

_CLONE_NEWNET: Final = 0x40000000
# ioctl_ns(2); since Linux 4.11. It also tells a network namespace from the other kinds, which statfs does not.
_NS_GET_NSTYPE: Final = 0xB703
_OWN_NAMESPACE: Final = "/proc/thread-self/ns/net"
# asm-generic/socket.h; since Linux 5.14.
_SO_NETNS_COOKIE: Final = 71
# PROC_PID_INIT_INO of linux/proc_ns.h.
_FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC

# What opening a path fails with where it is certain that no namespace is there.
_NO_NAMESPACE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EINVAL})

# And where something else is: of a socket, opening says ENXIO.
_SOMETHING_ELSE: Final = frozenset({errno.ENOTDIR, errno.EINVAL, errno.ENXIO})

_NO_RIGHT: Final = frozenset({errno.EACCES, errno.EPERM})

COOKIE_MARK: Final = "."
"""Between an identity's device and inode and its cookie."""

log = logging.getLogger(__name__)

# os.setns is new in Python 3.12.
_libc = ctypes.CDLL(None, use_errno=True)


class NamespaceError(OSError):
    """A path that is no network namespace which could be entered; `filename` is the path, `errno` ENOENT if absent."""

    @property
    def is_absent(self) -> bool:
        """True where nothing is at the path."""
        return self.errno == errno.ENOENT


def open_path(path: str) -> int:
    """A descriptor of the network namespace at `path`, for the caller to close. Raises NamespaceError."""
    try:
        # O_NONBLOCK: whatever is at the path, opening it returns at once (a FIFO would wait for its writer).
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise NamespaceError(error.errno, f"{error.strerror}{_missing_right(error, path)}", path) from error
    except ValueError as error:
        raise NamespaceError(errno.EINVAL, str(error), path) from error
    try:
        _require_netns(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_netns(descriptor: int, path: str) -> None:
    # Only regular files are asked: the ioctl's number can mean something else to a device.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise NamespaceError(errno.EINVAL, "not a network namespace, nor any other namespace", path)
    try:
        kind = fcntl.ioctl(descriptor, _NS_GET_NSTYPE)
    except OSError as error:
        raise NamespaceError(errno.EINVAL, "not a network namespace, but a plain file", path) from error
    if kind != _CLONE_NEWNET:
        raise NamespaceError(errno.EINVAL, "not a network namespace, but one of another kind", path)


def _missing_right(error: OSError, path: str) -> str:
    """What the daemon may lack; looking below the /proc/<pid> of a container counts as tracing it (ptrace(2))."""
    if error.errno not in _NO_RIGHT:
        return ""
    right = "SYS_PTRACE" if path.startswith("/proc/") else "DAC_OVERRIDE"
    return f" (the daemon needs the capability {right} for this path; add it to its container's securityContext)"


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """`open_path` for the duration of a block. Raises NamespaceError."""
    descriptor = open_path(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_own() -> int:
    """A descriptor of the calling thread's namespace, for the caller to close. Raises NamespaceError."""
    return open_path(_OWN_NAMESPACE)


def is_netns(path: str) -> bool:
    """True where `path` is a network namespace that exists. Does not wait, whatever is there."""
    try:
        with opened(path):
            return True
    except NamespaceError:
        return False


def problem(path: str) -> str:
    """Why `path` can't be used as a network namespace, to be put behind the path; empty where it is one."""
    try:
        with opened(path):
            return ""
    except NamespaceError as error:
        return f"may not be opened: {error.strerror}" if error.errno in _NO_RIGHT else "is no network namespace"


def vanished(paths: Collection[str]) -> set[str]:
    """Those of `paths` at which nothing is, in a directory that is there and not below /proc. Blocks.

    A file that is no namespace is not gone: so one looks whose mount this process does not see.
    """
    return {path for path in paths if not path.startswith("/proc/") and _has_vanished(path)}


def _has_vanished(path: str) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return os.path.isdir(os.path.dirname(path))
    except (OSError, ValueError):
        pass
    return False


def inhabited(paths: Collection[str]) -> set[str]:
    """Those of `paths` that are network namespaces with a process in them; one look at every process. Blocks.

    By a process' main thread; a path that can't be looked at counts. Every namespace of `paths` counts where that
    can't be known: where a process may not be looked at (CAP_SYS_PTRACE), or where this one does not see those of the
    host. Raises OSError where /proc can't be read.
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
        # Not the node's init, which is in the node's namespace, and which a policy may keep from being looked at.
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
    """True in the first PID namespace, and in a container with the PID namespace of its node.

    There pid 1 is outside the container (on a node that is a container itself, too); in a PID namespace of its own a
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
    # After a start of the node the numbers begin anew.
    return f"{fs.boot()}-{device}-{inode}{COOKIE_MARK}{cookie}" if cookie else f"{fs.boot()}-{device}-{inode}"


def cookie_of(identity: str) -> str:
    """Return the cookie in an `identity`; empty if it has none."""
    return identity.partition(COOKIE_MARK)[2]


def read_cookie(of_namespace: socket.socket) -> str:
    """Return the cookie of the namespace in which the socket was opened; empty before Linux 5.14."""
    try:
        number = of_namespace.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
    except OSError:
        return ""
    return f"{int.from_bytes(number, sys.byteorder):x}"


def differ(known: str, found: str) -> bool:
    """Report whether two identities are of different namespaces, by their cookies if both have one."""
    if not (cookie_of(known) and cookie_of(found)):
        known, found = known.partition(COOKIE_MARK)[0], found.partition(COOKIE_MARK)[0]
    return known != found


def is_something_else(error: NamespaceError) -> bool:
    """Report whether the path of the error holds something that is no namespace of a container."""
    return error.errno in _SOMETHING_ELSE


def is_same(descriptor: int, other: int) -> bool:
    """True where both are the same namespace."""
    return os.path.sameopenfile(descriptor, other)


def require_at(path: str, descriptor: int) -> None:
    """Raise NamespaceError where `path` is not the namespace of `descriptor`, which was opened there."""
    try:
        found = _identity(os.stat(path))
    except OSError as error:
        raise NamespaceError(error.errno, error.strerror, path) from error
    if found != _identity(os.fstat(descriptor)):
        raise NamespaceError(errno.EINVAL, "not the network namespace any more that it has been", path)


def enter(descriptor: int) -> None:
    """Move the calling thread into the namespace. Only for a thread that ends afterwards. Raises OSError."""
    if _libc.setns(descriptor, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}")
