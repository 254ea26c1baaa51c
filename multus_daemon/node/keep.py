"""Keep the networks of running pods as they should be: a root task that decides which container is compared, and when.

A container is due when its pod's annotation is not what is attached, when the kernel reports a change of its interfaces
(`kernel.watch`), after a pause when it failed, and every ten minutes in any case. Then `pod.upkeep` does what is
missing, in a thread of its own. The containers wait in a `WorkQueue`; a few are compared at a time, so that a plugin
that hangs does not hold up the others. Pods without their networks (`node.lacking`) are looked for every five minutes.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from multus_daemon import deadlines
from multus_daemon.kernel.watch import Watch
from multus_daemon.node import lacking
from multus_daemon.node.announce import announce
from multus_daemon.node.containers import Container, Containers
from multus_daemon.pod import changes
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.upkeep import Compared, Finding, keep
from multus_daemon.pod.view import Entry
from multus_daemon.runtime import portal
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.workqueue import NEVER, Groups, RetryError, WorkQueue
from multus_daemon.spec.attachment import Pod
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
PARSED_MAX: Final = 1024
"""Characters of an annotation that is parsed on the event loop, in at most 1 ms; a longer one is parsed in a thread."""


class Keep:
    """The root task. `look`, `broken` and `differences` may be called in any thread, the rest in the loop."""

    def __init__(
        self,
        engine: Engine,
        events: Events,
        configuration: Callable[[], bytes],
        *,
        at_once: int = AT_ONCE,
        lacking_seconds: float = deadlines.RECONCILE_SECONDS,
        kernel: Callable[[], Watch] = Watch,
    ) -> None:
        """`configuration` returns the standard input that an ADD would get; `at_once`: number of containers.

        `lacking_seconds`: from one look for pods without their networks to the next.
        """
        self._engine = engine
        self._events = events
        self._configuration = configuration
        self._open = kernel
        self._kernel: Watch | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue = WorkQueue[ContainerId](
            self._work,
            retry=deadlines.KEEP_RETRY_SECONDS,
            failed=self._failed,
            at_once=at_once,
            reserved=max(1, at_once // 2),
            is_urgent=self._is_calm,
            groups=self._groups,
            not_before=self._rests_until,
            name="keep",
        )
        self._containers = Containers()
        self._lacking = lacking.Reports(engine, events, self._reason, seconds=lacking_seconds)
        self._controller = ""
        self._early: dict[str, Pod] = {}
        """Pods that were reported before their records were read, by `namespace/name`."""
        self._noted: collections.deque[tuple[float, ContainerId, Entry | None, bool]] = collections.deque()
        """Changes of the view that are not entered yet, with their time."""
        self._enters_soon = False
        """True if the loop is about to enter them."""
        self._reading: asyncio.TimerHandle | None = None
        """The next reading; None if the kernel has reported nothing since the last one."""
        self._quiet_until = 0.0
        """When the kernel is read again at the earliest, on the event loop's clock."""
        engine.records.view.followers.append(self._follow)

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

    def look(self, pod: str) -> None:
        """Compare the containers of a pod (`namespace/name`) soon: the kernel reports no routes. Thread-safe."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._look, pod)

    def _look(self, pod: str) -> None:
        for container in self._containers.of(pod):
            self._queue.add(container.entry.container_id)

    def _reason(self, pod: str) -> str:
        """Return what the comparison of a pod that fails waits for; empty if it does not fail."""
        failing = (item.entry.container_id for item in self._containers.of(pod))
        return next((self._queue.reason(name) for name in failing if self._queue.failures(name)), "")

    # --- the pods ----------------------------------------------------------------------------------------------------

    def pod_changed(self, pod: Pod) -> None:
        """Compare the pod's annotation with what is attached. On the event loop."""
        self._enter()
        if str(pod) == self._controller:
            self._is_anothers()
        containers = self._containers.of(str(pod))
        if not (containers or self._engine.records.view.is_loaded):
            self._early[str(pod)] = pod
        for container in containers:
            self._pod_changed(container, pod)

    def _pod_changed(self, container: Container, pod: Pod) -> None:
        asked = pod.annotations.get(HOTPLUG_ANNOTATION, ""), pod.annotations.get(KEEP_ANNOTATION, "")
        container.networks = f"{hash(pod.annotations.get(selection.NETWORKS_ANNOTATION, '')):x}"
        if asked != container.asked or self._is_changed(container, pod):
            container.asked = asked
            container.by_pod = True
            # It may correct what failed.
            self._queue.add(container.entry.container_id)

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
            return changes.wanted(annotation, pod.namespace) != container.entry.selections
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
                    self._queue.add_after(container_id, 0)
            self._controller = controller
        return bool(controller)

    # --- the root task -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the pods' networks for ever."""
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._open_kernel(), name="kernel")
                group.create_task(self._lacking.run(), name="pods")
                self._enter()
                await self._queue.run()
        finally:
            if self._kernel is not None:
                self._loop.remove_reader(self._kernel.fileno())
                self._kernel.close()

    async def _open_kernel(self) -> None:
        """Have the kernel report changes, also of the containers that are known already."""
        seconds = deadlines.KEEP_INTERVAL_SECONDS
        while self._kernel is None:
            try:
                self._kernel = self._open()
            except OSError as error:
                reason = f"broken attachments are found within {seconds:g} s, not at once: {error.strerror or error}"
                log.warning("%s", reason)
                self._engine.gates.degraded.close(NOT_REPORTED, reason)
                await asyncio.sleep(seconds)
        self._listen()
        for container in self._containers.by_id.values():
            self._follow_namespace(container.entry)
        self._engine.gates.degraded.open(NOT_REPORTED)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # --- records and the kernel --------------------------------------------------------------------------------------

    def _follow(self, container_id: ContainerId, entry: Entry | None, is_read: bool) -> None:
        """Take note of a change of the view. In any thread."""
        if entry is not None and not entry.complete:
            return
        self._noted.append((time.monotonic(), container_id, entry, is_read))
        # What is removed can wait for the next reading, however long it takes.
        if entry is not None and not self._enters_soon and self._loop is not None:
            self._enters_soon = True
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.call_later, deadlines.KEEP_SETTLE_SECONDS, self._enter)

    def _enter(self) -> None:
        """Enter the records that were written, and drop those that were removed."""
        if self._noted:
            self._catch_up()

    def _catch_up(self) -> bool:
        """Enter what was noted, and read what the kernel reports; False if that concerns no container."""
        self._enters_soon = False
        noted: dict[ContainerId, tuple[float, Entry | None, bool]] = {}
        while self._noted:
            at, container_id, entry, is_read = self._noted.popleft()
            noted[container_id] = at, entry, is_read
        for container_id, (_, entry, _) in noted.items():
            if entry is None:
                self._containers.leave(container_id)
                self._queue.forget(container_id)
        # What the kernel has reported so far of new containers was done by their ADDs.
        is_concerned = self._read()
        for at, entry, is_read in noted.values():
            if entry is not None:
                self._enter_one(entry, self._first_wait(at, is_read))
        return is_concerned

    def _first_wait(self, noted_at: float, is_read: bool) -> float:
        """Return after how many seconds a container is compared for the first time."""
        if is_read:
            return random.uniform(0.0, deadlines.KEEP_START_SECONDS)
        if self._engine.policy.ready_condition:
            return 0.0
        # The annotation may have changed during the ADD, and the interfaces before the loop came to the record.
        is_late = self._now() > noted_at + deadlines.KEEP_LATE_SECONDS
        if is_late or self._engine.policy.hotplug != "off":
            return deadlines.KEEP_YOUNG_SECONDS
        return deadlines.KEEP_INTERVAL_SECONDS * random.uniform(0.5, 1.0)

    def _enter_one(self, entry: Entry, wait: float) -> None:
        """Enter a record; if the container is new, follow its namespace and compare it after `wait` seconds."""
        if not self._containers.enter(entry, self._now()):
            return
        self._follow_namespace(entry)
        self._queue.add_after(entry.container_id, wait)
        if pod := self._early.pop(entry.pod, None):
            self._pod_changed(self._containers.by_id[entry.container_id], pod)

    def _follow_namespace(self, entry: Entry) -> None:
        if self._kernel is not None:
            try:
                if (number := self._kernel.follow(entry.netns, entry.netns_id)) is not None:
                    self._containers.follow(entry.container_id, number)
            except OSError as error:
                log.debug("changes in %s are not reported: %s", entry.netns, error)

    def _listen(self) -> None:
        if self._loop is not None and self._kernel is not None and self._kernel.fileno() >= 0:
            self._loop.add_reader(self._kernel.fileno(), self._readable)

    def _readable(self) -> None:
        """Read soon: what follows within a few milliseconds belongs to it, and a request at work has more to do."""
        if self._loop is None or self._kernel is None:
            return
        self._loop.remove_reader(self._kernel.fileno())
        wait = deadlines.KEEP_BUSY_SECONDS if self._engine.at_work else deadlines.KEEP_SETTLE_SECONDS
        self._reading = self._loop.call_at(max(self._now() + wait, self._quiet_until), self._read_in_time)

    def _read_in_time(self) -> None:
        if not self._catch_up():
            # Others make links all the time, and each reading costs more than the messages in it.
            self._quiet_until = self._now() + deadlines.KEEP_NOISE_SECONDS

    def _read(self) -> bool:
        """Read the kernel's reports, and make the containers due that they name; False if they name none."""
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
        at_work = self._engine.at_work if concerned else frozenset()
        is_news = False
        for container_id in concerned:
            # A request at work on it, most often a DEL, is what changes it.
            wait = deadlines.KEEP_HELD_SECONDS if container_id in at_work else 0.0
            young = self._containers.by_id[container_id].young_until - now
            is_news |= self._queue.add_after(container_id, max(wait, young))
        if found.lost:
            log.warning("changes of pods' interfaces were lost: all pods of the node are compared")
            for container_id in self._containers.by_id:
                self._queue.add_after(container_id, random.uniform(0.0, deadlines.KEEP_START_SECONDS))
        return is_news or found.lost or found.more

    # --- one container -----------------------------------------------------------------------------------------------

    def _is_calm(self, container_id: ContainerId) -> bool:
        """Return whether the container has not waited for a plugin of late: only then it has a reserved worker."""
        container = self._containers.by_id.get(container_id)
        return container is not None and not container.by_pod and not self._queue.failures(container_id)

    def _groups(self, container_id: ContainerId) -> Groups:
        """Return the namespace and the annotation, which pods of one template have in common, as for requests."""
        container = self._containers.by_id.get(container_id)
        return (container.pod.partition("/")[0], container.networks) if container is not None else ()

    def _rests_until(self, container_id: ContainerId) -> float:
        container = self._containers.by_id.get(container_id)
        return container.rests_until if container is not None else -NEVER

    async def _work(self, container_id: ContainerId) -> None:
        """Compare a container, and say what was found. Raises RetryError if something is left to do."""
        self._enter()
        container = self._containers.by_id.get(container_id)
        if container is None:
            return
        container.by_pod = False
        if container_id in self._engine.at_work:
            self._queue.add_after(container_id, deadlines.KEEP_HELD_SECONDS)
            return
        work = partial(self._compare, container_id, container)
        try:
            result = await portal.run(Deadline(deadlines.KEEP_SECONDS), work, name="keep")
        finally:
            container.ended = self._now()
            self._enter()
        if self._containers.by_id.get(container_id) is not container:
            return
        self._queue.add_after(container_id, deadlines.KEEP_INTERVAL_SECONDS * random.uniform(0.9, 1.1))
        if result is None:
            # The container has ended, and its DEL will come; or it is there already.
            return
        if announce(self._engine, self._events, container, result, self._now()):
            container.has_news(self._now())
        if container.is_settling:
            self._queue.add_after(container_id, deadlines.KEEP_YOUNG_SECONDS)
        if result.error is not None or any(item.is_repaired for item in result.left):
            raise RetryError(str(result.error or "not all repairs have succeeded"))

    def _compare(self, container_id: ContainerId, container: Container) -> Compared | None:
        """Call `pod.upkeep`, and note its processor time. In a thread of its own."""
        may_repair = partial(self._may_repair, container)
        try:
            return keep(self._engine, container_id, self._configuration, may_repair)
        finally:
            container.cost = time.thread_time()

    def _may_repair(self, container: Container, item: Finding) -> bool:
        """Return False for an attachment that was repaired too often. In the thread of `pod.upkeep`."""
        return self._loop is None or container.may_repair(item.attachment.ifname, self._loop.time())

    def _failed(self, container_id: ContainerId, error: Exception, seconds: float) -> None:
        container = self._containers.by_id.get(container_id)
        text = f"networks of pod {container.pod if container else '?'} can't be compared with their record"
        if isinstance(error, CniError | OSError | StoreUnavailableError):
            log.warning("%s: %s; tried again in %.0f s", text, error, seconds)
        else:
            # A fault in one container must not stop the daemon.
            log.error("%s", text, exc_info=error)
