"""The containers that `node.keep` compares: which ones a change of the kernel concerns, and what is reported of each.

For the event loop only.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from multus_daemon import deadlines
from multus_daemon.kernel.watch import Changes
from multus_daemon.pod.check import EVENT
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.upkeep import Compared, Finding
from multus_daemon.pod.view import Entry
from multus_daemon.runtime.workqueue import NEVER
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId, IfName
from multus_daemon.spec.nad.selection import KEEP_ANNOTATION
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX, Events

log = logging.getLogger(__name__)

REPAIRS_MAX: Final = 5
"""Maximum repairs of an attachment within KEEP_CALM_SECONDS: more would fight with another program."""
REST: Final = 40
"""After a comparison, one for changed interfaces waits this many times the processor time of the last one."""
REST_BY_POD: Final = 10
"""After a comparison, one for a changed pod waits this many times the processor time of the last one."""
NEWS_AT_ONCE: Final = 8
NEWS_SECONDS: Final = 60.0
"""A container may cause a few reports at once, and one more after each interval."""


BROKEN: Final = "AttachmentBroken"
REPAIRED: Final = "AttachmentRepaired"
CHANGED: Final = "AttachmentChanged"
READY: Final = "NetworksAttached"
CHANGE_FAILED: Final = "NetworkChangeFailed"


@dataclass(slots=True, eq=False)
class Container:
    """What the event loop knows of a container."""

    entry: Entry
    """Its entry in the view (`pod.view`)."""
    young_until: float
    """Time on the event loop's clock; changes before it are compared at it."""
    asks_from: float = NEVER
    """From when the CHECK of its binaries may run, on the event loop's clock."""
    failing: Mapping[tuple[str, IfName], str] = field(default_factory=dict)
    """The last errors of attachments of which only a plugin's CHECK failed, by network and interface."""
    id: int = -1
    """The host's id of its network namespace; -1 if not known."""
    networks: str = ""
    """Hash of the pod's networks annotation: the event loop should not compare large texts."""
    asked: tuple[str, str] = ("", "")
    """Values of the pod's annotations `multus.io/keep` and `multus.io/hotplug`."""
    compared: str | None = None
    """Value of `networks` that was last compared with the attachments; None before."""
    by_pod: bool = False
    """True if its pod has changed since it was last compared, not only its interfaces."""
    ended: float = 0.0
    """When the last comparison ended, on the event loop's clock."""
    cost: float = 0.0
    """Processor time of the last comparison, in seconds."""
    calm: float = -NEVER
    """From when its next report is within its rate, on the event loop's clock."""
    broken: Mapping[tuple[str, IfName], str] = field(default_factory=dict)
    """The differences of each broken attachment, by network and interface."""
    changed: dict[tuple[str, IfName], float] = field(default_factory=dict)
    """When an attachment was found to be changed by a program in the pod; NEVER once that is reported."""
    repairs: dict[IfName, collections.deque[float]] = field(default_factory=dict)
    """The times of the last repairs by interface."""

    @property
    def pod(self) -> str:
        """`namespace/name`."""
        return self.entry.pod

    def to_report(self, by_pod: Collection[tuple[str, IfName]], now: float) -> list[tuple[str, IfName]]:
        """Return the attachments to report: each once, if a second comparison finds it. `by_pod`: what this one found.

        (KubeVirt renames an interface, and makes another with its name a moment later.)
        """
        self.changed = {key: at for key, at in self.changed.items() if at == NEVER or key in by_pod}
        due = [key for key in by_pod if self.changed.setdefault(key, now) <= now - deadlines.KEEP_YOUNG_SECONDS]
        self.changed |= dict.fromkeys(due, NEVER)
        return due

    @property
    def is_settling(self) -> bool:
        """True if a report must be confirmed by the next comparison."""
        return any(at != NEVER for at in self.changed.values())

    @property
    def rests_until(self) -> float:
        """The earliest time for the next comparison because of a change of its pod or its interfaces.

        So one container takes a bounded share of the processor. If its interfaces change again and again, the first few
        comparisons come at once, then one in NEWS_SECONDS.
        """
        if self.by_pod:
            return self.ended + self.cost * REST_BY_POD
        return max(self.ended + self.cost * REST, self.calm - (NEWS_AT_ONCE - 1) * NEWS_SECONDS)

    def has_news(self, now: float) -> None:
        """Count a comparison whose findings were reported."""
        self.calm = max(self.calm, now) + NEWS_SECONDS

    def may_repair(self, ifname: IfName, now: float) -> bool:
        """Return False if the interface was repaired too often. Thread-safe."""
        times = self.repairs.get(ifname, ())
        return sum(now - at < deadlines.KEEP_CALM_SECONDS for at in times) < REPAIRS_MAX

    def repaired(self, ifname: IfName, now: float) -> None:
        """Count a repair of the interface."""
        self.repairs.setdefault(ifname, collections.deque(maxlen=REPAIRS_MAX)).append(now)


@dataclass(slots=True)
class _Link:
    """A link of the host that containers need."""

    index: int
    """The link's index; 0 if the link does not exist."""
    users: int = 0


class Containers:
    """The containers by id, and by what the kernel reports of them."""

    def __init__(self) -> None:
        self.by_id: dict[ContainerId, Container] = {}
        self._by_namespace: dict[int, ContainerId] = {}
        self._links: dict[str, _Link] = {}

    def enter(self, entry: Entry, now: float) -> bool:
        """Add or replace a container's record; return True if the container is new, or has another namespace."""
        container = self.by_id.get(entry.container_id)
        if container is None or container.entry.netns_id != entry.netns_id:
            self.leave(entry.container_id)
            self._need(entry.links, 1)
            self.by_id[entry.container_id] = Container(
                entry, now + deadlines.KEEP_YOUNG_SECONDS, now + deadlines.KEEP_INTERVAL_SECONDS
            )
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
        """Set the host's id of the container's namespace, by which the kernel reports its changes."""
        self.by_id[container_id].id = number
        self._by_namespace[number] = container_id

    def of(self, pod: str) -> list[Container]:
        """Return the containers of a pod (`namespace/name`). Thread-safe."""
        return [container for container in tuple(self.by_id.values()) if container.entry.pod == pod]

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
        """Count one more container that needs the links (`number` 1), or one less (-1)."""
        for name in links:
            if (link := self._links.get(name)) is None:
                link = self._links[name] = _Link(0)
                with contextlib.suppress(OSError):
                    link.index = socket.if_nametoindex(name)
            link.users += number
            if not link.users:
                del self._links[name]


def announce(engine: Engine, container: Container, result: Compared, now: float) -> bool:
    """Store the result in `container`, and log and send Events about what is new; return True if something is.

    `now`: on the event loop's clock.
    """
    record, pod, events = result.record, result.pod, engine.cluster
    if result.asked:
        _say_what_fails(engine, container, result)
    certain = [item for item in result.left if item.difference.is_certain and not item.difference.by_pod]
    left = _texts(certain)
    has_news = left != container.broken
    for (network, ifname), text in _texts(result.found).items():
        is_repaired = any(item.is_repaired and item.attachment.ifname == ifname for item in result.found)
        if is_repaired and (network, ifname) not in left:
            container.repaired(ifname, now)
            has_news = True
            _say(events, pod, "Normal", REPAIRED, f"network {network}, interface {ifname}: repaired: {text}")
    for (network, ifname), text in left.items():
        if container.broken.get((network, ifname)) != text:
            log.warning("network %s of pod %s differs from its record: %s", network, record.pod, text)
            advice = _advice(container, [item for item in certain if item.attachment.ifname == ifname], now)
            _say(events, pod, "Warning", BROKEN, f"network {network}, interface {ifname}: {text}; {advice}")
    container.broken = left
    by_pod = _texts(item for item in result.left if item.difference.by_pod)
    for network, ifname in container.to_report(by_pod, now):
        text = by_pod[network, ifname]
        log.info("network %s of pod %s: %s", network, record.pod, text)
        _say(events, pod, "Normal", CHANGED, f"network {network}, interface {ifname}: {text}; reported once")
    if result.error is not None:
        log.warning("networks of pod %s: %s", record.pod, result.error)
    if pod is not None and engine.settings.attachments.ready_condition:
        _write_condition(engine, pod, result.error, certain)
    return has_news


def _say_what_fails(engine: Engine, container: Container, result: Compared) -> None:
    """Count attachments of which only a plugin's CHECK fails; report each once, as some fail right after their ADD."""
    failing = _texts(item for item in result.found if not item.difference.is_certain)
    engine.metrics.check_failures.inc(len(failing))
    for (network, ifname), text in failing.items():
        if container.failing.get((network, ifname)) != text:
            log.warning("network %s of pod %s, interface %s: %s", network, result.record.pod, ifname, text)
            message = f"network {network}, interface {ifname}: {text}; the pod goes on, and this is reported once"
            _say(engine.cluster, result.pod, "Warning", EVENT, message)
    container.failing = failing


def _texts(found: Iterable[Finding]) -> dict[tuple[str, IfName], str]:
    """Return what differs, by network and interface."""
    texts: dict[tuple[str, IfName], list[str]] = {}
    for item in found:
        texts.setdefault((item.attachment.name, item.attachment.ifname), []).append(item.difference.text)
    return {key: ", ".join(values) for key, values in texts.items()}


def _advice(container: Container, left: list[Finding], now: float) -> str:
    if not any(item.difference.repair for item in left):
        return "only a new pod has it again"
    if not any(item.is_repaired for item in left):
        return f"set {KEEP_ANNOTATION} to repair on the pod or the network, or make the pod anew"
    if not all(container.may_repair(item.attachment.ifname, now) for item in left):
        minutes = deadlines.KEEP_CALM_SECONDS / 60
        return f"it was repaired {REPAIRS_MAX} times in {minutes:g} minutes: find out who changes it"
    return "the repair is tried again"


def _write_condition(engine: Engine, pod: Pod, error: CniError | None, left: Sequence[Finding]) -> None:
    if error is not None:
        reason, message = CHANGE_FAILED, str(error)
    elif left:
        reason, message = BROKEN, "; ".join(map(str, left))
    else:
        reason, message = READY, ""
    engine.cluster.condition(pod, ready=reason == READY, reason=reason, message=message[:EVENT_MESSAGE_MAX])


def _say(events: Events, pod: Pod | None, kind: str, reason: str, message: str) -> None:
    if pod is not None:
        events.event(pod, kind, reason, message)
