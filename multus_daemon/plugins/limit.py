"""Limit how many plugin processes run at once, in which order calls get a slot, and how long they wait.

The memory of plugins counts against the daemon's control group, so in a burst of pods the kernel would kill the daemon.
The processes that a plugin starts, above all its IPAM plugin, cannot be counted here: PROCESS_BYTES includes them.

Order: first DEL, which frees resources that other calls wait for. One slot is reserved for DEL, so that a node can
remove its pods even if plugins hang in all other slots. Then STATUS and GC, at most one of each: a STATUS that waits
behind a burst of pods would take the node out of service, and ADDs to a network wait while GC calls its plugins. Then
ADD, then CHECK, for which no pod waits. Within one kind, networks of a namespace take turns, and no namespace and no
network may have all slots: see `runtime.slots`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from multus_daemon import deadlines
from multus_daemon.metrics import Metrics
from multus_daemon.runtime import slots
from multus_daemon.runtime.aio import KeyedLock
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni.errors import Origin, TryAgainLaterError

MIB: Final = 1024 * 1024
PROCESS_BYTES: Final = 64 * MIB
"""Memory for one call: a large plugin took 55 MB, the reference IPAM plugins take 4 to 7."""
OWN_BYTES: Final = 128 * MIB
"""Memory for the daemon itself: about 95 MB in a large cluster, the rest for 500 waiting requests."""
PROCESSES_PER_CORE: Final = 4
"""Processes for each core: plugins mostly wait for the kernel's lock for links (RTNL), or for an agent on the node."""
FEWEST: Final = 2
"""The least number of processes: one for DEL, one for other verbs. (A memory limit without room for two allows one.)"""
KEPT: Final = 8
"""Each namespace, and each network, leaves a share of 1/KEPT of the slots, at least one slot, to the others."""
MOST: Final = 64
"""The largest number of processes: each takes four of the daemon's descriptors, whose limit may be 1024."""

RANKS: Final[Mapping[str, int]] = MappingProxyType({"DEL": slots.URGENT, "STATUS": 1, "GC": 1, "ADD": 2, "CHECK": 3})


@dataclass(frozen=True, slots=True)
class Allowance:
    """The maximum number of processes at once, and a text for people that says why."""

    number: int
    reason: str


def automatic(memory_limit: int | None, host_memory: int | None, cores: int) -> Allowance:
    """Compute the number from the memory limit of the daemon's control group, the machine's memory, and the cores.

    Memory in bytes; None: no limit, or unknown. Without a limit, plugins may use a quarter of the machine's.
    """
    by_cores = min(MOST, PROCESSES_PER_CORE * cores)
    if memory_limit is not None and (host_memory is None or memory_limit < host_memory):
        room, source = memory_limit - OWN_BYTES, f"the memory limit of {memory_limit // MIB} MiB"
        if room < FEWEST * PROCESS_BYTES:
            # With a second plugin beside a daemon of 70 MB, the kernel would kill one of the three.
            least = (OWN_BYTES + FEWEST * PROCESS_BYTES) // MIB
            return Allowance(1, f"{source}; with {least} MiB or more a DEL has a place of its own")
    elif host_memory is not None:
        room, source = host_memory // 4, f"{host_memory // MIB} MiB of memory and no limit"
    else:
        return Allowance(max(FEWEST, by_cores), f"{cores} cores")
    by_memory = room // PROCESS_BYTES
    processes = max(FEWEST, min(by_memory, by_cores))
    return Allowance(processes, source if by_memory < by_cores else f"{cores} cores")


class ProcessLimit:
    """Slots for plugin processes."""

    def __init__(
        self,
        allowance: Allowance,
        *,
        metrics: Metrics | None = None,
        wait_seconds: Mapping[str, float] = deadlines.SLOT_WAIT_SECONDS,
    ) -> None:
        """`wait_seconds`: longest wait for a slot, by verb."""
        self._allowance = allowance
        self._metrics = metrics or Metrics()
        self._wait_seconds = wait_seconds
        kept = max(1, allowance.number // KEPT)
        self.slots = slots.Slots(allowance.number, reserved=1, kept=kept, name="plugin processes")
        self._lines = KeyedLock()
        self._metrics.processes_limit.set(allowance.number)

    async def take(self, plugin_type: str, invocation: Invocation) -> slots.Slot:
        """Take a slot for one call of one plugin. Raises TryAgainLaterError (11) if none becomes free in time."""
        verb = invocation.verb
        seconds = self._wait_seconds.get(verb, deadlines.SLOT_WAIT_SECONDS["CHECK"])
        began = time.monotonic()
        groups = (invocation.pod_namespace, invocation.network)
        rank = RANKS.get(verb, RANKS["CHECK"])
        try:
            with self._metrics.processes_waiting.labels(verb).track_inprogress():
                # The networks of one container, which are attached in parallel, wait one after the other. So they
                # finish in the order in which they began, and on a node with few slots the last one does not give up
                # while those before it run.
                key = invocation.container_id
                async with self._lines.hold(key) if key else contextlib.nullcontext():
                    slot = await self.slots.take(key, rank, seconds, groups)
        except slots.NoSlotError as error:
            self._metrics.process_waits_given_up.labels(verb).inc()
            raise self._busy(plugin_type, invocation, seconds, error) from error
        finally:
            self._metrics.process_waits.labels(verb).observe(time.monotonic() - began)
        self._metrics.processes_running.labels(verb).inc()
        return slot

    def give_back(self, slot: slots.Slot, invocation: Invocation) -> None:
        """Give the slot of a call back."""
        self._metrics.processes_running.labels(invocation.verb).dec()
        self.slots.give_back(slot)

    def _busy(
        self, plugin_type: str, invocation: Invocation, seconds: float, error: slots.NoSlotError
    ) -> TryAgainLaterError:
        verb, allowed = invocation.verb, self._allowance
        details = (
            f"the number comes from {allowed.reason}; raise the memory limit of the daemon's pod, or "
            "maxDelegateProcesses"
        )
        if error.share:
            details = (
                f"network {invocation.network} or namespace {invocation.pod_namespace} runs {error.share} plugin "
                f"processes already, the most that one may have: are its plugins slow, or do they hang? {details}"
            )
        return TryAgainLaterError(
            f"node is busy: {verb} of plugin {plugin_type!r} has waited {seconds:g} s to be run, with {error.waiting} "
            f"calls waiting and at most {allowed.number} plugin processes at once",
            details,
            origin=Origin.NODE,
        )
