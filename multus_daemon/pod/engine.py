"""The engine as a value: what the verbs need of the world, the node's policy, and what requests share.

Made once, by the daemon. The verbs are functions of this package's modules; their first parameter is the engine.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.run import Chain
from multus_daemon.pod.devices import Devices
from multus_daemon.pod.records import Records
from multus_daemon.pod.request import CniRequest
from multus_daemon.runtime.gates import Gates
from multus_daemon.runtime.threads import Barriers, KeyedLock
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.netconf.model import NetConf, load
from multus_daemon.spec.ports import ClusterStore, ConfFiles

if TYPE_CHECKING:
    # Programs that need a constant of this module must not wait for prometheus_client.
    from multus_daemon.metrics import Metrics

LOCKS: Final = "containers.lock"
"""The file of the locks of containers and of namespaces, in the socket's directory."""
INDICATOR_GATE: Final = "readiness-indicator"
"""While this gate is closed the primary network is not ready, and no pod is attached to it."""

StatusWrite = Literal["best-effort", "required"]

_REMEMBERED_MAX_BYTES: Final = 4 * 1024


class Namespaces(Protocol):
    """The network namespaces of the node."""

    def open(self, path: str, *, may_be_own: bool = False) -> PodNetns:
        """Return the namespace at `path`, which is opened when it is first entered. `may_be_own`: see `PodNetns`."""
        ...

    def is_netns(self, path: str) -> bool:
        """Return True if `path` is a network namespace that exists. Never waits."""
        ...

    def vanished(self, paths: Collection[str]) -> set[str]:
        """Return those of `paths` that are certainly gone: no file is there, in a directory that exists.

        Without the directory (a node that has just started, a missing mount) nothing is certain, nor below /proc.
        """
        ...

    def netns_in_use(self, paths: Collection[str]) -> set[str]:
        """Return those of `paths` that are network namespaces with a process in them, or may be.

        Takes some microseconds for each process of the node. Raises OSError if the processes cannot be listed.
        """
        ...


@dataclass(frozen=True)
class Policy:
    """Settings of the node that decide how requests are served."""

    overlay: Mapping[str, Any]
    """The daemon's own keys, which win over those of each request."""
    status_write: StatusWrite = "best-effort"
    """If `required`, an ADD fails when the network-status cannot be written."""
    delete_tries: int = 0
    """Number of the failed DEL that is answered as done, so that the pod can go; 0: every failure is reported."""

    networks_at_once: int = 4
    """Networks of one pod that are attached, or detached, at once, after its cluster network. Not a setting."""

    def net_conf(self, stdin: bytes) -> NetConf:
        """Return the configuration of a request, with the daemon's own keys over it. Raises CniError."""
        return load(stdin, self.overlay) if len(stdin) > _REMEMBERED_MAX_BYTES else self._remembered(stdin)

    @functools.cached_property
    def _remembered(self) -> Callable[[bytes], NetConf]:
        # A node has one configuration, and the runtime adds little to it.
        return functools.lru_cache(maxsize=64)(functools.partial(load, overlay=self.overlay))


class GcState:
    """State that GC shares with ADD: GC must spare each container whose ADD began after GC was asked for."""

    def __init__(self) -> None:
        self.lock = KeyedLock()
        """One GC runs at a time."""
        self.barriers = Barriers()
        """By network: closed while its plugins free what was not on record when GC began."""
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
        """Return True if an ADD may have begun since the oldest GC that waits or runs was asked for."""
        return container_id in self._begun

    @contextlib.contextmanager
    def watched(self, locks: KeyedLock) -> Iterator[None]:
        """Note each ADD for the duration of the block, a GC. A holder of one of `locks` may be an ADD."""
        with self._guard:
            self.waiting += 1
            self._begun |= {ContainerId(key) for key in locks.keys}
        try:
            yield
        finally:
            with self._guard:
                self.waiting -= 1
                if not self.waiting:
                    self._begun.clear()


@dataclass(frozen=True)
class Engine:
    """Ports, policy, and the state that requests share."""

    cluster: ClusterStore
    files: ConfFiles
    runner: Chain
    records: Records
    namespaces: Namespaces
    devices: Devices
    gates: Gates
    policy: Policy
    metrics: Metrics
    locks: KeyedLock = field(default_factory=KeyedLock)
    """Locks of containers by id, and of network namespaces by path; shared with another daemon of the node.

    A change holds the container's lock, then the namespace's: a late DEL never meets the next ADD at the same path.
    """
    gc: GcState = field(default_factory=GcState)
    clock: Callable[[], float] = time.time
    """Unix time in seconds."""

    @contextlib.contextmanager
    def serving(self, request: CniRequest) -> Iterator[PodNetns]:
        """Hold the lock of the request's container for the duration of the block; yield the network namespace."""
        with (
            self.locks.hold(request.container_id),
            self.namespaces.open(request.netns, may_be_own=request.netns_override) as netns,
        ):
            yield netns
