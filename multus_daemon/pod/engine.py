"""The engine as a value: what the verbs need of the world, the node's policy, and what requests share.

Made once, by the daemon. The verbs are functions of this package's modules; their first parameter is the engine.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from multus_daemon import deadlines
from multus_daemon.pod.occupants import Occupants
from multus_daemon.runtime.gates import Gates
from multus_daemon.runtime.threads import Barriers, KeyedLock, Reads
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.netconf.model import NetConf, load
from multus_daemon.spec.ports import (
    ClusterStore,
    ConfFiles,
    DelegateRunner,
    DelegateStore,
    DeviceFiles,
    DeviceSource,
    LinkOps,
)

LOCKS: Final = "containers.lock"
"""The file of the containers' locks, in the socket's directory."""
NETNS_LOCKS: Final = "namespaces.lock"
"""The file of the namespaces' locks, in the socket's directory."""
INDICATOR_GATE: Final = "readiness-indicator"
"""While this gate is closed the primary network is not ready, and no pod is attached to it."""

StatusWrite = Literal["best-effort", "required"]

_REMEMBERED: Final = 1024
_REMEMBERED_MAX_BYTES: Final = 4 * 1024


def count_nothing(*_: object) -> None:
    """No-op counter."""


class AddsDuringGc:
    """Containers whose ADD may have begun since the oldest GC that waits or runs was asked for: no GC may mean them."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._begun: set[ContainerId] = set()
        self.gcs = 0
        """How many GCs wait or run."""

    def __contains__(self, container_id: ContainerId) -> bool:
        """Whether an ADD for the container may have begun."""
        return container_id in self._begun

    def begins(self, container_id: ContainerId) -> None:
        """An ADD for the container, whose lock it holds, begins."""
        with self._guard:
            if self.gcs:
                self._begun.add(container_id)

    @contextlib.contextmanager
    def watched(self, locks: KeyedLock) -> Iterator[None]:
        """The block is a GC. Whoever holds one of `locks`, those of the containers, may be an ADD."""
        with self._guard:
            self.gcs += 1
            self._begun |= {ContainerId(key) for key in locks.keys}
        try:
            yield
        finally:
            with self._guard:
                self.gcs -= 1
                if not self.gcs:
                    self._begun.clear()


class FailedDeletes:
    """How many DELs of a container have failed, beside the count on record: that may be what can't be written."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._failed: collections.OrderedDict[ContainerId, int] = collections.OrderedDict()

    def count(self, container_id: ContainerId, on_record: int = 0) -> int:
        """One more has failed; how many that makes."""
        with self._guard:
            failed = max(self._failed.pop(container_id, 0), on_record) + 1
            self._failed[container_id] = failed
            if len(self._failed) > _REMEMBERED:
                self._failed.popitem(last=False)
            return failed

    def forget(self, container_id: ContainerId) -> None:
        """One has succeeded."""
        with self._guard:
            self._failed.pop(container_id, None)


@dataclass(frozen=True)
class Engine:
    """Ports, policy, counters, and the state that requests share."""

    cluster: ClusterStore
    files: ConfFiles
    runner: DelegateRunner
    store: DelegateStore
    links: LinkOps
    devices: DeviceSource
    device_files: DeviceFiles
    gates: Gates
    overlay: Mapping[str, Any]
    """The daemon's own keys, which win over those of each request."""
    attach_concurrency: int
    """How many networks of one container are worked on side by side, from 1."""
    status_write: StatusWrite = "best-effort"
    """Whether an ADD fails where the network-status can't be written (`required`) or not."""
    delete_tries: int = 0
    """The failing DEL of this number is answered as done, so that the pod can go; 0: none ever is."""
    clock: Callable[[], float] = time.time
    """Unix time in seconds."""
    count_unsupported_arg: Callable[[str], None] = count_nothing
    """Called with the name of each unsupported capability arg of a pod."""
    count_collected: Callable[[str, int], None] = count_nothing
    """GC: called with `collected`, `left` or `failed`, and a number of attachments."""
    count_check_failed: Callable[[], None] = count_nothing
    """Called where the CHECK of a plugin fails though nothing that ADD left is missing."""
    count_given_up: Callable[[], None] = count_nothing
    """Called once for each container whose DEL is given up."""
    count_never_attached: Callable[[], None] = count_nothing
    """Called for each network that leaves the record though its DEL failed, as it was never attached."""
    count_set_aside: Callable[[], None] = count_nothing
    """Called for each container of which the rest is set aside."""
    count_replaced_netns: Callable[[], None] = count_nothing
    """Called where a container is detached at whose namespace's path is something else by then."""
    locks: KeyedLock = field(default_factory=KeyedLock)
    """Of the containers: whoever changes one holds its lock. Shared with a daemon that takes over, or is relieved."""
    netns_locks: KeyedLock = field(default_factory=KeyedLock)
    """Locks of namespaces, by path. ADD and DEL hold one while they work there, so that a late DEL of an old container
    never meets the ADD of the next one. Taken after the container's lock. Shared as `locks` is."""
    barriers: Barriers = field(default_factory=Barriers)
    """Of the networks, by name: closed while its plugins free what was not on record when that began."""
    gc_lock: KeyedLock = field(default_factory=KeyedLock)
    adds: AddsDuringGc = field(default_factory=AddsDuringGc)
    occupants: Occupants = field(default_factory=Occupants)
    failed_deletes: FailedDeletes = field(default_factory=FailedDeletes)
    reads: Reads = field(default_factory=lambda: Reads(deadlines.RECORD_READ_SECONDS))

    def net_conf(self, stdin: bytes) -> NetConf:
        """The configuration of a request, the daemon's own keys over it. Raises CniError."""
        return (self._read_before if len(stdin) <= _REMEMBERED_MAX_BYTES else self._read)(stdin)

    def _read(self, stdin: bytes) -> NetConf:
        return load(stdin, self.overlay)

    @functools.cached_property
    def _read_before(self) -> Callable[[bytes], NetConf]:
        # A node has one configuration, and the runtime adds little to it.
        return functools.lru_cache(maxsize=64)(self._read)
