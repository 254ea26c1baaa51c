"""`python slow_disk.py SECONDS PYTHON -m MODULE ...`: runs the module with an fsync(2) that takes so much longer."""

from __future__ import annotations

import os
import runpy
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

fsync = os.fsync


def slow_fsync(fd: FileDescriptorLike) -> None:
    time.sleep(float(SECONDS))
    fsync(fd)


SECONDS = sys.argv[1]
os.fsync = slow_fsync
module = sys.argv[4]
sys.argv = [module, *sys.argv[5:]]
runpy.run_module(module, run_name="__main__", alter_sys=True)
