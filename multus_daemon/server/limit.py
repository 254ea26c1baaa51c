"""How many CNI requests are worked on at once: fewer where the memory limit has no room for a thread of each."""

from __future__ import annotations

from typing import Final

from multus_daemon.delegates.limit import KEPT, MIB, Allowance

MOST: Final = 256
"""Without a memory limit, or with a large one."""
FEWEST: Final = 5
"""Of so many or more, one of KEPT, one at least, is for DEL alone, and as many are out of reach of each network."""
REQUEST_BYTES: Final = MIB // 4
"""What one needs that is worked on: 110 KiB of the process's memory have been seen, and 40 of the kernel's for its
thread. One that waits has 28 KiB."""
OWN_BYTES: Final = 50 * MIB
"""What the daemon needs beside them, and the kernel for the links of some dozen pods."""


def kept(at_once: int) -> int:
    """How many of so many places are for DEL alone, and how many out of reach of each network and namespace."""
    return max(1, at_once // KEPT) if at_once >= FEWEST else 0


def automatic(memory_limit: int | None, host_memory: int | None) -> Allowance:
    """From the memory limit of the daemon's control group and the machine's memory, in bytes; None: not known."""
    if memory_limit is None or (host_memory is not None and memory_limit >= host_memory):
        return Allowance(MOST, "no memory limit")
    by_memory = max(FEWEST, (memory_limit - OWN_BYTES) // REQUEST_BYTES)
    return Allowance(min(MOST, by_memory), f"the memory limit of {memory_limit // MIB} MiB")
