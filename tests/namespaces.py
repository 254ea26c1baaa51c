"""Network namespaces for tests, by system calls: no program of the host is needed."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

NAMED: Final = Path("/run/netns")
"""The directory of `ip netns`."""
OWN: Final = "/proc/thread-self/ns/net"
IFF_UP: Final = 1
HOW: Final = "needs root or a user namespace: run it as root, or under `unshare -Urnm`"

_FIRST_PID_NAMESPACE = 0xEFFFFFFC
_CLONE_NEWNET = 0x40000000
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_SHARED = 1 << 20
_MNT_DETACH = 2
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_libc = ctypes.CDLL(None, use_errno=True)


def _system(status: int) -> None:
    """Raise OSError for the status of a system call that failed."""
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def require_every_process() -> None:
    """Skip the test in a process namespace, such as a container's: who lives in a namespace can't be seen there."""
    if os.stat("/proc/self/ns/pid").st_ino != _FIRST_PID_NAMESPACE:
        pytest.skip(
            "needs the processes of the whole machine: run the tests outside of a container, or with its host's"
        )


def unshare() -> None:
    """Move the thread into a new network namespace. Raises OSError."""
    _system(_libc.unshare(_CLONE_NEWNET))


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """After the block the thread is in the namespace in which it was before."""
    before = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        # Only root may go anywhere, and nobody else has left.
        if not os.path.samestat(os.stat(OWN), os.fstat(before)):
            _system(_libc.setns(before, _CLONE_NEWNET))
        os.close(before)


@contextlib.contextmanager
def entered(path: str) -> Iterator[None]:
    """The thread is in the namespace for the duration of a block, as are the programs that it starts there.

    An empty path is the namespace in which the thread is.
    """
    if not path:
        yield
        return
    there = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with kept():
            _system(_libc.setns(there, _CLONE_NEWNET))
            yield
    finally:
        os.close(there)


def flags(ifname: str) -> int:
    """Return the flags (IFF_*) of a link of the thread's namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as kernel:
        answer = fcntl.ioctl(kernel, _SIOCGIFFLAGS, struct.pack("16sh22x", ifname.encode(), 0))
    return int(struct.unpack_from("H", answer, 16)[0])


def set_up(ifname: str) -> None:
    """Set a link of the thread's namespace up, which has no other flag yet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as kernel:
        fcntl.ioctl(kernel, _SIOCSIFFLAGS, struct.pack("16sh22x", ifname.encode(), IFF_UP))


def make_at(path: Path) -> None:
    """Make a namespace, which lives as long as it is mounted at `path`. Raises OSError."""
    path.touch()
    failures: list[OSError] = []

    def work() -> None:
        try:
            unshare()
            _system(_libc.mount(OWN.encode(), bytes(path), None, _MS_BIND, None))
        except OSError as error:
            failures.append(error)

    # The thread ends in the namespace, and this one has never been there.
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failures:
        path.unlink()
        raise failures[0]


def remove_netns(path: Path) -> None:
    """Remove a namespace like `ip netns del`; a missing one counts as removed."""
    _libc.umount2(bytes(path), _MNT_DETACH)
    path.unlink(missing_ok=True)


def add(name: str) -> str:
    """Make a namespace below /run/netns, like `ip netns add`, and return its path. Skips the test without root."""
    if os.geteuid() != 0:
        pytest.skip(HOW)
    NAMED.mkdir(exist_ok=True)
    _share()
    make_at(NAMED / name)
    return str(NAMED / name)


def _share() -> None:
    """Make /run/netns a shared mount, like `ip netns add`: a daemon with mounts of its own sees later namespaces."""
    directory = os.open(NAMED, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Released with the descriptor. Two tests at once would mount it twice.
        fcntl.flock(directory, fcntl.LOCK_EX)
        if _libc.mount(b"", bytes(NAMED), None, _MS_SHARED | _MS_REC, None):
            _system(_libc.mount(bytes(NAMED), bytes(NAMED), None, _MS_BIND | _MS_REC, None))
            _system(_libc.mount(b"", bytes(NAMED), None, _MS_SHARED | _MS_REC, None))
    finally:
        os.close(directory)


@contextlib.contextmanager
def named(purpose: str) -> Iterator[str]:
    """A namespace below /run/netns for the duration of a block; its path."""
    path = add(f"mlt-{purpose}-{uuid.uuid4().hex[:8]}")
    try:
        yield path
    finally:
        remove_netns(Path(path))
