"""How many CNI requests are worked on at once: fewer where the limits of memory or processor time have no room."""

from __future__ import annotations

from typing import Final

from multus_daemon.plugins.limit import KEPT, MIB, Allowance

MOST: Final = 256
"""Without a limit, or with large ones."""
FEWEST: Final = 5
"""Of so many or more, one of KEPT, one at least, is for DEL alone, and as many are out of reach of each network."""
REQUEST_BYTES: Final = MIB // 4
"""What one needs that is worked on: 110 KiB of the process's memory have been seen, and 40 of the kernel's for its
thread. One that waits has 28 KiB."""
REQUESTS_PER_CORE: Final = 200
"""An ADD takes 20 to 60 ms of a core, its plugin processes included. So what has begun is done within some ten seconds:
among more the last plugins would wait for longer than SLOT_WAIT_SECONDS, and all pods come at the end of the burst."""
OWN_BYTES: Final = 50 * MIB
"""What the daemon needs beside them, and the kernel for the links of some dozen pods."""


def kept(at_once: int) -> int:
    """How many of so many places are for DEL alone, and how many out of reach of each network and namespace."""
    return max(1, at_once // KEPT) if at_once >= FEWEST else 0


def automatic(memory_limit: int | None, host_memory: int | None, cores: float | None) -> Allowance:
    """From the memory limit of the daemon's control group and the machine's memory, in bytes, and its limit of cores.

    None: not known, or none.
    """
    allowed = [Allowance(MOST, "no limit says less")]
    if memory_limit is not None and (host_memory is None or memory_limit < host_memory):
        by_memory = max(FEWEST, (memory_limit - OWN_BYTES) // REQUEST_BYTES)
        allowed.append(Allowance(by_memory, f"the memory limit of {memory_limit // MIB} MiB"))
    if cores is not None:
        allowed.append(Allowance(max(FEWEST, round(cores * REQUESTS_PER_CORE)), f"the CPU limit of {cores:g} cores"))
    return min(allowed, key=lambda allowance: allowance.number)
