"""The engine as a value: what the verbs need of the world, the node's policy, and what requests share.

Made once, by the daemon. The verbs are functions of this package's modules; their first parameter is the engine.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from multus_daemon import deadlines
from multus_daemon.kernel.ops import PodNetns
from multus_daemon.plugins.plugin import Program
from multus_daemon.pod.occupants import Occupants
from multus_daemon.runtime.gates import Gates
from multus_daemon.runtime.threads import Barriers, KeyedLock, Reads
from multus_daemon.spec.attachment import Attachment, Invocation, Sandbox
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.names import ContainerId, IfName
from multus_daemon.spec.cni.result import Result
from multus_daemon.spec.netconf.model import NetConf, load
from multus_daemon.spec.ports import (
    ClusterStore,
    ConfFiles,
    DelegateStore,
    DeviceFiles,
    DeviceSource,
)

LOCKS: Final = "containers.lock"
"""The file of the locks of containers and of namespaces, in the socket's directory."""
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


class DelegateRunner(Protocol):
    """Runs every plugin of one attachment by the rules of libcni."""

    def programs(self, configs: Iterable[NetworkConfig]) -> Mapping[str, Program]:
        """Look for the plugins that the configurations name, by type. Reads the disk."""
        ...

    def plan(self, sandbox: Sandbox, attachment: Attachment, programs: Mapping[str, Program]) -> Attachment:
        """The attachment with `served_by`. Pure; `programs` are those of its configuration.

        Raises CniError for everything about it that can be known to fail before anything is touched.
        """
        ...

    def invocations(self, sandbox: Sandbox, attachment: Attachment) -> Sequence[tuple[str, Invocation]]:
        """What an ADD would call, in order, by plugin type; without the results of those before. Touches nothing."""
        ...

    def runs_here(self, attachment: Attachment, verb: str) -> bool:
        """True where the verb, of a planned attachment, is for the calling thread: its plugins are built in, and quick.

        Else it waits, for processes or for addresses, and others can go on beside it.
        """
        ...

    def add(self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns) -> Result:
        """ADD, plugins in order; the result is for `remember`, once there is nothing more to be changed in it.

        Raises CniError; what has been made until then is left for `delete`.
        """
        ...

    def delete(self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns) -> None:
        """DEL, plugins in reverse; what is absent counts as done, can be repeated.

        Raises CniError, NeverAttachedError where it failed and only an interface could be left.
        """
        ...

    def check(self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns) -> None:
        """CHECK with the stored result as prevResult, nothing below CNI 0.4.0. Raises CniError."""
        ...

    def remember(self, sandbox: Sandbox, attachment: Attachment) -> None:
        """Write the attachment's result to where libcni has it. Raises CniError."""
        ...

    def status(self, config: NetworkConfig) -> None:
        """STATUS of each plugin in order; the first failure, with its code. Raises CniError."""
        ...

    def gc(self, config: NetworkConfig, valid: Sequence[tuple[ContainerId, IfName]]) -> None:
        """GC of each plugin, `valid` being what is attached to the network. One failure does not stop the others.

        Raises CniError.
        """
        ...


class LinkOps(Protocol):
    """The network namespaces of the node."""

    def open(self, path: str, *, may_be_own: bool = False) -> PodNetns:
        """Return the namespace at `path`, which is opened when it is first entered. `may_be_own`: see `PodNetns`."""
        ...

    def is_netns(self, path: str) -> bool:
        """Report whether `path` is a network namespace that exists. Never waits."""
        ...

    def netns_problem(self, path: str) -> str:
        """Return why `path` cannot be used as a network namespace, to follow the path; empty if it can. Never waits."""
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
    """Locks of containers by id, and of network namespaces by path. Shared with another daemon of the node.

    Whoever changes a container holds its lock, then the lock of the namespace in which it works: a late DEL of an old
    container never meets the ADD of the next one at the same path.
    """
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
