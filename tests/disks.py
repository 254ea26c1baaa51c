"""Change a file system for the tests of disk faults."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import needed


def fill(disk: Path) -> Path:
    """Fill a file system to its last page; the file to remove for room again."""
    filler = disk / "filler"
    descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        while os.write(descriptor, bytes(4096)):
            pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    finally:
        os.close(descriptor)
    return filler


def make_read_only(disk: Path) -> None:
    """No write gets through; who has a file open for writing keeps the kernel from it."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


def make_writable(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


@contextlib.contextmanager
def hanging(directory: Path, process: int | None = None) -> Iterator[None]:
    """Mount a disk over `directory` that answers nothing, as a dead NFS server does; the block's end releases waiters.

    It is a FUSE file system without a program behind it. As with NFS, only SIGKILL ends a process that waits for it.
    `process`: whose mounts it is among; those of the tests if None.
    """
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and /dev/fuse, for a disk that hangs: run pytest as root, modprobe fuse")
    descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0"
    there = [needed("nsenter"), f"--mount=/proc/{process or os.getpid()}/ns/mnt"]
    try:
        mount = [*there, "mount", "-i", "-t", "fuse", "-o", options, "hanging", str(directory)]
        subprocess.run(mount, check=True, pass_fds=[descriptor])
        yield
    finally:
        os.close(descriptor)
        # The mounts of a process end with it.
        if process is None:
            subprocess.run(["umount", "-l", str(directory)], check=True)
