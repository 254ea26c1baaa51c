"""Keep the networks of running pods as they should be: a root task that says which container is due, and when.

A container is due when its pod's annotation is not what is attached, when the kernel reports a change of its interfaces
(`kernel.watch`), after a pause when it failed, and every ten minutes in any case. Then `pod.converge` does what is
missing, in a thread of its own; a few containers at a time, so that a plugin that hangs does not hold up the others.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import random
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from multus_daemon import deadlines
from multus_daemon.kernel.watch import UnsupportedKernelError, Watch
from multus_daemon.pod import changes
from multus_daemon.pod.converge import Converged, converge
from multus_daemon.pod.drift import Finding
from multus_daemon.pod.engine import Engine
from multus_daemon.runtime import portal
from multus_daemon.runtime.deadline import Deadline, ExpiredError, backoff
from multus_daemon.runtime.threads import NoThreadError
from multus_daemon.spec.attachment import LEAVING, ContainerRecord, Pod
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId, IfName
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.following import HOTPLUG_ANNOTATION, KEEP_ANNOTATION
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX, Events, StoreUnavailableError

log = logging.getLogger(__name__)

BROKEN: Final = "AttachmentBroken"
REPAIRED: Final = "AttachmentRepaired"
READY: Final = "NetworksAttached"
CHANGE_FAILED: Final = "NetworkChangeFailed"
NOT_FOLLOWED: Final = "AnnotationsNotFollowed"

REPAIRS_MAX: Final = 5
"""Number of repairs of an attachment within CONVERGE_CALM_SECONDS; more of them fight with somebody."""
AT_ONCE: Final = 4
"""Number of containers at a time."""
DIFFERENCES_MAX: Final = 100
"""Number of broken attachments that a status names; the others are counted."""
_NEVER: Final = float("inf")


@dataclass(slots=True, eq=False)
class _Container:
    """The state of a container in the loop."""

    pod: str
    """`namespace/name`."""
    netns: str
    netns_id: str
    selections: tuple[str, ...]
    """The elements of the annotation that are attached, sorted."""
    names: tuple[str, ...]
    """The links of the host that its attachments need."""
    due: float
    """On the event loop's clock."""
    id: int = -1
    """The host's id of its network namespace; -1 if not known."""
    asked: tuple[str, str] = ("", "")
    """The values of the annotations that are not networks."""
    runs: bool = False
    again: bool = False
    """True if something changed while it ran."""
    delays: Iterator[float] | None = None
    """The pauses before the next tries; None unless the last try failed."""
    broken: Mapping[tuple[str, IfName], str] = field(default_factory=dict)
    """What differs, by network and interface."""
    repairs: dict[IfName, collections.deque[float]] = field(default_factory=dict)
    """The times of the last repairs by interface."""

    def attached(self, selections: tuple[str, ...]) -> None:
        """Take note of the elements that are attached. An interface may be another network's now."""
        if selections != self.selections:
            self.selections = selections
            self.repairs.clear()


class Converge:
    """The root task, and what it knows of each container. `watch` may be called in any thread, the rest in the loop."""

    def __init__(
        self,
        engine: Engine,
        events: Events,
        configuration: Callable[[], bytes],
        *,
        at_once: int = AT_ONCE,
        kernel: Callable[[], Watch] = Watch,
    ) -> None:
        """`configuration` returns the standard input that an ADD would get; `at_once`: number of containers."""
        self._at_once = at_once
        self._engine = engine
        self._events = events
        self._configuration = configuration
        self._open = kernel
        self._kernel: Watch | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._containers: dict[ContainerId, _Container] = {}
        self._by_id: dict[int, ContainerId] = {}
        self._by_pod: dict[str, set[ContainerId]] = {}
        self._by_link: dict[str, set[ContainerId]] = {}
        self._links: dict[str, int] = {}
        """The indexes of the host's links that several containers need, such as bridges."""
        self._controller = ""
        self._soonest = _NEVER
        """When the first container is due, on the event loop's clock."""
        self._early: dict[str, Pod] | None = {}
        """Pods that were reported before the records were read; None after it."""
        self._guard = threading.Lock()
        self._noted: dict[ContainerId, _Container | None] = {}
        """Records that were written or removed, and are not entered yet."""

    # --- what is asked of it -----------------------------------------------------------------------------------------

    def broken(self) -> Mapping[str, int]:
        """Return the number of attachments that differ from their record, by network. Thread-safe."""
        return collections.Counter(
            network for container in tuple(self._containers.values()) for network, _ in container.broken
        )

    def differences(self) -> list[dict[str, str]]:
        """Return what differs, as last compared, of the first DIFFERENCES_MAX attachments, by pod. Thread-safe."""
        found = [
            {"pod": container.pod, "network": network, "interface": ifname, "difference": text}
            for container in tuple(self._containers.values())
            for (network, ifname), text in container.broken.items()
        ]
        return sorted(found, key=lambda item: (item["pod"], item["interface"]))[:DIFFERENCES_MAX]

    def watch(self, container_id: ContainerId, record: ContainerRecord | None) -> None:
        """Take note of a record that was written, or removed if it is None. In any thread; never raises."""
        if record is not None and not record.complete:
            return
        made = None if record is None else _container(record)
        with self._guard:
            is_first = not any(self._noted.values())
            self._noted[container_id] = made
        # A container that has ended can wait for the next one.
        if made is not None and is_first and self._loop is not None:
            with contextlib.suppress(RuntimeError):
                seconds = deadlines.CONVERGE_NOTED_SECONDS
                self._loop.call_soon_threadsafe(self._loop.call_later, seconds, self._enter_noted)

    def look(self, pod: str) -> None:
        """Compare the containers of a pod (`namespace/name`) soon: the kernel reports no routes. Thread-safe."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._look, pod)

    def _look(self, pod: str) -> None:
        for container_id in self._by_pod.get(pod, ()):
            self._containers[container_id].delays = None
            self._due(container_id, 0.0)

    def pod_changed(self, pod: Pod) -> None:
        """Compare the pod's annotation with what is attached. On the event loop."""
        if self._early is not None:
            self._early[str(pod)] = pod
            return
        self._enter_noted()
        for container_id in self._by_pod.get(str(pod), ()):
            container = self._containers[container_id]
            asked = _asked(pod)
            if asked == container.asked and not self._is_changed(container, pod):
                continue
            container.asked = asked
            # Somebody may have corrected what failed.
            container.delays = None
            self._due(container_id, 0.0)

    def _is_changed(self, container: _Container, pod: Pod) -> bool:
        """Return whether the annotation is not what is attached."""
        if self._engine.policy.hotplug == "off" or self._is_anothers():
            return False
        annotation = pod.annotations.get(selection.NETWORKS_ANNOTATION, "")
        try:
            return changes.wanted(annotation, pod.namespace) != container.selections
        except CniError:
            # `pod.annotation` reports it.
            return True

    def _is_anothers(self) -> bool:
        """Return whether another program follows the annotations of this node's pods; say so when that changes."""
        controller = self._engine.cluster.hotplug_controller()
        if controller != self._controller:
            if controller:
                text = f"annotations are not followed (hotplug): {controller} does that on this node"
                log.warning("%s", text)
                self._events.node_event("Warning", NOT_FOLLOWED, text)
            else:
                log.info("annotations are followed again: %s has left this node", self._controller)
            self._controller = controller
        return bool(controller)

    # --- the root task -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the pods' networks for ever."""
        self._loop = asyncio.get_running_loop()
        try:
            self._kernel = self._open()
            self._loop.add_reader(self._kernel.fileno(), self._readable)
        except (UnsupportedKernelError, OSError) as error:
            log.warning(
                "changes of the pods' interfaces are not reported, and found within %g s instead: %s",
                deadlines.CONVERGE_INTERVAL_SECONDS,
                error,
            )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._load(), name="records")
                await self._serve(group)
        finally:
            if self._kernel is not None:
                self._loop.remove_reader(self._kernel.fileno())
                self._kernel.close()

    async def _load(self) -> None:
        """Enter the records of earlier daemons; the predecessor serves its last requests while this daemon runs."""
        for pause in (0.0, deadlines.PREDECESSOR_SECONDS):
            await asyncio.sleep(pause)
            found: Mapping[ContainerId, ContainerRecord | None] = {}
            try:
                found = await portal.run(Deadline(), self._engine.records.read_all, name="converge")
            except Exception as error:
                # A fault in one record must not stop the daemon.
                log.error("pods of an earlier daemon are not kept: %s", error, exc_info=not isinstance(error, OSError))
            with self._guard:
                for container_id, record in found.items():
                    if record is not None and record.complete and container_id not in self._containers:
                        made = _container(record)
                        made.due = self._now() + random.uniform(0.0, deadlines.CONVERGE_START_SECONDS)
                        self._noted.setdefault(container_id, made)
            early, self._early = self._early or {}, None
            for pod in early.values():
                self.pod_changed(pod)
            self._wake.set()

    async def _serve(self, group: asyncio.TaskGroup) -> None:
        running, loop = 0, asyncio.get_running_loop()

        def ended(_: asyncio.Task[None]) -> None:
            nonlocal running
            running -= 1
            self._wake.set()

        while True:
            self._wake.clear()
            self._enter_noted()
            now = self._now()
            due = [(item.due, name) for name, item in self._containers.items() if item.due <= now and not item.runs]
            for _, container_id in sorted(due)[: self._at_once - running]:
                container = self._containers[container_id]
                container.runs, container.again = True, False
                running += 1
                task = group.create_task(self._converge(container_id, container), name="converge")
                task.add_done_callback(ended)
            timer = None
            if running < self._at_once:
                self._soonest = min((item.due for item in self._containers.values() if not item.runs), default=_NEVER)
                timer = None if self._soonest == _NEVER else loop.call_at(self._soonest, self._wake.set)
            await self._wake.wait()
            if timer is not None:
                timer.cancel()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _due(self, container_id: ContainerId, seconds: float) -> None:
        """Have the container served after that time, or earlier."""
        container = self._containers[container_id]
        if container.runs:
            container.again = True
            return
        at = self._now() + seconds
        if at < container.due:
            container.due = at
            self._wake.set()

    # --- containers --------------------------------------------------------------------------------------------------

    def _enter_noted(self) -> None:
        """Enter the records that were written, and drop those that were removed."""
        with self._guard:
            noted, self._noted = self._noted, {}
        if not noted:
            return
        # What the kernel has reported so far was done by the ADDs themselves.
        self._drain()
        for container_id, made in noted.items():
            before = self._containers.get(container_id)
            if made is None:
                self._leave(container_id)
            elif before is not None and before.netns_id == made.netns_id:
                before.attached(made.selections)
                self._set_names(container_id, before, made.names)
            else:
                self._leave(container_id)
                self._enter(container_id, made)

    def _enter(self, container_id: ContainerId, container: _Container) -> None:
        self._containers[container_id] = container
        self._by_pod.setdefault(container.pod, set()).add(container_id)
        names, container.names = container.names, ()
        self._set_names(container_id, container, names)
        if self._kernel is not None:
            try:
                found = self._kernel.follow(container.netns, container.netns_id)
            except OSError as error:
                log.debug("changes in %s are not reported: %s", container.netns, error)
                found = None
            if found is not None:
                container.id = found
                self._by_id[found] = container_id
        if container.due < 0:
            wait = deadlines.CONVERGE_INTERVAL_SECONDS * random.uniform(0.5, 1.0)
            # The annotation may have changed during the ADD; and the condition is to be written.
            at_once = self._engine.policy.hotplug != "off" or self._engine.policy.ready_condition
            container.due = self._now() + (0.0 if at_once else wait)
        if container.due < self._soonest:
            self._wake.set()

    def _set_names(self, container_id: ContainerId, container: _Container, names: tuple[str, ...]) -> None:
        for name in set(container.names).difference(names):
            if sharers := self._by_link.get(name):
                sharers.discard(container_id)
                if not sharers:
                    del self._by_link[name]
                    self._links.pop(name, None)
        for name in set(names).difference(container.names):
            self._by_link.setdefault(name, set()).add(container_id)
            if name not in self._links:
                with contextlib.suppress(OSError):
                    self._links[name] = socket.if_nametoindex(name)
        container.names = names

    def _leave(self, container_id: ContainerId) -> None:
        container = self._containers.pop(container_id, None)
        if container is None:
            return
        self._set_names(container_id, container, ())
        if self._by_id.get(container.id) == container_id:
            del self._by_id[container.id]
        if containers := self._by_pod.get(container.pod):
            containers.discard(container_id)
            if not containers:
                del self._by_pod[container.pod]

    # --- the kernel --------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        """Read what the kernel reports, soon: what follows within a few milliseconds belongs to it."""
        if self._loop is not None and self._kernel is not None:
            self._loop.remove_reader(self._kernel.fileno())
            self._loop.call_later(deadlines.CONVERGE_SETTLE_SECONDS, self._read)

    def _read(self) -> None:
        if self._loop is None or self._kernel is None or self._kernel.fileno() < 0:
            return
        self._enter_noted()
        if self._drain():
            self._listen()
        else:
            # Others make links all the time, and each reading costs more than the messages in it.
            self._loop.call_later(deadlines.CONVERGE_NOISE_SECONDS, self._listen)

    def _listen(self) -> None:
        if self._loop is not None and self._kernel is not None and self._kernel.fileno() >= 0:
            self._loop.add_reader(self._kernel.fileno(), self._readable)

    def _drain(self) -> bool:
        """Read what the kernel reports; False if it concerns no container."""
        if self._kernel is None:
            return False
        try:
            found = self._kernel.changes()
        except OSError as error:
            log.warning("changes of the pods' interfaces can't be read: %s", error)
            return False
        changed = {self._by_id[number] for number in found.namespaces if number in self._by_id}
        for name, (index, is_up) in found.links.items():
            if containers := self._by_link.get(name):
                # An ADD makes its bridge, which others need too, report itself. Only one made anew lacks their ports.
                if len(containers) == 1 or index != self._links.get(name, 0) or not is_up:
                    changed |= containers
                self._links[name] = index
        for name in found.addresses:
            changed |= self._by_link.get(name, set())
        held = self._engine.locks.keys if changed else frozenset()
        for container_id in changed:
            if self._containers[container_id].delays is None:
                # A request at work on it, most often a DEL, is what changes it.
                self._due(container_id, deadlines.CONVERGE_HELD_SECONDS if container_id in held else 0.0)
        if found.lost:
            log.warning("changes of pods' interfaces were lost: all pods of the node are compared")
            for container_id in self._containers:
                self._due(container_id, random.uniform(0.0, deadlines.CONVERGE_START_SECONDS))
        return bool(changed) or found.lost or found.more

    # --- one container -----------------------------------------------------------------------------------------------

    async def _converge(self, container_id: ContainerId, container: _Container) -> None:
        """Serve a container that is due, and say what was found."""
        after = deadlines.CONVERGE_INTERVAL_SECONDS * random.uniform(0.9, 1.1)
        try:
            if container_id in self._engine.locks.keys:
                after = deadlines.CONVERGE_HELD_SECONDS
                return
            work = partial(
                converge, self._engine, container_id, self._configuration, partial(self._may_repair, container)
            )
            result = await portal.run(Deadline(deadlines.CONVERGE_SECONDS), work, name="converge")
            if result is None:
                # The container has ended, and its DEL will come; or it is there already.
                return
            self._take(container, result)
            is_well = result.error is None and not any(item.is_repaired for item in result.left)
            container.delays = None if is_well else container.delays or _delays()
        except (CniError, OSError, NoThreadError, ExpiredError, StoreUnavailableError) as error:
            log.warning("networks of pod %s can't be compared with their record: %s", container.pod, error)
            container.delays = container.delays or _delays()
        except Exception as error:
            # A fault in one container must not stop the daemon.
            log.error("networks of pod %s can't be compared with their record", container.pod, exc_info=error)
            container.delays = container.delays or _delays()
        finally:
            if container.delays is not None:
                after = min(after, next(container.delays))
            container.runs = False
            container.due = self._now() + (0.0 if container.again and container.delays is None else after)

    def _may_repair(self, container: _Container, item: Finding) -> bool:
        """Return False for an attachment that was repaired too often. In the thread of `pod.converge`."""
        times = container.repairs.get(item.attachment.ifname, ())
        loop = self._loop
        return loop is None or sum(loop.time() - at < deadlines.CONVERGE_CALM_SECONDS for at in times) < REPAIRS_MAX

    def _take(self, container: _Container, result: Converged) -> None:
        """Remember what was found, and announce what is new."""
        record, pod = result.record, result.pod
        container.attached(_selections(record))
        # What only a plugin's CHECK says is for who asks: `multusctl drift`.
        certain = [item for item in result.left if item.difference.is_certain]
        left = _texts(certain)
        for (network, ifname), text in _texts(result.found).items():
            if any(item.is_repaired and item.attachment.ifname == ifname for item in result.found):
                times = container.repairs.setdefault(ifname, collections.deque(maxlen=REPAIRS_MAX))
                if (network, ifname) not in left:
                    times.append(self._now())
                    self._say(pod, "Normal", REPAIRED, f"network {network}, interface {ifname}: repaired: {text}")
        for (network, ifname), text in left.items():
            if container.broken.get((network, ifname)) != text:
                log.warning("network %s of pod %s differs from its record: %s", network, record.pod, text)
                advice = self._advice(container, [item for item in certain if item.attachment.ifname == ifname])
                self._say(pod, "Warning", BROKEN, f"network {network}, interface {ifname}: {text}; {advice}")
        container.broken = left
        if result.error is not None:
            log.warning("networks of pod %s: %s", record.pod, result.error)
        if pod is not None and self._engine.policy.ready_condition:
            self._write_condition(pod, result.error, certain)

    def _advice(self, container: _Container, left: list[Finding]) -> str:
        if not any(item.difference.repair for item in left):
            return "only a new pod has it again"
        if not any(item.is_repaired for item in left):
            return f"set {KEEP_ANNOTATION} to repair on the pod or the network, or make the pod anew"
        if not all(self._may_repair(container, item) for item in left):
            minutes = deadlines.CONVERGE_CALM_SECONDS / 60
            return f"it was repaired {REPAIRS_MAX} times in {minutes:g} minutes: find out who changes it"
        return "the repair is tried again"

    def _write_condition(self, pod: Pod, error: CniError | None, left: Sequence[Finding]) -> None:
        if error is not None:
            reason, message = CHANGE_FAILED, str(error)
        elif left:
            reason, message = BROKEN, "; ".join(map(str, left))
        else:
            reason, message = READY, ""
        self._engine.cluster.condition(pod, ready=reason == READY, reason=reason, message=message[:EVENT_MESSAGE_MAX])

    def _say(self, pod: Pod | None, kind: str, reason: str, message: str) -> None:
        if pod is not None:
            self._events.event(pod, kind, reason, message[:EVENT_MESSAGE_MAX])


def _delays() -> Iterator[float]:
    return backoff(*deadlines.CONVERGE_RETRY_SECONDS, jitter=0.1)


def _asked(pod: Pod) -> tuple[str, str]:
    return pod.annotations.get(HOTPLUG_ANNOTATION, ""), pod.annotations.get(KEEP_ANNOTATION, "")


def _texts(found: Iterable[Finding]) -> dict[tuple[str, IfName], str]:
    """Return what differs, by network and interface."""
    texts: dict[tuple[str, IfName], list[str]] = {}
    for item in found:
        texts.setdefault((item.attachment.name, item.attachment.ifname), []).append(item.difference.text)
    return {key: ", ".join(values) for key, values in texts.items()}


def _selections(record: ContainerRecord) -> tuple[str, ...]:
    """Return what an annotation is compared with: not equal to any if something was cut off."""
    cut_off = [LEAVING] if record.lacks_routes else []
    return tuple(sorted([*cut_off, *(item.attached_for for item in record.attachments if item.selection)]))


def _container(record: ContainerRecord) -> _Container:
    names = {
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
    return _Container(
        pod=record.pod,
        netns=record.sandbox.netns,
        netns_id=record.netns_id,
        selections=_selections(record),
        names=tuple(sorted(names | masters)),
        due=-1.0,
    )
