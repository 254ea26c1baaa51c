"""Keep the networks of running pods as they should be: a root task that says which container is due, and when.

A container is due when its pod's annotation is not what is attached, when the kernel reports a change of its interfaces
(`kernel.watch`), after a pause when it failed, and every ten minutes in any case. Then `pod.converge` does what is
missing, in a thread of its own; a few containers at a time, so that a plugin that hangs does not hold up the others.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

from multus_daemon import deadlines
from multus_daemon.kernel.watch import Watch
from multus_daemon.node.announce import announce
from multus_daemon.node.containers import NEVER, PARSED_MAX, Container, Containers
from multus_daemon.pod import changes
from multus_daemon.pod.converge import Converged, converge
from multus_daemon.pod.drift import Finding
from multus_daemon.pod.engine import Engine
from multus_daemon.runtime import portal
from multus_daemon.runtime.deadline import Deadline, ExpiredError, backoff
from multus_daemon.runtime.slots import URGENT, NoSlotError, Slots
from multus_daemon.runtime.threads import NoThreadError
from multus_daemon.spec.attachment import ContainerRecord, Pod
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.following import HOTPLUG_ANNOTATION, KEEP_ANNOTATION
from multus_daemon.spec.ports import Events, StoreUnavailableError

log = logging.getLogger(__name__)

NOT_FOLLOWED: Final = "AnnotationsNotFollowed"
NOT_REPORTED: Final = "interfaces"
"""Name of the degradation while the kernel does not report changes of the pods' interfaces."""

AT_ONCE: Final = 4
"""Number of containers at a time; half as many more whose plugins have not failed of late."""
DIFFERENCES_MAX: Final = 100
"""Number of broken attachments that a status names; the others are counted."""


class Converge:
    """The root task. `watch`, `look`, `broken` and `differences` may be called in any thread, the rest in the loop."""

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
        repairs = max(1, at_once // 2)
        self._slots = Slots(at_once + repairs, reserved=repairs, kept=1, name="comparisons of running pods")
        self._engine = engine
        self._events = events
        self._configuration = configuration
        self._open = kernel
        self._kernel: Watch | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._containers = Containers()
        self._controller = ""
        self._soonest = NEVER
        """When the first container is due, on the event loop's clock."""
        self._early: dict[str, Pod] | None = {}
        """Pods that were reported before the records were read; None after it."""
        self._noted: collections.deque[tuple[float, ContainerId, ContainerRecord | None]] = collections.deque()
        """Records that were written, or removed if None, and are not entered yet, with the time of that."""
        self._enters_soon = False
        """True if the loop is about to enter them."""
        self._reading: asyncio.TimerHandle | None = None
        """The next reading; None if the kernel has reported nothing since the last one."""
        self._quiet_until = 0.0
        """When the kernel is read again at the earliest, on the event loop's clock."""

    # --- what is asked of it -----------------------------------------------------------------------------------------

    def broken(self) -> Mapping[str, int]:
        """Return the number of attachments that differ from their record, by network. Thread-safe."""
        return collections.Counter(
            network for container in tuple(self._containers.by_id.values()) for network, _ in container.broken
        )

    def differences(self) -> list[dict[str, str]]:
        """Return what differs, as last compared, of the first DIFFERENCES_MAX attachments, by pod. Thread-safe."""
        found = [
            {"pod": container.pod, "network": network, "interface": ifname, "difference": text}
            for container in tuple(self._containers.by_id.values())
            for (network, ifname), text in container.broken.items()
        ]
        return sorted(found, key=lambda item: (item["pod"], item["interface"]))[:DIFFERENCES_MAX]

    def watch(self, container_id: ContainerId, record: ContainerRecord | None) -> None:
        """Take note of a record that was written, or removed if it is None. In any thread; never raises."""
        if record is not None and not record.complete:
            return
        self._noted.append((time.monotonic(), container_id, record))
        # What is removed can wait for the next reading, however long it takes.
        if record is not None and not self._enters_soon and self._loop is not None:
            self._enters_soon = True
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.call_later, deadlines.CONVERGE_SETTLE_SECONDS, self._enter)

    def look(self, pod: str) -> None:
        """Compare the containers of a pod (`namespace/name`) soon: the kernel reports no routes. Thread-safe."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._look, pod)

    def _look(self, pod: str) -> None:
        for container_id in self._containers.of(pod):
            self._due_anew(container_id)

    def pod_changed(self, pod: Pod) -> None:
        """Compare the pod's annotation with what is attached. On the event loop."""
        if self._early is not None:
            self._early[str(pod)] = pod
            return
        self._enter()
        if str(pod) == self._controller:
            self._is_anothers()
        asked = pod.annotations.get(HOTPLUG_ANNOTATION, ""), pod.annotations.get(KEEP_ANNOTATION, "")
        networks = f"{hash(pod.annotations.get(selection.NETWORKS_ANNOTATION, '')):x}"
        for container_id in self._containers.of(str(pod)):
            container = self._containers.by_id[container_id]
            container.networks = networks
            if asked != container.asked or self._is_changed(container, pod):
                container.asked = asked
                # Somebody may have corrected what failed.
                self._due_anew(container_id, by_pod=True)

    def _is_changed(self, container: Container, pod: Pod) -> bool:
        """Return whether the annotation is not what is attached."""
        if self._engine.policy.hotplug == "off" or self._is_anothers():
            return False
        if container.networks == container.compared:
            return False
        container.compared = container.networks
        annotation = pod.annotations.get(selection.NETWORKS_ANNOTATION, "")
        if len(annotation) > PARSED_MAX:
            return True
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
                # It may have left something undone.
                for container_id, container in self._containers.by_id.items():
                    container.compared = None
                    self._due(container_id, self._now())
            self._controller = controller
        return bool(controller)

    # --- the root task -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the pods' networks for ever."""
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._open_kernel(), name="kernel")
                group.create_task(self._load(), name="records")
                await self._serve(group)
        finally:
            if self._kernel is not None:
                self._loop.remove_reader(self._kernel.fileno())
                self._kernel.close()

    async def _open_kernel(self) -> None:
        """Have the kernel report changes, also of the containers that are known already."""
        seconds = deadlines.CONVERGE_INTERVAL_SECONDS
        while self._kernel is None:
            try:
                self._kernel = self._open()
            except OSError as error:
                reason = f"broken attachments are found within {seconds:g} s, not at once: {error.strerror or error}"
                log.warning("%s", reason)
                self._engine.gates.degraded.close(NOT_REPORTED, reason)
                await asyncio.sleep(seconds)
        self._listen()
        for container_id, container in self._containers.by_id.items():
            self._follow(container_id, container)
        self._engine.gates.degraded.open(NOT_REPORTED)

    async def _load(self) -> None:
        """Enter the records of earlier daemons; the predecessor serves its last requests while this daemon runs.

        What cannot be read is tried again for ever.
        """
        pauses = itertools.chain((0.0, deadlines.PREDECESSOR_SECONDS), backoff(*deadlines.RECONCILE_RETRY_SECONDS))
        for number, pause in enumerate(pauses):
            await asyncio.sleep(pause)
            found: Mapping[ContainerId, ContainerRecord | None] = {}
            is_missing = True
            try:
                found = await portal.run(Deadline(), self._engine.records.read_all, name="converge")
                is_missing = None in found.values()
            except Exception as error:
                # A fault in one record must not stop the daemon.
                log.error(
                    "pods of an earlier daemon are not kept, tried again: %s",
                    error, exc_info=not isinstance(error, OSError),
                )  # fmt: skip
            removed = {container_id for _, container_id, record in tuple(self._noted) if record is None}
            self._enter()
            for container_id, record in found.items():
                is_known = container_id in self._containers.by_id or container_id in removed
                if record is not None and record.complete and not is_known:
                    self._enter_one(container_id, record, random.uniform(0.0, deadlines.CONVERGE_START_SECONDS))
            early, self._early = self._early or {}, None
            for pod in early.values():
                self.pod_changed(pod)
            self._wake.set()
            if number and not is_missing:
                return

    async def _serve(self, group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            self._enter()
            now = self._now()
            containers = self._containers.by_id
            due = [(item.due, name) for name, item in containers.items() if item.due <= now and not item.runs]
            for _, container_id in sorted(due):
                container = containers[container_id]
                container.runs = True
                group.create_task(self._in_turn(container_id, container), name="converge")
            self._soonest = min((item.due for item in containers.values() if not item.runs), default=NEVER)
            timer = None if self._soonest == NEVER else loop.call_at(self._soonest, self._wake.set)
            await self._wake.wait()
            if timer is not None:
                timer.cancel()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _due(self, container_id: ContainerId, at: float, *, by_pod: bool = False) -> bool:
        """Have the container served at that time, or earlier; False if it was to be served by then anyway.

        `by_pod`: the pod has changed, not its interfaces.
        """
        container = self._containers.by_id[container_id]
        if container.runs:
            is_new = not container.again or (by_pod and not container.by_pod)
            container.again, container.by_pod = True, container.by_pod or by_pod
            return is_new
        container.by_pod |= by_pod
        if (at := container.after(at, by_pod=by_pod)) >= container.due:
            return False
        container.due = at
        if at < self._soonest:
            self._wake.set()
        return True

    def _due_anew(self, container_id: ContainerId, *, by_pod: bool = False) -> None:
        """Have the container served now, although its last try failed."""
        self._containers.by_id[container_id].delays = None
        self._due(container_id, self._now(), by_pod=by_pod)

    # --- records and the kernel --------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Enter the records that were written, and drop those that were removed."""
        if self._noted:
            self._catch_up()

    def _catch_up(self) -> bool:
        """Enter what was noted, and read what the kernel reports; False if that concerns no container."""
        self._enters_soon = False
        noted: dict[ContainerId, tuple[float, ContainerRecord | None]] = {}
        while self._noted:
            at, container_id, record = self._noted.popleft()
            noted[container_id] = at, record
        for container_id, (_, record) in noted.items():
            if record is None:
                self._containers.leave(container_id)
        # What the kernel has reported so far of new containers was done by their ADDs.
        is_concerned = self._read()
        for container_id, (at, record) in noted.items():
            if record is not None:
                self._enter_one(container_id, record, self._first_wait(at))
        return is_concerned

    def _first_wait(self, noted_at: float) -> float:
        """Return after how many seconds a container is compared for the first time."""
        if self._engine.policy.ready_condition:
            return 0.0
        # The annotation may have changed during the ADD, and the interfaces before the loop came to the record.
        is_late = self._now() > noted_at + deadlines.CONVERGE_LATE_SECONDS
        if is_late or self._engine.policy.hotplug != "off":
            return deadlines.CONVERGE_YOUNG_SECONDS
        return deadlines.CONVERGE_INTERVAL_SECONDS * random.uniform(0.5, 1.0)

    def _enter_one(self, container_id: ContainerId, record: ContainerRecord, wait: float) -> None:
        """Enter a record; if the container is new, follow its namespace and compare it after `wait` seconds."""
        container = self._containers.enter(container_id, record)
        if container is None:
            return
        self._follow(container_id, container)
        container.young_until = self._now() + deadlines.CONVERGE_YOUNG_SECONDS
        self._due(container_id, self._now() + wait)

    def _follow(self, container_id: ContainerId, container: Container) -> None:
        if self._kernel is not None:
            try:
                if (number := self._kernel.follow(container.netns, container.netns_id)) is not None:
                    self._containers.follow(container_id, number)
            except OSError as error:
                log.debug("changes in %s are not reported: %s", container.netns, error)

    def _listen(self) -> None:
        if self._loop is not None and self._kernel is not None and self._kernel.fileno() >= 0:
            self._loop.add_reader(self._kernel.fileno(), self._readable)

    def _readable(self) -> None:
        """Read soon: what follows within a few milliseconds belongs to it, and a request at work has more to do."""
        if self._loop is None or self._kernel is None:
            return
        self._loop.remove_reader(self._kernel.fileno())
        wait = deadlines.CONVERGE_BUSY_SECONDS if self._engine.locks.keys else deadlines.CONVERGE_SETTLE_SECONDS
        self._reading = self._loop.call_at(max(self._now() + wait, self._quiet_until), self._read_in_time)

    def _read_in_time(self) -> None:
        if not self._catch_up():
            # Others make links all the time, and each reading costs more than the messages in it.
            self._quiet_until = self._now() + deadlines.CONVERGE_NOISE_SECONDS

    def _read(self) -> bool:
        """Read what the kernel reports, and note who is due; False if it concerns no container."""
        if self._kernel is None or self._kernel.fileno() < 0:
            return False
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
            self._listen()
        try:
            found = self._kernel.changes()
        except OSError as error:
            log.warning("changes of the pods' interfaces can't be read: %s", error)
            return False
        now = self._now()
        concerned = self._containers.concerned(found)
        held = self._engine.locks.keys if concerned else frozenset()
        is_news = False
        for container_id in concerned:
            container = self._containers.by_id[container_id]
            if container.delays is None:
                # A request at work on it, most often a DEL, is what changes it.
                at = now + deadlines.CONVERGE_HELD_SECONDS if container_id in held else now
                is_news |= self._due(container_id, max(at, container.young_until))
        if found.lost:
            log.warning("changes of pods' interfaces were lost: all pods of the node are compared")
            for container_id in self._containers.by_id:
                self._due(container_id, now + random.uniform(0.0, deadlines.CONVERGE_START_SECONDS))
        return is_news or found.lost or found.more

    # --- one container -----------------------------------------------------------------------------------------------

    async def _in_turn(self, container_id: ContainerId, container: Container) -> None:
        """Serve a container that is due, when it has a slot: a plugin that hangs does not hold up the others.

        Slots are shared by namespace and by annotation, which pods of one template have in common, as those of requests
        are. Only what is not waiting for a plugin of late has the reserved ones.
        """
        is_calm = container.delays is None and not container.by_pod
        rank = URGENT if is_calm else URGENT + 1
        groups = container.pod.partition("/")[0], container.networks
        try:
            async with self._slots.hold(container_id, rank, deadlines.CONVERGE_INTERVAL_SECONDS, groups):
                await self._converge(container_id, container)
        except NoSlotError as error:
            log.warning("networks of pod %s are not compared now: %s", container.pod, error)
            container.runs, container.due = False, self._now() + deadlines.CONVERGE_RETRY_SECONDS[1]
        finally:
            self._wake.set()

    async def _converge(self, container_id: ContainerId, container: Container) -> None:
        """Serve a container, and say what was found."""
        after = deadlines.CONVERGE_INTERVAL_SECONDS * random.uniform(0.9, 1.1)
        container.again = container.by_pod = False
        try:
            if container_id in self._engine.locks.keys:
                after = deadlines.CONVERGE_HELD_SECONDS
                return
            work = partial(self._compare, container_id, container)
            result = await portal.run(Deadline(deadlines.CONVERGE_SECONDS), work, name="converge")
            if result is None:
                # The container has ended, and its DEL will come; or it is there already.
                return
            if announce(self._engine, self._events, container, result, self._now()):
                container.has_news(self._now())
            is_well = result.error is None and not any(item.is_repaired for item in result.left)
            container.delays = None if is_well else container.delays or _delays()
            if container.is_settling:
                after = deadlines.CONVERGE_YOUNG_SECONDS
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
            container.runs, container.ended = False, self._now()
            container.due = self._now() + after
            if container.again and container.delays is None:
                container.due = container.after(self._now(), by_pod=container.by_pod)

    def _compare(self, container_id: ContainerId, container: Container) -> Converged | None:
        """Call `pod.converge`, and note its processor time. In a thread of its own."""
        may_repair = partial(self._may_repair, container)
        try:
            return converge(self._engine, container_id, self._configuration, may_repair)
        finally:
            container.cost = time.thread_time()

    def _may_repair(self, container: Container, item: Finding) -> bool:
        """Return False for an attachment that was repaired too often. In the thread of `pod.converge`."""
        return self._loop is None or container.may_repair(item.attachment.ifname, self._loop.time())


def _delays() -> Iterator[float]:
    return backoff(*deadlines.CONVERGE_RETRY_SECONDS, jitter=0.1)
