"""`python hanging_disk.py NAME FLAG PYTHON -m MODULE ...`: runs the module, and while the file FLAG is there, opening a
file called NAME waits, as it does on a disk that hangs."""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

open_file = os.open


def hanging_open(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
    while Path(os.fsdecode(path)).name == NAME and FLAG.exists():
        time.sleep(0.01)
    return open_file(path, flags, *arguments, **named)


NAME, FLAG = sys.argv[1], Path(sys.argv[2])
os.open = hanging_open
module = sys.argv[5]
sys.argv = [module, *sys.argv[6:]]
runpy.run_module(module, run_name="__main__", alter_sys=True)
