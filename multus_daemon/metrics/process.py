"""What the kernel says about this process, in the names that all exporters use. Reads /proc."""

from __future__ import annotations

import functools
import os
import resource
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
# Fields of /proc/self/stat behind the name, which may have spaces: proc_pid_stat(5) counts from 1, the name is 2.
_UTIME, _STIME, _STARTTIME, _RSS = (field - 3 for field in (14, 15, 22, 24))


def figures() -> dict[str, float]:
    """Return the values of the `process_` metrics by name; empty if /proc cannot be read."""
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return {
            "process_cpu_seconds_total": (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS,
            "process_resident_memory_bytes": float(int(fields[_RSS]) * _PAGE),
            # The clock may be set later: what was read first stays.
            "process_start_time_seconds": _booted() + int(fields[_STARTTIME]) / _TICKS,
            "process_open_fds": float(len(os.listdir("/proc/self/fd"))),
            "process_max_fds": float(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        }
    except (OSError, ValueError, IndexError):
        return {}


@functools.cache
def _booted() -> float:
    """Return the Unix time of the boot in seconds. Raises OSError, ValueError."""
    with open("/proc/stat", "rb") as file:
        for line in file:
            if line.startswith(b"btime "):
                return float(line.split()[1])
    raise ValueError("/proc/stat has no btime")
