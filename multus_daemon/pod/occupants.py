"""Index of the containers on record by the path of their network namespace.

Runtimes and people reuse the names of namespaces. DEL asks here whether a newer container uses the path of an old one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from multus_daemon import deadlines
from multus_daemon.spec.cni.names import ContainerId


class Occupants:
    """ADD enters a container before its record is written. Records of earlier daemons are read from the disk.

    A predecessor serves its last requests while this daemon already runs. For that time every question looks for
    records that the index lacks; after it the index is complete and no question reads the disk.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._containers: dict[str, set[ContainerId]] = {}
        self._paths: dict[ContainerId, str] = {}
        self._settled_at = time.monotonic() + deadlines.PREDECESSOR_SECONDS
        self._is_complete = False

    @property
    def is_complete(self) -> bool:
        """True if `at` reads nothing."""
        return self._is_complete

    def at(self, path: str) -> frozenset[ContainerId]:
        """Return the containers that were entered at the path. Call `fill` first unless `is_complete`."""
        with self._guard:
            return frozenset(self._containers.get(path, ()))

    def fill(
        self,
        list_ids: Callable[[], Iterable[ContainerId]],
        netns_of: Callable[[ContainerId], str],
    ) -> None:
        """Enter each container on disk that the index lacks; `netns_of` returns its path, empty if unknown. Blocks.

        Raises what the two functions raise; the index is not complete then.
        """
        settled = time.monotonic() >= self._settled_at
        with self._guard:
            known = set(self._paths)
        for container_id in list_ids():
            if container_id not in known and (path := netns_of(container_id)):
                self.enter(path, container_id, replace=False)
        self._is_complete = settled

    def enter(self, path: str, container_id: ContainerId, *, replace: bool = True) -> None:
        """Note that the container is, or is about to be, attached at the path. One path counts for a container."""
        with self._guard:
            if not replace and container_id in self._paths:
                return
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
