"""How many CNI requests are worked on at once: fewer where the memory limit has no room for a thread of each."""

from __future__ import annotations

from typing import Final

from multus_daemon.delegates.limit import KEPT, MIB, Allowance

MOST: Final = 256
"""Without a memory limit, or with a large one."""
FEWEST: Final = KEPT
"""Of fewer no place is for DEL alone."""
REQUEST_BYTES: Final = MIB // 4
"""What one needs that is worked on: 110 KiB of the process's memory have been seen, and 40 of the kernel's for its
thread. One that waits has 28 KiB."""
OWN_BYTES: Final = 48 * MIB
"""What the daemon needs beside them, and the kernel for the links of some dozen pods."""


def automatic(memory_limit: int | None, host_memory: int | None) -> Allowance:
    """From the memory limit of the daemon's control group and the machine's memory, in bytes; None: not known."""
    if memory_limit is None or (host_memory is not None and memory_limit >= host_memory):
        return Allowance(MOST, "no memory limit")
    by_memory = max(FEWEST, (memory_limit - OWN_BYTES) // REQUEST_BYTES)
    return Allowance(min(MOST, by_memory), f"the memory limit of {memory_limit // MIB} MiB")
