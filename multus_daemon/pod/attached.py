"""What is in memory of the containers on record: networks, claims, namespaces, and who follows the records."""

from __future__ import annotations

import collections
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable

from multus_daemon import deadlines
from multus_daemon.spec.attachment import ContainerRecord
from multus_daemon.spec.cni.names import ContainerId, PodUid

Follow = Callable[[ContainerId, ContainerRecord | None], None]
"""Called with each record that was written, and with None after one was removed; in any thread. Never raises."""


class Attached:
    """The networks of each container on record. Those of earlier daemons come with `Records.read_all`."""

    def __init__(self) -> None:
        self.followers: list[Follow] = []
        self._guard = threading.Lock()
        self._networks: dict[ContainerId, tuple[str, ...]] = {}
        self._claims: dict[ContainerId, tuple[str, PodUid, frozenset[str]]] = {}
        """The pod's name and UID, and the UIDs of the ResourceClaims of which the container has devices."""

    @property
    def containers(self) -> set[ContainerId]:
        """The containers that were entered."""
        with self._guard:
            return set(self._networks)

    @property
    def counts(self) -> collections.Counter[str]:
        """Number of attachments by network."""
        with self._guard:
            return collections.Counter(network for networks in self._networks.values() for network in networks)

    def enter(self, record: ContainerRecord, *, replace: bool = True) -> None:
        """Note the networks of a container; without `replace` only if it was not entered, and without a word."""
        # The same text for all containers: it is kept once.
        networks = tuple(sys.intern(item.name) for item in record.attachments)
        held = frozenset(item.claimed.claim_uid for item in record.attachments if item.claimed and item.is_attached)
        container_id = record.sandbox.container_id
        with self._guard:
            if replace or container_id not in self._networks:
                self._networks[container_id] = networks
                self._claims.pop(container_id, None)
                if held:
                    self._claims[container_id] = record.pod, record.pod_uid, held
        if replace:
            for follow in self.followers:
                follow(container_id, record)

    def claims_of_others(self, record: ContainerRecord) -> set[str]:
        """Return the UIDs of the ResourceClaims of which other containers of the pod have devices."""
        pod, own = (record.pod, record.pod_uid), record.sandbox.container_id
        with self._guard:
            others = [held for name, (*of, held) in self._claims.items() if name != own and tuple(of) == pod]
        return set().union(*others)

    def leave(self, container_ids: Collection[ContainerId]) -> None:
        """Note that the containers have no record any more."""
        with self._guard:
            for container_id in container_ids:
                self._networks.pop(container_id, None)
                self._claims.pop(container_id, None)
        for follow in self.followers:
            for container_id in container_ids:
                follow(container_id, None)


class Occupants:
    """Index of the containers on record by the path of their network namespace.

    Runtimes and people reuse the names of namespaces. DEL asks here whether a newer container uses the path of an old
    one. ADD enters a container before its record is written; records of earlier daemons are read from the disk. A
    predecessor serves its last requests while this daemon already runs: for that time every question looks for records
    that the index lacks; after it the index is complete and no question reads the disk.
    """

    def __init__(self) -> None:
        self.is_complete = False
        """True if `at` needs no `fill`."""
        self._guard = threading.Lock()
        self._containers: dict[str, set[ContainerId]] = {}
        self._paths: dict[ContainerId, str] = {}
        self._settled_at = time.monotonic() + deadlines.PREDECESSOR_SECONDS

    def at(self, path: str) -> frozenset[ContainerId]:
        """Return the containers that were entered at the path. Call `fill` first unless `is_complete`."""
        with self._guard:
            return frozenset(self._containers.get(path, ()))

    def fill(self, list_ids: Callable[[], Iterable[ContainerId]], netns_of: Callable[[ContainerId], str]) -> None:
        """Enter each container on disk that the index lacks; `netns_of` returns its path, empty if unknown. Blocks.

        Raises what the two functions raise; the index is not complete then.
        """
        settled = time.monotonic() >= self._settled_at
        with self._guard:
            known = set(self._paths)
        for container_id in list_ids():
            if container_id not in known and (path := netns_of(container_id)):
                self.enter(path, container_id, replace=False)
        self.is_complete = settled

    def enter(self, path: str, container_id: ContainerId, *, replace: bool = True) -> None:
        """Note that the container is, or is about to be, attached at the path. A container has one path."""
        with self._guard:
            if replace or container_id not in self._paths:
                self._leave(container_id)
                self._paths[container_id] = path
                self._containers.setdefault(path, set()).add(container_id)

    def leave(self, container_id: ContainerId) -> None:
        """Note that the container has no record any more."""
        with self._guard:
            self._leave(container_id)

    def _leave(self, container_id: ContainerId) -> None:
        path = self._paths.pop(container_id, "")
        if containers := self._containers.get(path):
            containers.discard(container_id)
            if not containers:
                del self._containers[path]
