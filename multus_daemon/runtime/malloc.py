"""glibc's malloc, set for a process that runs for months: what is freed can be used again, or goes back to the kernel.

By itself glibc gives a block of 128 KiB or more a mapping of its own, which ends with it, but each one that is freed
raises that bound to its size (mallopt(3), M_MMAP_THRESHOLD). From then on blocks of that size come from the heap of the
thread that asks. Each thread has a heap, what is freed in one is of no use to the others, and of what is free in a heap
only its end goes back to the kernel.
"""

from __future__ import annotations

import asyncio
import ctypes
from typing import Final

# Of <malloc.h>.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

_LARGE: Final = 128 * 1024
"""Bytes; what glibc begins with, for both bounds. Setting them keeps them there.

CPython's table of interned strings is what needs it: 1.9 MiB. `pathlib` interns each part of every path, names of
containers too: 24 for an ADD and its DEL. They go, their places in the table don't, so that it is copied every 2,300
pairs, by any thread. Twelve threads that take such parts in turn grew by 1.9 MiB with each copy, 15 MiB over 24,000
pairs; set like this, by nothing.
"""

TRIM_SECONDS: Final = 10.0


def settle() -> bool:
    """Set it for this process, before there are threads. False where malloc is not glibc's, and is left as it is."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    # One heap: of threads that all wait for the interpreter's lock no two allocate at once.
    wanted = ((_M_MMAP_THRESHOLD, _LARGE), (_M_TRIM_THRESHOLD, _LARGE), (_M_ARENA_MAX, 1))
    return all(bool(mallopt(parameter, value)) for parameter, value in wanted)


async def keep_trimmed(every: float = TRIM_SECONDS) -> None:
    """Give the heap's free pages back each `every` seconds, for ever; a root task.

    What is in use stays at 13.6 MB over thousands of ADDs; the holes between it do not, 5 MB after 4,000 of them. Done
    on the event loop: it takes 1.4 to 4 ms for 1,600 holes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while True:
        await asyncio.sleep(every)
        if trim is not None:
            trim(0)
