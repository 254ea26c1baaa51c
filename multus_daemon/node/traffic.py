"""Traffic of the pods' additional interfaces, for the metrics: summed by network, or of each interface of each pod.

The interfaces are those of the attachments on record. They are kept in memory: `pod.store` reports each record that it
writes, and `Traffic.run` reads those of earlier daemons. The counters are read when they are asked for
(`kernel.traffic`).
"""

from __future__ import annotations

import asyncio
import logging
import operator
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from multus_daemon import deadlines
from multus_daemon.kernel.traffic import Figures, Namespace, TrafficSocket, UnsupportedKernelError
from multus_daemon.metrics import Metrics
from multus_daemon.pod.records import Records
from multus_daemon.runtime import portal
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.spec.attachment import Attachment, ContainerRecord
from multus_daemon.spec.cni.names import ContainerId

log = logging.getLogger(__name__)

OTHER: Final = "other"
"""Value of the labels of what exceeds the limit."""
NETWORKS_MAX: Final = 100
INTERFACES_MAX: Final = 2000
_AT_ONCE: Final = 16
"""Number of pods that are read before the time is checked."""

Labels = tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Interface:
    """An interface of an attachment on record."""

    labels: Labels
    is_new: bool
    """True if an ADD made it while this daemon runs. Else an earlier daemon's metrics may have its first figures."""
    figures: Figures | None = None
    """The last ones."""


@dataclass(slots=True, eq=False)
class _Container:
    namespace: Namespace
    interfaces: dict[str, _Interface] = field(default_factory=dict)
    read_at: float = 0.0

    def is_of(self, record: ContainerRecord) -> bool:
        """Return True for a later state of the same record."""
        return (self.namespace.path, self.namespace.recorded) == (record.sandbox.netns, record.created)


Asked = dict[_Container, dict[str, _Interface]]
"""Interfaces by name."""


class _Sums:
    """Sums of interfaces by their labels. They never fall: each grows by what an interface has counted since its last
    reading, and an interface that ends takes nothing away.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: number of sums besides `other`."""
        self._limit = limit
        self._sums: dict[Labels, list[int]] = {}

    def take(self, interface: _Interface, created: float, figures: Figures) -> None:
        """Add what the interface, of a record created then, has counted since its last figures."""
        before = interface.figures
        if before is None:
            # A sum that begins with 0 after a restart is a reset for Prometheus. One that begins with what was counted
            # long ago would be traffic of this minute.
            before = Figures() if interface.is_new else figures
        elif figures != before and any(map(operator.lt, figures, before)):
            # The interface was made again.
            before = Figures()
        labels = interface.labels
        if labels not in self._sums and len(self._sums) >= self._limit:
            labels = (OTHER,) * len(labels)
        counts = self._sums.setdefault(labels, [0] * len(figures))
        if figures != before:
            counts[:] = map(operator.add, counts, map(operator.sub, figures, before))

    def end(self, interface: _Interface) -> None:
        """Take note of the end of an interface."""

    def figures(self) -> dict[Labels, Figures]:
        """Return the figures by labels."""
        return {labels: Figures._make(counts) for labels, counts in self._sums.items()}


class _Single:
    """The figures of each interface, of as many as there is room for, and a sum of the others."""

    def __init__(self, limit: int) -> None:
        """`limit`: number of interfaces."""
        self._limit = limit
        self._shown: dict[Labels, tuple[float, _Interface]] = {}
        self._others = _Sums(0)

    def take(self, interface: _Interface, created: float, figures: Figures) -> None:
        """Show the interface, unless a newer container of the same pod has it."""
        shown = self._shown.get(interface.labels)
        if shown is None and len(self._shown) >= self._limit:
            self._others.take(interface, created, figures)
        elif shown is None or shown[0] <= created:
            self._shown[interface.labels] = (created, interface)

    def end(self, interface: _Interface) -> None:
        """Take note of the end of an interface."""
        shown = self._shown.get(interface.labels)
        if shown and shown[1] is interface:
            del self._shown[interface.labels]

    def figures(self) -> dict[Labels, Figures]:
        """Return the figures by labels."""
        shown = {labels: interface.figures or Figures() for labels, (_, interface) in self._shown.items()}
        return shown | self._others.figures()


def shown(mode: Literal["off", "networks", "pods"], metrics: Metrics) -> Traffic | None:
    """Have `metrics` show the traffic; return what must be told of the records, None if `mode` is off."""
    if mode == "off":
        return None
    traffic = Traffic(mode)
    metrics.ask_traffic(traffic.labels, traffic.figures)
    return traffic


class Traffic:
    """The interfaces on record, and their figures. Thread-safe."""

    def __init__(
        self,
        mode: Literal["networks", "pods"],
        *,
        seconds: float = deadlines.TRAFFIC_SECONDS,
        fresh_seconds: float = deadlines.TRAFFIC_FRESH_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        kernel: Callable[[], TrafficSocket] = TrafficSocket,
    ) -> None:
        """`mode`: `attachmentMetrics`. `seconds`: limit for one reading; `fresh_seconds`: until they are read again."""
        self._by_pod = mode == "pods"
        self._shown = _Single(INTERFACES_MAX) if self._by_pod else _Sums(NETWORKS_MAX)
        self._seconds = seconds
        self._fresh_seconds = fresh_seconds
        self._clock = clock
        self._kernel = kernel
        self._socket: TrafficSocket | None = None
        self._started = time.time()
        self._is_loaded = False
        self._is_supported = True
        self._fresh_until = float("-inf")
        self._reading = threading.Lock()
        # Of the containers and the figures. Never held while a call blocks: an ADD waits for it.
        self._guard = threading.Lock()
        self._containers: dict[ContainerId, _Container] = {}
        self._asked: Asked | None = None
        """The interfaces to read. A change of the containers clears it."""
        self._figures: Mapping[Labels, Figures] | None = None
        """The last figures. A reading or a change of the containers clears it."""
        self._changed: set[ContainerId] | None = None
        """Containers whose record was written or removed during a load; None while there is none."""

    # --- the interfaces ----------------------------------------------------------------------------------------------

    def watch(self, container_id: ContainerId, record: ContainerRecord | None) -> None:
        """Take note of a record that was written, or removed if it is None."""
        with self._guard:
            if self._changed is not None:
                self._changed.add(container_id)
            self._enter(container_id, record, is_new=self._is_loaded or container_id in self._containers)

    async def run(self, records: Records) -> None:
        """Load the records of earlier daemons, then wait forever: the daemon stops when a root task ends."""
        # The predecessor serves its last requests while this daemon runs.
        for pause in (0.0, deadlines.PREDECESSOR_SECONDS):
            await asyncio.sleep(pause)
            try:
                await portal.run(Deadline(), lambda: self.load(records), name="traffic")
            except Exception as error:
                # A fault in one record must not stop the daemon.
                problem = "traffic of pods that an earlier daemon attached is not measured: %s"
                log.error(problem, error, exc_info=not isinstance(error, OSError))
        await asyncio.Event().wait()

    def load(self, records: Records) -> None:
        """Read the records that are not known, and drop containers without a record. Blocks. Raises OSError."""
        with self._guard:
            changed = self._changed = set()
            known = set(self._containers)
        try:
            for container_id in known.symmetric_difference(records.store.containers(foreign=False)):
                record = records.read([container_id]).get(container_id)
                with self._guard:
                    if container_id not in changed:
                        self._enter(container_id, record, is_new=False)
            self._is_loaded = True
        finally:
            with self._guard:
                self._changed = None

    def _enter(self, container_id: ContainerId, record: ContainerRecord | None, *, is_new: bool) -> None:
        """Replace what is known of a container; the guard is held."""
        known = self._containers.pop(container_id, None)
        before = known.interfaces if known else {}
        after: dict[str, _Interface] = {}
        if record:
            if known is None or not known.is_of(record):
                known = _Container(Namespace(record.sandbox.netns, record.netns_id, record.created))
            for item in filter(_is_measured, record.attachments):
                labels = self._labels_of(record, item)
                interface = known.interfaces.get(item.ifname)
                if interface is None or interface.labels != labels:
                    interface = _Interface(labels, is_new or record.created >= self._started)
                after[item.ifname] = interface
            if after:
                self._containers[container_id] = known
        if known:
            known.interfaces = after
        if before or after:
            self._asked = self._figures = None
        for ifname, interface in before.items():
            if after.get(ifname) is not interface:
                self._shown.end(interface)

    def _labels_of(self, record: ContainerRecord, attachment: Attachment) -> Labels:
        if self._by_pod:
            return record.pod_namespace, record.pod_name, attachment.name, attachment.ifname
        return (attachment.name,)

    # --- the figures -------------------------------------------------------------------------------------------------

    @property
    def labels(self) -> Labels:
        """The names of the labels."""
        return ("namespace", "pod", "network", "interface") if self._by_pod else ("network",)

    def figures(self) -> Mapping[Labels, Figures]:
        """Return the figures by labels, read from the kernel unless they are fresh. Blocks.

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
                self._figures = self._shown.figures()
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
                            self._shown.take(interface, container.namespace.recorded, figures[name])
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


def _is_measured(attachment: Attachment) -> bool:
    """Return True for an interface beside the cluster network's that the attachment has, or may have."""
    if attachment.cluster_network or attachment.auxiliary or attachment.result is None or not attachment.is_attached:
        return False
    # Results before CNI 0.3.0 name no interfaces.
    return attachment.has_interface or not attachment.result.interfaces
