"""The containers on record: the networks of each, for the metrics, and who follows the records."""

from __future__ import annotations

import collections
import sys
import threading
from collections.abc import Callable, Collection

from multus_daemon.spec.attachment import ContainerRecord
from multus_daemon.spec.cni.names import ContainerId

Follow = Callable[[ContainerId, ContainerRecord | None], None]
"""Called with each record that was written, and with None after one was removed; in any thread. Never raises."""


class Attached:
    """The networks of each container on record. Those of earlier daemons come with `Records.read_all`."""

    def __init__(self) -> None:
        self.followers: list[Follow] = []
        self._guard = threading.Lock()
        self._networks: dict[ContainerId, tuple[str, ...]] = {}

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
        with self._guard:
            if replace or record.sandbox.container_id not in self._networks:
                self._networks[record.sandbox.container_id] = networks
        if replace:
            for follow in self.followers:
                follow(record.sandbox.container_id, record)

    def leave(self, container_ids: Collection[ContainerId]) -> None:
        """Note that the containers have no record any more."""
        with self._guard:
            for container_id in container_ids:
                self._networks.pop(container_id, None)
        for follow in self.followers:
            for container_id in container_ids:
                follow(container_id, None)
