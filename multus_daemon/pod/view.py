"""The node's records in memory, as far as questions about all containers need them, and the followers of changes.

`Records` updates it with each write and removal, and reads once what earlier daemons have written. An earlier daemon
may serve its last requests while this one already runs: for that time, each question first reads records that are new
on disk. After it the view is complete, and no question reads the disk.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from multus_daemon import deadlines
from multus_daemon.spec.attachment import LEAVING, Attachment, ContainerRecord
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.names import ALTERNATIVE_NAME_MAX_BYTES, ContainerId, IfName, PodUid, ifname_problem


class Network(NamedTuple):
    """What the view has of an attachment."""

    name: str
    ifname: IfName
    has_link: bool
    """False for the auxiliary chain, which works on another network's interface."""
    is_measured: bool
    """True if the attachment has, or may have, an interface of its own that is not the cluster network's."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What the view has of a container: some 300 bytes of its record."""

    container_id: ContainerId
    pod: str
    """`namespace/name`."""
    pod_uid: PodUid
    netns: str
    netns_id: str
    created: float
    complete: bool
    given_up: bool
    detached: bool
    """True if only cached results, which could not be removed, are left of it."""
    networks: tuple[Network, ...]
    claims: frozenset[str]
    """UIDs of the ResourceClaims whose devices it has."""
    selections: tuple[str, ...]
    """The elements of the pod's annotation that are attached, sorted. With LEAVING if an ADD or DEL was cut off."""
    links: tuple[str, ...]
    """Names of the host's links that its attachments need: their own, and the masters."""

    @classmethod
    def of(cls, record: ContainerRecord) -> Entry:
        """Return the entry of a record."""
        attachments = record.attachments
        cut_off = [LEAVING] if record.lacks_routes else []
        return cls(
            record.sandbox.container_id,
            record.pod,
            record.pod_uid,
            record.sandbox.netns,
            record.netns_id,
            record.created,
            record.complete,
            record.given_up,
            bool(attachments) and all(item.detached for item in attachments),
            tuple([_network(item) for item in attachments]),
            frozenset([item.claimed.claim_uid for item in attachments if item.claimed and item.is_attached]),
            tuple(sorted([*cut_off, *[sys.intern(item.attached_for) for item in attachments if item.attached_for]])),
            _links(record) if record.complete else (),
        )

    def is_followed_by(self, other: Entry) -> bool:
        """Return True if `other` is a newer container with the same namespace, and an interface with the same name.

        Then this container is gone: otherwise the ADD of `other` would have been refused.
        """
        if other.container_id == self.container_id or other.netns != self.netns or other.created <= self.created:
            return False
        own = {item.ifname for item in self.networks if item.has_link}
        return any(item.ifname in own for item in other.networks if item.has_link)


Follow = Callable[[ContainerId, Entry | None, bool], None]
"""Called in any thread after a record was written, read (argument True) or removed (entry None). Must not raise."""


class View:
    """The containers on record. Thread-safe."""

    def __init__(self) -> None:
        self.followers: list[Follow] = []
        """Called in this order with each change."""
        self.unreadable: frozenset[ContainerId] = frozenset()
        """Containers whose record could not be read."""
        self.is_loaded = False
        """True once the records of earlier daemons were read."""
        self.is_complete = False
        """True once no predecessor writes records any more."""
        self._complete_from = time.monotonic() + deadlines.PREDECESSOR_SECONDS
        self._guard = threading.Lock()
        self._entries: dict[ContainerId, Entry] = {}
        self._readers = 0
        self._left: set[ContainerId] = set()
        """Containers that have left since the oldest of the readers began: what it has read of them is outdated."""

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over a copy of all containers."""
        with self._guard:
            return iter(tuple(self._entries.values()))

    def get(self, container_id: ContainerId) -> Entry | None:
        """Return the container's entry; None if it has no record."""
        return self._entries.get(container_id)

    def of_pod(self, pod: str) -> list[Entry]:
        """Return the containers of a pod (`namespace/name`)."""
        return [entry for entry in self if entry.pod == pod]

    def at(self, netns: str) -> list[Entry]:
        """Return the containers whose network namespace has this path; several, as paths are used again."""
        return [entry for entry in self if entry.netns == netns]

    @property
    def counts(self) -> collections.Counter[str]:
        """Number of attachments by network."""
        return collections.Counter(network.name for entry in self for network in entry.networks)

    def enter(self, record: ContainerRecord, *, is_read: bool = False) -> None:
        """Add a record that was written; `is_read`: was read in `reading`, and is added unless it has changed since."""
        entry = Entry.of(record)
        with self._guard:
            if is_read and (entry.container_id in self._left or entry.container_id in self._entries):
                return
            self._entries[entry.container_id] = entry
        for follow in self.followers:
            follow(entry.container_id, entry, is_read)

    def leave(self, container_ids: Iterable[ContainerId]) -> None:
        """Remove the containers, whose records were removed."""
        for container_id in container_ids:
            with self._guard:
                self._entries.pop(container_id, None)
                if self._readers:
                    self._left.add(container_id)
            for follow in self.followers:
                follow(container_id, None, False)

    @contextlib.contextmanager
    def reading(self) -> Iterator[frozenset[ContainerId]]:
        """In the block, the caller reads the records that the view lacks; yield the containers that it has."""
        is_late = time.monotonic() >= self._complete_from
        with self._guard:
            self._readers += 1
            known = frozenset(self._entries)
        try:
            yield known
            self.is_complete = self.is_complete or is_late
        finally:
            self.is_loaded = True
            with self._guard:
                self._readers -= 1
                if not self._readers:
                    self._left.clear()


def _network(attachment: Attachment) -> Network:
    is_measured = not (attachment.cluster_network or attachment.auxiliary) and attachment.is_attached
    # Results before CNI 0.3.0 name no interfaces.
    names_it = attachment.has_interface or not (attachment.result and attachment.result.interfaces)
    # The names are the same for all containers: they are kept once.
    name, ifname = sys.intern(attachment.name), IfName(sys.intern(attachment.ifname))
    return Network(name, ifname, not attachment.auxiliary, is_measured and names_it)


def _links(record: ContainerRecord) -> tuple[str, ...]:
    """Return the names of the host's links that the attachments need: their own, and the masters."""
    found = {
        item.name
        for attachment in record.attachments
        for item in (attachment.result.interfaces if attachment.result else ())
        if not item.sandbox
    }
    masters = {
        master
        for attachment in record.attachments
        for plugin in attachment.config.plugins
        if isinstance(master := gojson.get(plugin.fields, "master"), str) and master
    }
    return tuple(name for name in found | masters if not ifname_problem(name, longest=ALTERNATIVE_NAME_MAX_BYTES))
