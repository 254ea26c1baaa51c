"""The engine: all that the verbs use: stores, plugins, the node's settings, and the state that requests share.

The daemon creates one. The verbs are functions of this package's modules; their first parameter is the engine.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.cluster.devices import Devices, NodeDeviceFiles
from multus_daemon.kernel.pod_netns import NodeNamespaces, PodNetns
from multus_daemon.plugins.run import ListRunner
from multus_daemon.pod.records import Records
from multus_daemon.pod.request import CniRequest
from multus_daemon.runtime import deadline, timeline
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.gates import Gates
from multus_daemon.runtime.threads import KeyedLock
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.netconf import NetConf, load
from multus_daemon.spec.ports import ClusterStore

if TYPE_CHECKING:
    # Only types here: programs that need only a constant of this module do without them.
    from multus_daemon.metrics import Metrics
    from multus_daemon.settings import Settings

LOCKS: Final = "containers.lock"
"""Name of the file that holds the locks of containers and namespaces, in the socket's directory."""
INDICATOR_GATE: Final = "readiness-indicator"
"""While this gate is closed the primary network is not ready, and no pod is attached to it."""


class GcState:
    """State that GC and ADD share: GC must spare containers whose ADD began after the GC request."""

    def __init__(self) -> None:
        self.lock = KeyedLock()
        """One GC runs at a time."""
        self.networks = KeyedLock()
        """Lock by network, held while its plugins release what was not on record when GC began: an ADD waits for it."""
        self.waiting = 0
        """Number of GCs that wait or run."""
        self._guard = threading.Lock()
        self._begun: set[ContainerId] = set()

    def add_begins(self, container_id: ContainerId) -> None:
        """Record that an ADD for the container begins. The caller holds the container's lock."""
        with self._guard:
            if self.waiting:
                self._begun.add(container_id)

    def may_be_added(self, container_id: ContainerId) -> bool:
        """Return True if an ADD may have begun since the oldest waiting or running GC was requested."""
        return container_id in self._begun

    @contextlib.contextmanager
    def watched(self, at_work: Callable[[], Collection[str]]) -> Iterator[None]:
        """Record each ADD during the block, a GC. `at_work`: returns the containers with a running request."""
        with self._guard:
            self.waiting += 1
            self._begun |= {ContainerId(key) for key in at_work()}
        try:
            yield
        finally:
            with self._guard:
                self.waiting -= 1
                if not self.waiting:
                    self._begun.clear()


class Upkeeps:
    """The upkeeps (`pod/upkeep`) that run now. A DEL stops its container's upkeep, which may wait for a plugin."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._running: dict[ContainerId, Deadline] = {}
        self._deletes: Counter[ContainerId] = Counter()
        self.holders: set[ContainerId] = set()
        """The containers whose locks are held by upkeeps."""

    @contextlib.contextmanager
    def of(self, container_id: ContainerId) -> Iterator[bool]:
        """Run the block, an upkeep, so that a DEL can stop its deadline; yield False if a DEL has already arrived.

        A DEL stops one upkeep of a container; for a second one at the same time it waits.
        """
        limit = deadline.current()
        with self._guard:
            is_wanted = container_id not in self._deletes
            if is_wanted:
                self._running.setdefault(container_id, limit)
        try:
            yield is_wanted
        finally:
            self.holders.discard(container_id)
            with self._guard:
                if self._running.get(container_id) is limit:
                    del self._running[container_id]

    @contextlib.contextmanager
    def none(self, container_id: ContainerId) -> Iterator[bool]:
        """Stop the container's upkeep, and let none begin during the block, a DEL; yield True if there was one.

        The upkeep may end a moment later.
        """
        with self._guard:
            self._deletes[container_id] += 1
            if running := self._running.get(container_id):
                running.stop()
        try:
            yield running is not None
        finally:
            with self._guard:
                self._deletes[container_id] -= 1
                if not self._deletes[container_id]:
                    del self._deletes[container_id]


@dataclass(frozen=True)
class Engine:
    """All that the verbs use: stores, plugins, the node's settings, and the state that requests share."""

    cluster: ClusterStore
    files: NodeConfFiles
    runner: ListRunner
    records: Records
    namespaces: NodeNamespaces
    devices: Devices
    device_files: NodeDeviceFiles
    gates: Gates
    settings: Settings
    overlay: Mapping[str, Any]
    """Keys of the daemon's configuration; they override the keys of each request."""
    metrics: Metrics
    locks: KeyedLock = field(default_factory=KeyedLock)
    """Locks of containers by id, and of network namespaces (`netns_held`); other daemons of the node respect them.

    A change takes the container's lock, then the namespace's, so that a late DEL never meets the next ADD at that path.
    """
    gc: GcState = field(default_factory=GcState)
    upkeeps: Upkeeps = field(default_factory=Upkeeps)
    clock: Callable[[], float] = time.time
    """Unix time in seconds."""
    networks_at_once: int = 4
    """Maximum number of networks of a pod that are attached or detached concurrently, after its cluster network.

    Not a setting.
    """
    explain: str = "multusctl explain"
    """The command that explains an error about a pod; its argument `NAMESPACE/POD` is added."""

    def net_conf(self, stdin: bytes) -> NetConf:
        """Read the configuration of a request; keys of the daemon's own configuration override it. Raises CniError."""
        return load(stdin, self.overlay)

    @property
    def at_work(self) -> frozenset[str]:
        """The containers with a running request: those whose locks are held, except by an upkeep."""
        return self.locks.keys - self.upkeeps.holders

    def netns_held(self, path: str) -> contextlib.AbstractContextManager[None]:
        """Hold the lock of the namespace at `path` for the duration of the block."""
        # No container id has a colon: a path that is spelt like one must not wait for its own container.
        return self.locks.hold(f"netns:{path}")

    @contextlib.contextmanager
    def serving(self, request: CniRequest) -> Iterator[PodNetns]:
        """Hold the lock of the request's container for the duration of the block; yield the network namespace."""
        with contextlib.ExitStack() as stack:
            with timeline.stage("queue"):
                stack.enter_context(self.locks.hold(request.container_id))
            yield stack.enter_context(self.namespaces.open(request.netns, may_be_own=request.netns_override))
