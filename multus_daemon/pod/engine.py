"""The engine: the ports that the verbs use, the node's policy, and the state that requests share.

The daemon creates one. The verbs are functions of this package's modules; their first parameter is the engine.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.run import ListRunner
from multus_daemon.pod.records import Records
from multus_daemon.pod.request import CniRequest
from multus_daemon.runtime import deadline, timeline
from multus_daemon.runtime.gates import Gates
from multus_daemon.runtime.threads import Barriers, KeyedLock
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.nad.following import Keep
from multus_daemon.spec.netconf.model import NetConf, load
from multus_daemon.spec.ports import ClusterStore, ConfFiles, DeviceFiles, DeviceSource

if TYPE_CHECKING:
    # Only a type here: programs that need only a constant of this module do without it.
    from multus_daemon.metrics import Metrics

LOCKS: Final = "containers.lock"
"""Name of the file that holds the locks of containers and namespaces, in the socket's directory."""
INDICATOR_GATE: Final = "readiness-indicator"
"""While this gate is closed the primary network is not ready, and no pod is attached to it."""

StatusWrite = Literal["best-effort", "required"]
Hotplug = Literal["off", "namespaces", "on"]

_REMEMBERED_MAX_BYTES: Final = 4 * 1024


class Namespaces(Protocol):
    """The network namespaces of the node."""

    def open(self, path: str, *, may_be_own: bool = False) -> PodNetns:
        """Return the namespace at `path`; entering it opens it. `may_be_own`: see `PodNetns`."""

    def is_netns(self, path: str) -> bool:
        """Return True if `path` is an existing network namespace. Never blocks."""

    def vanished(self, paths: Collection[str]) -> set[str]:
        """Return the `paths` that are certainly gone: the directory exists, the file does not.

        A missing directory (the node has just started, a mount is missing) proves nothing, nor does a path below /proc.
        """

    def netns_in_use(self, paths: Collection[str]) -> set[str]:
        """Return the `paths` that are network namespaces with a process in them, or may be.

        Takes a few microseconds per process of the node. Raises OSError if the processes cannot be listed.
        """


@dataclass(frozen=True)
class Policy:
    """Holds the settings of the node that decide how requests are served."""

    overlay: Mapping[str, Any]
    """Keys of the daemon's configuration; they override the keys of each request."""
    status_write: StatusWrite = "best-effort"
    """If `required`, an ADD fails when the network-status cannot be written."""
    delete_tries: int = 0
    """Number of failed DELs after which DEL is answered as done, so that the pod can go; 0 reports every failure."""

    networks_at_once: int = 4
    """Maximum number of networks of a pod that are attached or detached concurrently, after its cluster network.

    Not a setting.
    """
    hotplug: Hotplug = "off"
    """Whether a change of a running pod's annotation is followed: of no pod, those in labelled namespaces, of any."""
    keep: Keep = "report"
    """What happens to an attachment that differs from its record, unless its pod or network says something else."""
    ready_condition: bool = False
    """Whether the pod's condition `multus.io/NetworksReady` is written."""
    explain: str = "multusctl explain"
    """The command that explains an error about a pod; `NAMESPACE/POD` follows."""

    def net_conf(self, stdin: bytes) -> NetConf:
        """Return the configuration of a request, overridden by the daemon's own keys. Raises CniError."""
        return load(stdin, self.overlay) if len(stdin) > _REMEMBERED_MAX_BYTES else self._remembered(stdin)

    @functools.cached_property
    def _remembered(self) -> Callable[[bytes], NetConf]:
        # A cache pays: a node has one configuration, and the runtime adds little to it.
        return functools.lru_cache(maxsize=64)(functools.partial(load, overlay=self.overlay))


class GcState:
    """Holds the state that GC shares with ADD: GC must spare containers whose ADD began after the GC request."""

    def __init__(self) -> None:
        self.lock = KeyedLock()
        """One GC runs at a time."""
        self.barriers = Barriers()
        """Barrier by network, closed while its plugins release resources that were not on record when GC began."""
        self.waiting = 0
        """Number of GCs that wait or run."""
        self._guard = threading.Lock()
        self._begun: set[ContainerId] = set()

    def add_begins(self, container_id: ContainerId) -> None:
        """Note that an ADD for the container begins. The caller holds the container's lock."""
        with self._guard:
            if self.waiting:
                self._begun.add(container_id)

    def may_be_added(self, container_id: ContainerId) -> bool:
        """Return True if an ADD may have begun since the oldest waiting or running GC was requested."""
        return container_id in self._begun

    @contextlib.contextmanager
    def watched(self, at_work: Callable[[], Collection[str]]) -> Iterator[None]:
        """Note each ADD for the duration of the block, a GC. `at_work`: containers of which a request may be an ADD."""
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


class Upkeep:
    """Work that brings a running container to what it should be."""

    def __init__(self) -> None:
        self.deadline = deadline.current()
        self.is_stopped = False
        """True if a DEL of the container has arrived."""
        self.holds = False
        """True once it has the container's lock."""

    def stop(self) -> None:
        """End each wait of the work with Interrupted."""
        self.is_stopped = True
        self.deadline.stop()


class Upkeeps:
    """The upkeeps that run, of which a DEL ends that of its container: it may wait for a plugin."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._running: dict[ContainerId, Upkeep] = {}
        self._deletes: Counter[ContainerId] = Counter()

    @contextlib.contextmanager
    def of(self, container_id: ContainerId) -> Iterator[Upkeep | None]:
        """Let a DEL stop the deadline of the calling context during the block; yield None if there is a DEL already.

        For one caller per container at a time. A second one is not stopped; the DEL waits for it.
        """
        with self._guard:
            made = None if container_id in self._deletes else Upkeep()
            if made:
                self._running.setdefault(container_id, made)
        try:
            yield made
        finally:
            with self._guard:
                if self._running.get(container_id) is made:
                    del self._running[container_id]

    @property
    def holders(self) -> frozenset[ContainerId]:
        """The containers whose locks are held by upkeeps."""
        with self._guard:
            return frozenset(name for name, running in self._running.items() if running.holds)

    @contextlib.contextmanager
    def none(self, container_id: ContainerId) -> Iterator[bool]:
        """End the upkeep of a container, and let none begin during the block, a DEL; yield whether there was one.

        It may take a moment to end.
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
    """Holds the ports, the policy, and the state that requests share."""

    cluster: ClusterStore
    files: ConfFiles
    runner: ListRunner
    records: Records
    namespaces: Namespaces
    devices: DeviceSource
    device_files: DeviceFiles
    gates: Gates
    policy: Policy
    metrics: Metrics
    locks: KeyedLock = field(default_factory=KeyedLock)
    """Locks of containers by id, and of network namespaces (`netns_held`); shared with another daemon of the node.

    A change holds the container's lock, then the namespace's: a late DEL never meets the next ADD at the same path.
    """
    gc: GcState = field(default_factory=GcState)
    upkeeps: Upkeeps = field(default_factory=Upkeeps)
    clock: Callable[[], float] = time.time
    """Unix time in seconds."""

    @property
    def at_work(self) -> frozenset[str]:
        """The containers at which requests are at work: those whose locks are held, but for upkeeps."""
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
