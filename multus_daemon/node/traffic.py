"""Traffic of the pods' additional interfaces by network, for the metrics.

The interfaces are those of the attachments on record (`pod.view`). Their counters are read when they are asked for
(`kernel.traffic`).
"""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from multus_daemon import deadlines
from multus_daemon.kernel.traffic import Figures, Namespace, TrafficSocket, UnsupportedKernelError
from multus_daemon.pod.view import Entry, View
from multus_daemon.spec.cni.names import ContainerId

log = logging.getLogger(__name__)

OTHER: Final = "other"
"""Network that stands for those beyond the limit."""
NETWORKS_MAX: Final = 100
_AT_ONCE: Final = 16
"""Number of pods that are read before the time is checked."""


@dataclass(slots=True, eq=False)
class _Interface:
    """An interface of an attachment on record."""

    network: str
    is_new: bool
    """True if an ADD made it while this daemon runs. Else an earlier daemon's metrics may have its first figures."""
    figures: Figures | None = None
    """The last ones."""


@dataclass(slots=True, eq=False)
class _Container:
    namespace: Namespace
    interfaces: dict[str, _Interface] = field(default_factory=dict)
    read_at: float = 0.0

    def is_of(self, entry: Entry) -> bool:
        """Return True for a later state of the same record."""
        return (self.namespace.path, self.namespace.recorded) == (entry.netns, entry.created)


Asked = dict[_Container, dict[str, _Interface]]
"""Interfaces by name."""


class _Sums:
    """Sums of interfaces by network. They never fall: each grows by what an interface has counted since its last
    reading, and an interface that ends takes nothing away.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[int]] = {}

    def take(self, interface: _Interface, figures: Figures) -> None:
        """Add what the interface has counted since its last figures."""
        before = interface.figures
        if before is None:
            # A sum that begins with 0 after a restart is a reset for Prometheus. One that begins with what was counted
            # long ago would be traffic of this minute.
            before = Figures() if interface.is_new else figures
        elif figures != before and any(map(operator.lt, figures, before)):
            # The interface was made again.
            before = Figures()
        network = interface.network
        if network not in self._sums and len(self._sums) >= NETWORKS_MAX:
            network = OTHER
        counts = self._sums.setdefault(network, [0] * len(figures))
        if figures != before:
            counts[:] = map(operator.add, counts, map(operator.sub, figures, before))

    def figures(self) -> dict[tuple[str, ...], Figures]:
        """Return the figures by network, as the values of a metric's labels."""
        return {(network,): Figures._make(counts) for network, counts in self._sums.items()}


class Traffic:
    """The interfaces on record, and their figures. Thread-safe."""

    def __init__(
        self,
        view: View,
        *,
        seconds: float = deadlines.TRAFFIC_SECONDS,
        fresh_seconds: float = deadlines.TRAFFIC_FRESH_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        kernel: Callable[[], TrafficSocket] = TrafficSocket,
    ) -> None:
        """`seconds`: limit for one reading; `fresh_seconds`: until they are read again."""
        self._sums = _Sums()
        self._seconds = seconds
        self._fresh_seconds = fresh_seconds
        self._clock = clock
        self._kernel = kernel
        self._socket: TrafficSocket | None = None
        self._view = view
        view.followers.append(self._follow)
        self._started = time.time()
        self._is_supported = True
        self._fresh_until = float("-inf")
        self._reading = threading.Lock()
        # Of the containers and the figures. Never held while a call blocks: an ADD waits for it.
        self._guard = threading.Lock()
        self._containers: dict[ContainerId, _Container] = {}
        self._asked: Asked | None = None
        """The interfaces to read. A change of the containers clears it."""
        self._figures: Mapping[tuple[str, ...], Figures] | None = None
        """The last figures. A reading or a change of the containers clears it."""

    # --- the interfaces ----------------------------------------------------------------------------------------------

    def _follow(self, container_id: ContainerId, entry: Entry | None, is_read: bool) -> None:
        """Take note of a change of the view. In any thread."""
        is_written = self._view.is_loaded and not is_read
        with self._guard:
            known = self._containers.pop(container_id, None)
            before = known.interfaces if known else {}
            after: dict[str, _Interface] = {}
            if entry is not None:
                is_new = is_written or known is not None or entry.created >= self._started
                if known is None or not known.is_of(entry):
                    known = _Container(Namespace(entry.netns, entry.netns_id, entry.created))
                for network in entry.networks:
                    if network.is_measured:
                        interface = known.interfaces.get(network.ifname)
                        if interface is None or interface.network != network.name:
                            interface = _Interface(network.name, is_new)
                        after[network.ifname] = interface
                if after:
                    self._containers[container_id] = known
            if known:
                known.interfaces = after
            if before or after:
                self._asked = self._figures = None

    # --- the figures -------------------------------------------------------------------------------------------------

    def figures(self) -> Mapping[tuple[str, ...], Figures]:
        """Return the figures by network, read from the kernel unless they are fresh. Blocks.

        An interface that cannot be read, or not in time, has its last figures.
        """
        # Another reading may hang in the kernel.
        if self._reading.acquire(timeout=self._seconds):
            try:
                self._refresh()
            finally:
                self._reading.release()
        with self._guard:
            if self._figures is None:
                self._figures = self._sums.figures()
            return self._figures

    def _refresh(self) -> None:
        if not self._is_supported or self._clock() < self._fresh_until:
            return
        try:
            self._read(self._clock() + self._seconds)
        except UnsupportedKernelError as error:
            self._is_supported = False
            log.warning("the traffic of pods can't be measured (attachmentMetrics): %s", error.strerror)
        except OSError as error:
            log.debug("counters of pods' interfaces can't be read: %s", error)
        self._fresh_until = self._clock() + self._fresh_seconds

    def _read(self, end: float) -> None:
        """Read the interfaces, until `end`; first those that were not read for the longest time. Raises OSError."""
        with self._guard:
            if self._asked is None:
                self._asked = _interfaces(self._containers.values())
            asked = self._asked
        if not asked:
            return
        queue = sorted(asked, key=lambda item: item.read_at)
        kernel, self._socket = self._socket or self._kernel(), None
        try:
            self._take_all(kernel, queue, asked, end)
        except BaseException:
            # Answers may be left in the socket.
            kernel.close()
            raise
        self._socket = kernel

    def _take_all(self, kernel: TrafficSocket, queue: Sequence[_Container], asked: Asked, end: float) -> None:
        for start in range(0, len(queue), _AT_ONCE):
            if (now := self._clock()) >= end:
                log.debug("counters of %d pods are not read: no time is left", len(queue) - start)
                break
            together = queue[start : start + _AT_ONCE]
            found = kernel.read([(item.namespace, list(asked[item])) for item in together])
            with self._guard:
                for container, figures in zip(together, found, strict=True):
                    container.read_at = now
                    for name, interface in asked[container].items():
                        # Not if it has ended meanwhile.
                        if name in figures and container.interfaces.get(name) is interface:
                            self._sums.take(interface, figures[name])
                            interface.figures = figures[name]
                self._figures = None


def _interfaces(containers: Iterable[_Container]) -> Asked:
    """Return the interfaces of the containers. A namespace may be on record twice; then they are the newer record's."""
    by_age = sorted(containers, key=lambda item: item.namespace.recorded)
    owners = {(item.namespace.path, name): item for item in by_age for name in item.interfaces}
    asked: Asked = {}
    for (_, name), container in owners.items():
        asked.setdefault(container, {})[name] = container.interfaces[name]
    return asked
