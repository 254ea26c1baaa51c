"""Network namespaces as paths and file descriptors, and the one place that enters them.

`enter` changes the namespace of the calling thread for good, so it is called by throw-away threads only
(`netlink.thread`); the daemon's own threads stay in the host's namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from typing import Final

_CLONE_NEWNET: Final = 0x40000000
# ioctl_ns(2); since Linux 4.11. It also tells a network namespace from the other kinds, which statfs does not.
_NS_GET_NSTYPE: Final = 0xB703
_OWN_NAMESPACE: Final = "/proc/thread-self/ns/net"

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
        raise NamespaceError(error.errno, error.strerror, path) from error
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


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """`open_path` for the duration of a block. Raises NamespaceError."""
    descriptor = open_path(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def own() -> Iterator[int]:
    """A descriptor of the calling thread's namespace for the duration of a block. Raises NamespaceError."""
    with opened(_OWN_NAMESPACE) as descriptor:
        yield descriptor


def is_netns(path: str) -> bool:
    """True where `path` is a network namespace that exists. Does not wait, whatever is there."""
    try:
        with opened(path):
            return True
    except NamespaceError:
        return False


def is_same(descriptor: int, other: int) -> bool:
    """True where both are the same namespace."""
    return os.path.sameopenfile(descriptor, other)


def enter(descriptor: int) -> None:
    """Move the calling thread into the namespace. Only for a thread that ends afterwards. Raises OSError."""
    if _libc.setns(descriptor, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}")
