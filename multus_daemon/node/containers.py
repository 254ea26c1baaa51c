"""The containers that `node.keep` keeps: the state of each, and which of them a change of the kernel concerns.

For the event loop only.
"""

from __future__ import annotations

import collections
import contextlib
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from multus_daemon import deadlines
from multus_daemon.kernel.watch import Changes
from multus_daemon.pod.view import Entry
from multus_daemon.runtime.workqueue import NEVER
from multus_daemon.spec.cni.names import ContainerId, IfName

REPAIRS_MAX: Final = 5
"""Number of repairs of an attachment within KEEP_CALM_SECONDS; more of them fight with another program."""
REST: Final = 40
"""A comparison because of changed interfaces follows the last one after this many times its processor time."""
REST_BY_POD: Final = 10
"""The same for a change of the pod."""
NEWS_AT_ONCE: Final = 8
NEWS_SECONDS: Final = 60.0
"""A container has this many announcements at once, and one more after each such time."""


@dataclass(slots=True, eq=False)
class Container:
    """The state of a container."""

    entry: Entry
    """Its present record."""
    young_until: float
    """Changes before this time, on the event loop's clock, are compared then."""
    id: int = -1
    """The host's id of its network namespace; -1 if not known."""
    networks: str = ""
    """Hash of the annotation: a comparison of large texts costs the event loop too much."""
    asked: tuple[str, str] = ("", "")
    """The values of the annotations that are not networks."""
    compared: str | None = None
    """Value of `networks` that was compared with what is attached."""
    by_pod: bool = False
    """True if its pod has changed since it was last compared, not only its interfaces."""
    ended: float = 0.0
    """When it was last compared, on that clock."""
    cost: float = 0.0
    """Processor time of that, in seconds."""
    calm: float = -NEVER
    """When its next piece of news is no longer one too many, on that clock."""
    broken: Mapping[tuple[str, IfName], str] = field(default_factory=dict)
    """The differences of each broken attachment, by network and interface."""
    changed: dict[tuple[str, IfName], float] = field(default_factory=dict)
    """When attachments were found that a program in the pod has changed; NEVER once that is reported."""
    repairs: dict[IfName, collections.deque[float]] = field(default_factory=dict)
    """The times of the last repairs by interface."""

    @property
    def pod(self) -> str:
        """`namespace/name`."""
        return self.entry.pod

    def to_report(self, by_pod: Collection[tuple[str, IfName]], now: float) -> list[tuple[str, IfName]]:
        """Return the attachments that are to be reported: each once, and if it stays so. `by_pod`: what is found now.

        KubeVirt renames an interface, and makes another one of its name a moment later.
        """
        self.changed = {key: at for key, at in self.changed.items() if at == NEVER or key in by_pod}
        due = [key for key in by_pod if self.changed.setdefault(key, now) <= now - deadlines.KEEP_YOUNG_SECONDS]
        self.changed |= dict.fromkeys(due, NEVER)
        return due

    @property
    def is_settling(self) -> bool:
        """True if a report waits for the next comparison."""
        return any(at != NEVER for at in self.changed.values())

    @property
    def rests_until(self) -> float:
        """The time from which a change of its pod, or of its interfaces, may be served.

        One container takes a bounded share of the processor. One whose interfaces change again and again has a first
        few comparisons at once, and then one in NEWS_SECONDS.
        """
        if self.by_pod:
            return self.ended + self.cost * REST_BY_POD
        return max(self.ended + self.cost * REST, self.calm - (NEWS_AT_ONCE - 1) * NEWS_SECONDS)

    def has_news(self, now: float) -> None:
        """Note that a comparison found something that was announced."""
        self.calm = max(self.calm, now) + NEWS_SECONDS

    def may_repair(self, ifname: IfName, now: float) -> bool:
        """Return False if the interface was repaired too often. Thread-safe."""
        times = self.repairs.get(ifname, ())
        return sum(now - at < deadlines.KEEP_CALM_SECONDS for at in times) < REPAIRS_MAX

    def repaired(self, ifname: IfName, now: float) -> None:
        """Note that the interface was repaired."""
        self.repairs.setdefault(ifname, collections.deque(maxlen=REPAIRS_MAX)).append(now)


@dataclass(slots=True)
class _Link:
    """A link of the host that containers need."""

    index: int
    """0 if it did not exist."""
    users: int = 0


class Containers:
    """The containers by id, and by what the kernel reports of them."""

    def __init__(self) -> None:
        self.by_id: dict[ContainerId, Container] = {}
        self._by_namespace: dict[int, ContainerId] = {}
        self._links: dict[str, _Link] = {}

    def enter(self, entry: Entry, now: float) -> bool:
        """Enter a record; return True if the container is new, or has another namespace."""
        container = self.by_id.get(entry.container_id)
        if container is None or container.entry.netns_id != entry.netns_id:
            self.leave(entry.container_id)
            self._need(entry.links, 1)
            self.by_id[entry.container_id] = Container(entry, now + deadlines.KEEP_YOUNG_SECONDS)
            return True
        self._need(entry.links, 1)
        self._need(container.entry.links, -1)
        if container.entry.selections != entry.selections:
            # An interface may be another network's now.
            container.compared = None
            container.repairs.clear()
            container.changed.clear()
        container.entry = entry
        return False

    def leave(self, container_id: ContainerId) -> None:
        """Drop a container whose record was removed."""
        container = self.by_id.pop(container_id, None)
        if container is None:
            return
        self._need(container.entry.links, -1)
        if self._by_namespace.get(container.id) == container_id:
            del self._by_namespace[container.id]

    def follow(self, container_id: ContainerId, number: int) -> None:
        """Note the host's id of the container's namespace."""
        self.by_id[container_id].id = number
        self._by_namespace[number] = container_id

    def of(self, pod: str) -> list[Container]:
        """Return the containers of a pod (`namespace/name`)."""
        return [container for container in self.by_id.values() if container.entry.pod == pod]

    def concerned(self, found: Changes) -> set[ContainerId]:
        """Return the containers that changes of the kernel concern; remember the state of the links."""
        known = self._by_namespace
        changed = {known[number] for number in found.namespaces if number in known}
        names = set(found.addresses).intersection(self._links)
        for name, (index, is_up) in found.links.items():
            if link := self._links.get(name):
                # An ADD makes its bridge, which others need too, report itself. Only one made anew lacks their ports.
                if link.users == 1 or index != link.index or not is_up:
                    names.add(name)
                link.index = index
        if names:
            changed |= {name for name, item in self.by_id.items() if not names.isdisjoint(item.entry.links)}
        return changed

    def _need(self, links: Iterable[str], number: int) -> None:
        """Count a container that needs the links (1), or does not any more (-1)."""
        for name in links:
            if (link := self._links.get(name)) is None:
                link = self._links[name] = _Link(0)
                with contextlib.suppress(OSError):
                    link.index = socket.if_nametoindex(name)
            link.users += number
            if not link.users:
                del self._links[name]
