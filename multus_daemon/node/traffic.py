"""Traffic of the pods' additional interfaces by network, for the metrics.

The interfaces are those of the recorded attachments (`pod.view`). A scrape reads their counters (`kernel.traffic`).
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
from multus_daemon.kernel.traffic import Figures, Namespace, NamespaceSocket, UnsupportedKernelError
from multus_daemon.pod.view import Entry, View
from multus_daemon.spec.cni.names import ContainerId

log = logging.getLogger(__name__)

OTHER: Final = "other"
"""Label value for all networks beyond the limit."""
NETWORKS_MAX: Final = 100
_AT_ONCE: Final = 16
"""Number of pods that are read between two checks of the time."""


@dataclass(slots=True, eq=False)
class _Interface:
    """An interface of a recorded attachment."""

    network: str
    is_new: bool
    """True if this daemon ran its ADD, so that its counters begin at 0. Else only later increases count."""
    figures: Figures | None = None
    """The last read counters; None before the first."""


@dataclass(slots=True, eq=False)
class _Container:
    namespace: Namespace
    interfaces: dict[str, _Interface] = field(default_factory=dict)
    read_at: float = 0.0

    def is_of(self, entry: Entry) -> bool:
        """Return True if `entry` is a later state of the same container with the same namespace."""
        return (self.namespace.path, self.namespace.recorded) == (entry.netns, entry.created)


Asked = dict[_Container, dict[str, _Interface]]
"""Interfaces to read: by container, then by name."""


@dataclass(slots=True, eq=False)
class Traffic:
    """Sums of the interfaces' counters by network. Thread-safe."""

    view: View
    seconds: float = deadlines.TRAFFIC_SECONDS
    """Limit for one reading."""
    fresh_seconds: float = deadlines.TRAFFIC_FRESH_SECONDS
    """Age at which counters are read again."""
    clock: Callable[[], float] = time.monotonic
    kernel: Callable[[], NamespaceSocket] = NamespaceSocket
    _sums: dict[str, list[int]] = field(default_factory=dict)
    """The totals by network. They never fall: each grows by the counts of an interface since its last reading, and an
    interface that ends takes nothing away.
    """
    _socket: NamespaceSocket | None = None
    _started: float = field(default_factory=time.time)
    _is_supported: bool = True
    _fresh_until: float = float("-inf")
    _reading: threading.Lock = field(default_factory=threading.Lock)
    # Of the containers and the figures. Never held while a call blocks: an ADD waits for it.
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _containers: dict[ContainerId, _Container] = field(default_factory=dict)
    _figures: Mapping[tuple[str, ...], Figures] | None = None
    """The last figures. A reading or a change of the containers clears it."""

    def __post_init__(self) -> None:
        self.view.followers.append(self._follow)

    # --- the interfaces ----------------------------------------------------------------------------------------------

    def _follow(self, container_id: ContainerId, entry: Entry | None, is_read: bool) -> None:
        """Called by the view about a record, in any thread."""
        is_written = self.view.is_loaded and not is_read
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
                self._figures = None

    # --- the figures -------------------------------------------------------------------------------------------------

    def figures(self) -> Mapping[tuple[str, ...], Figures]:
        """Return the sums by network, read from the kernel unless they are fresh. Blocks.

        An interface that cannot be read, or not in time, counts with its last counters.
        """
        # Another reading may hang in the kernel.
        if self._reading.acquire(timeout=self.seconds):
            try:
                if self._is_supported and self.clock() >= self._fresh_until:
                    self._read(self.clock() + self.seconds)
                    self._fresh_until = self.clock() + self.fresh_seconds
            finally:
                self._reading.release()
        with self._guard:
            if self._figures is None:
                self._figures = {(name,): Figures._make(counts) for name, counts in self._sums.items()}
            return self._figures

    def _read(self, end: float) -> None:
        """Read interfaces until `end` on the monotonic clock, those first that were not read for the longest time."""
        with self._guard:
            asked = _interfaces(self._containers.values())
        if not asked:
            return
        queue = sorted(asked, key=lambda item: item.read_at)
        try:
            kernel, self._socket = self._socket or self.kernel(), None
            try:
                self._take_all(kernel, queue, asked, end)
            except BaseException:
                # Answers may be left in the socket.
                kernel.close()
                raise
            self._socket = kernel
        except UnsupportedKernelError as error:
            self._is_supported = False
            log.warning("the traffic of pods can't be measured (attachmentMetrics): %s", error.strerror)
        except OSError as error:
            log.debug("counters of pods' interfaces can't be read: %s", error)

    def _take_all(self, kernel: NamespaceSocket, queue: Sequence[_Container], asked: Asked, end: float) -> None:
        for start in range(0, len(queue), _AT_ONCE):
            if (now := self.clock()) >= end:
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
                            self._count(interface, figures[name])
                self._figures = None

    def _count(self, interface: _Interface, figures: Figures) -> None:
        """Add the increase since the interface's last counters to its network."""
        before, interface.figures = interface.figures, figures
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


def _interfaces(containers: Iterable[_Container]) -> Asked:
    """Return the containers' interfaces. If two records have the same namespace, only those of the newer one."""
    by_age = sorted(containers, key=lambda item: item.namespace.recorded)
    owners = {(item.namespace.path, name): item for item in by_age for name in item.interfaces}
    asked: Asked = {}
    for (_, name), container in owners.items():
        asked.setdefault(container, {})[name] = container.interfaces[name]
    return asked
