"""Compute the maximum numbers of plugin processes, CNI requests and connections from memory and CPU limits."""

from __future__ import annotations

import logging
import os
from typing import Final

from multus_daemon.plugins import limit as processes
from multus_daemon.plugins.limit import KEPT, MIB, Allowance
from multus_daemon.runtime import cgroup
from multus_daemon.settings import Settings

log = logging.getLogger(__name__)

MOST: Final = 256
"""The largest maximum of concurrent requests."""
FEWEST: Final = 5
"""The smallest maximum of concurrent requests: with fewer, `kept` would reserve no slot."""
REQUEST_BYTES: Final = MIB // 4
"""Memory of a running request: measured 110 KiB of the process and 40 of the kernel for its thread."""
REQUESTS_PER_CORE: Final = 200
"""An ADD with its plugins takes 20 to 60 ms of a core, so running requests end within about ten seconds. If more ran,
the last plugins would wait longer than SLOT_WAIT_SECONDS, and all pods would start at the end of a burst.
"""
CONNECTIONS_MAX: Final = 1024
"""Maximum number of connections to the socket without a memory limit."""
WAITING_BYTES: Final = 26 * 1024
"""Memory of a request that waits for its turn, and of its connection."""
_WAITING_SHARE: Final = 100
"""Waiting requests may take this part (1/N) of the memory limit."""
OWN_BYTES: Final = 50 * MIB
"""Memory of the daemon itself, and of the kernel for the links of some dozen pods."""


def kept(at_once: int) -> int:
    """Return how many slots are reserved for DEL; as many can't be taken by a single network or namespace."""
    return max(1, at_once // KEPT) if at_once >= FEWEST else 0


def automatic(memory_limit: int | None, host_memory: int | None, cores: float | None) -> Allowance:
    """Return the maximum number of requests; memory in bytes, None: unknown or unlimited."""
    allowed = [Allowance(MOST, "no limit says less")]
    if memory_limit is not None and (host_memory is None or memory_limit < host_memory):
        by_memory = max(FEWEST, (memory_limit - OWN_BYTES) // REQUEST_BYTES)
        allowed.append(Allowance(by_memory, f"the memory limit of {memory_limit // MIB} MiB"))
    if cores is not None:
        allowed.append(Allowance(max(FEWEST, round(cores * REQUESTS_PER_CORE)), f"the CPU limit of {cores:g} cores"))
    return min(allowed, key=lambda allowance: allowance.number)


def connections(memory_limit: int | None, host_memory: int | None) -> int:
    """Return the maximum number of connections to the socket; both in bytes, None: unknown or unlimited.

    Further connections wait in the kernel, in the order of their arrival: a DEL overtakes only requests that were read.
    """
    if memory_limit is None or (host_memory is not None and memory_limit >= host_memory):
        return CONNECTIONS_MAX
    return max(4 * FEWEST, min(CONNECTIONS_MAX, memory_limit // _WAITING_SHARE // WAITING_BYTES))


def of(settings: Settings) -> tuple[Allowance, Allowance, int]:
    """Return the maximum number of concurrent plugin processes, of requests, and of connections to the socket.

    Reads files of /proc and cgroupfs if the settings do not give the numbers.
    """
    if asked := settings.plugins.max_processes:
        of_processes = Allowance(asked, "maxDelegateProcesses")
    else:
        cores = len(os.sched_getaffinity(0))
        of_processes = processes.automatic(cgroup.memory_limit(), cgroup.host_memory(), cores)
    if asked := settings.socket.connection_limit:
        of_requests, of_connections = Allowance(asked, "connectionLimit"), CONNECTIONS_MAX
    else:
        memory = cgroup.memory_limit(), cgroup.host_memory()
        of_requests, of_connections = automatic(*memory, cgroup.cpu_limit()), connections(*memory)
    for what, allowance in (("plugin processes", of_processes), ("requests", of_requests)):
        log.info("at most %d %s at once: %s", allowance.number, what, allowance.reason)
    return of_processes, of_requests, of_connections
