"""The containers that `node.converge` keeps: the state of each, and which of them a change of the kernel concerns.

For the event loop only.
"""

from __future__ import annotations

import collections
import contextlib
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from multus_daemon import deadlines
from multus_daemon.kernel.watch import Changes
from multus_daemon.spec.attachment import LEAVING, ContainerRecord
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.names import ALTERNATIVE_NAME_MAX_BYTES, ContainerId, IfName, ifname_problem

REPAIRS_MAX: Final = 5
"""Number of repairs of an attachment within CONVERGE_CALM_SECONDS; more of them fight with somebody."""
NEVER: Final = float("inf")
REST: Final = 40
"""A comparison because of changed interfaces follows the last one after this many times its processor time."""
REST_BY_POD: Final = 10
"""The same for a change of the pod."""
NEWS_AT_ONCE: Final = 8
NEWS_SECONDS: Final = 60.0
"""A container has this many announcements at once, and one more after each such time."""
PARSED_MAX: Final = 1024
"""Characters of an annotation that is parsed on the event loop, in at most 1 ms; a longer one is parsed in a thread."""


@dataclass(slots=True, eq=False)
class Container:
    """The state of a container."""

    pod: str
    """`namespace/name`."""
    netns: str
    netns_id: str
    due: float = NEVER
    """When it is compared, on the event loop's clock."""
    young_until: float = 0.0
    """Changes before this time, on that clock, are compared then."""
    selections: tuple[str, ...] = ()
    """The elements of the annotation that are attached, sorted."""
    links: Collection[str] = ()
    """The names of the host's links that its attachments need."""
    id: int = -1
    """The host's id of its network namespace; -1 if not known."""
    networks: str = ""
    """Hash of the annotation: a comparison of large texts costs the event loop too much."""
    asked: tuple[str, str] = ("", "")
    """The values of the annotations that are not networks."""
    compared: str | None = None
    """Value of `networks` that was compared with `selections`."""
    runs: bool = False
    """True from when it is due until it was compared."""
    again: bool = False
    """True if something changed while it was compared."""
    by_pod: bool = False
    """True if its pod changed, not only its interfaces."""
    ended: float = 0.0
    """When it was last compared, on that clock."""
    cost: float = 0.0
    """Processor time of that, in seconds."""
    calm: float = -NEVER
    """When its next piece of news is no longer one too many, on that clock."""
    delays: Iterator[float] | None = None
    """The pauses before the next tries; None unless the last try failed."""
    broken: Mapping[tuple[str, IfName], str] = field(default_factory=dict)
    """The differences of each broken attachment, by network and interface."""
    changed: dict[tuple[str, IfName], float] = field(default_factory=dict)
    """When attachments were found that a program in the pod has changed; NEVER once that is reported."""
    repairs: dict[IfName, collections.deque[float]] = field(default_factory=dict)
    """The times of the last repairs by interface."""

    def attached(self, record: ContainerRecord) -> None:
        """Note the elements of the annotation that are attached. An interface may be another network's now."""
        # Not equal to any annotation if something was cut off.
        cut_off = [LEAVING] if record.lacks_routes else []
        selections = tuple(sorted([*cut_off, *filter(None, (item.attached_for for item in record.attachments))]))
        if selections != self.selections:
            self.selections = selections
            self.compared = None
            self.repairs.clear()
            self.changed.clear()

    def to_report(self, by_pod: Collection[tuple[str, IfName]], now: float) -> list[tuple[str, IfName]]:
        """Return the attachments that are to be reported: each once, and if it stays so. `by_pod`: what is found now.

        KubeVirt renames an interface, and makes another one of its name a moment later.
        """
        self.changed = {key: at for key, at in self.changed.items() if at == NEVER or key in by_pod}
        due = [key for key in by_pod if self.changed.setdefault(key, now) <= now - deadlines.CONVERGE_YOUNG_SECONDS]
        self.changed |= dict.fromkeys(due, NEVER)
        return due

    @property
    def is_settling(self) -> bool:
        """True if a report waits for the next comparison."""
        return any(at != NEVER for at in self.changed.values())

    def after(self, at: float, *, by_pod: bool) -> float:
        """Return `at`, or the later time from which a change of the pod, or of its interfaces, may be served.

        One container takes a bounded share of the processor. One whose interfaces change again and again has a first
        few comparisons at once, and then one in NEWS_SECONDS.
        """
        if by_pod:
            return max(at, self.ended + self.cost * REST_BY_POD)
        calm = self.calm - (NEWS_AT_ONCE - 1) * NEWS_SECONDS
        return max(at, self.ended + self.cost * REST, calm)

    def has_news(self, now: float) -> None:
        """Note that a comparison found something that was announced."""
        self.calm = max(self.calm, now) + NEWS_SECONDS

    def may_repair(self, ifname: IfName, now: float) -> bool:
        """Return False if the interface was repaired too often. Thread-safe."""
        times = self.repairs.get(ifname, ())
        return sum(now - at < deadlines.CONVERGE_CALM_SECONDS for at in times) < REPAIRS_MAX

    def repaired(self, ifname: IfName, now: float) -> None:
        """Note that the interface was repaired."""
        self.repairs.setdefault(ifname, collections.deque(maxlen=REPAIRS_MAX)).append(now)


class Containers:
    """The containers by id, by pod, by the id of their namespace, and by the links of the host that they need."""

    def __init__(self) -> None:
        self.by_id: dict[ContainerId, Container] = {}
        self._by_pod: dict[str, set[ContainerId]] = {}
        self._by_namespace: dict[int, ContainerId] = {}
        self._by_link: dict[str, set[ContainerId]] = {}
        self._indexes: dict[str, int] = {}
        """The indexes of those links, by name."""

    def enter(self, container_id: ContainerId, record: ContainerRecord) -> Container | None:
        """Enter a record that was written; return the container if it is new, or has another namespace."""
        container = self.by_id.get(container_id)
        is_new = container is None or container.netns_id != record.netns_id
        if container is None or is_new:
            self.leave(container_id)
            container = self.by_id[container_id] = Container(record.pod, record.sandbox.netns, record.netns_id)
            self._by_pod.setdefault(container.pod, set()).add(container_id)
        container.attached(record)
        self._need(container_id, container, _links(record))
        return container if is_new else None

    def leave(self, container_id: ContainerId) -> None:
        """Drop a container whose record was removed."""
        container = self.by_id.pop(container_id, None)
        if container is None:
            return
        self._need(container_id, container, ())
        if self._by_namespace.get(container.id) == container_id:
            del self._by_namespace[container.id]
        _discard(self._by_pod, container.pod, container_id)

    def follow(self, container_id: ContainerId, number: int) -> None:
        """Note the host's id of the container's namespace."""
        self.by_id[container_id].id = number
        self._by_namespace[number] = container_id

    def of(self, pod: str) -> Collection[ContainerId]:
        """Return the containers of a pod (`namespace/name`)."""
        return self._by_pod.get(pod, ())

    def concerned(self, found: Changes) -> set[ContainerId]:
        """Return the containers that changes of the kernel concern; remember the state of the links."""
        known = self._by_namespace
        changed = {known[number] for number in found.namespaces if number in known}
        for name, (index, is_up) in found.links.items():
            if containers := self._by_link.get(name):
                # An ADD makes its bridge, which others need too, report itself. Only one made anew lacks their ports.
                if len(containers) == 1 or index != self._indexes.get(name, 0) or not is_up:
                    changed |= containers
                self._indexes[name] = index
        for name in found.addresses:
            changed |= self._by_link.get(name, set())
        return changed

    def _need(self, container_id: ContainerId, container: Container, links: Collection[str]) -> None:
        """Set the links that the container needs."""
        for name in set(container.links).difference(links):
            _discard(self._by_link, name, container_id)
            if name not in self._by_link:
                self._indexes.pop(name, None)
        for name in set(links).difference(container.links):
            self._by_link.setdefault(name, set()).add(container_id)
            if name not in self._indexes:
                with contextlib.suppress(OSError):
                    self._indexes[name] = socket.if_nametoindex(name)
        container.links = links


def _discard(sets: dict[str, set[ContainerId]], key: str, container_id: ContainerId) -> None:
    """Remove the container from the set of the key, and a set that is empty then."""
    if containers := sets.get(key):
        containers.discard(container_id)
        if not containers:
            del sets[key]


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
