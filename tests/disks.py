"""What the tests of disk faults do to a file system."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path


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
    """As it was."""
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
