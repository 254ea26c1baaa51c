"""Decide which running container is compared with its annotation and its record, and when: a root task.

A container is due when its pod's annotation differs from what is attached, when the kernel reports a change of its
interfaces (`kernel.watch`), a pause after a failure, and every ten minutes. Then `pod.upkeep` does what is missing, in
a thread of its own. Due containers wait in a `WorkQueue`; a few are compared concurrently, so that a plugin that hangs
does not stop the others. Every five minutes `node.lacking` finds pods without their networks.
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
from multus_daemon.node.containers import Container, Containers, announce
from multus_daemon.pod import annotation
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.upkeep import Compared, Finding, keep
from multus_daemon.pod.view import Entry
from multus_daemon.runtime import portal
from multus_daemon.runtime.aio import readable
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.runtime.recent import Recent
from multus_daemon.runtime.slots import URGENT, Groups
from multus_daemon.runtime.workqueue import NEVER, RetryError, WorkQueue
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.selection import HOTPLUG_ANNOTATION, KEEP_ANNOTATION
from multus_daemon.spec.ports import StoreUnavailableError

log = logging.getLogger(__name__)

NOT_FOLLOWED: Final = "AnnotationsNotFollowed"
NOT_REPORTED: Final = "interfaces"
"""Key in `degraded` of `/readyz` while the kernel does not report changes of the pods' interfaces."""

AT_ONCE: Final = 4
"""Containers that are compared concurrently, and half as many more if their plugins have not failed lately."""
DIFFERENCES_MAX: Final = 100
"""Maximum number of differing attachments that `multusctl status` names; further ones are counted."""
EARLY_MAX: Final = 1024
"""Pods without a container that are remembered while the records are read."""
PARSED_MAX: Final = 1024
"""Maximum characters of an annotation that the event loop parses, in 1 ms; a longer one is parsed in a thread."""


class Keep:
    """Has running containers compared; `run` is a root task. `look`, `broken` and `differences` are thread-safe."""

    def __init__(
        self,
        engine: Engine,
        configuration: Callable[[], bytes],
        *,
        at_once: int = AT_ONCE,
        kernel: Callable[[], Watch] = Watch,
    ) -> None:
        """Call it on the event loop. `configuration` returns the standard input of an ADD; `at_once`: see AT_ONCE."""
        self._engine = engine
        self._configuration = configuration
        self._open = kernel
        self._kernel: Watch | None = None
        self._portal = LoopPortal()
        self._queue = WorkQueue[ContainerId](
            self._work,
            retry=deadlines.KEEP_RETRY_SECONDS,
            failed=self._failed,
            at_once=at_once,
            reserved=max(1, at_once // 2),
            place=self._place,
            not_before=self._rests_until,
            name="keep",
        )
        self._containers = Containers()
        self.lacking = lacking.Reports(engine, self._reason)
        self._controller = ""
        self._early: Recent[str, Pod] = Recent(EARLY_MAX, deadlines.KEEP_START_SECONDS)
        """Pods that were reported before their records were read, by `namespace/name`."""
        engine.records.view.followers.append(self._follow)

    # --- what is asked of it -----------------------------------------------------------------------------------------

    def broken(self) -> Mapping[str, int]:
        """Return the number of attachments that differ from their record, by network. Thread-safe."""
        return collections.Counter(
            network for container in tuple(self._containers.by_id.values()) for network, _ in container.broken
        )

    def differences(self) -> list[dict[str, str]]:
        """Return the last found differences of at most DIFFERENCES_MAX attachments, sorted by pod. Thread-safe."""
        found = [
            {"pod": container.pod, "network": network, "interface": ifname, "difference": text}
            for container in tuple(self._containers.by_id.values())
            for (network, ifname), text in container.broken.items()
        ]
        return sorted(found, key=lambda item: (item["pod"], item["interface"]))[:DIFFERENCES_MAX]

    def look(self, pod: str) -> None:
        """Have the containers of a pod (`namespace/name`) compared soon, as routes are not reported. Thread-safe."""
        self._portal.tell(self._look, pod)

    def _look(self, pod: str) -> None:
        for container in self._containers.of(pod):
            self._queue.add(container.entry.container_id)

    def _reason(self, pod: str) -> str:
        """Return why the last upkeep of a pod (`namespace/name`) failed; empty if it did not. Thread-safe."""
        problems = self._queue.problems
        return next(
            (problems[name] for item in self._containers.of(pod) if (name := item.entry.container_id) in problems), ""
        )

    # --- the pods ----------------------------------------------------------------------------------------------------

    def pod_changed(self, pod: Pod) -> None:
        """Have the pod's containers compared if its annotation differs from what is attached. On the event loop."""
        if str(pod) == self._controller:
            self._is_anothers()
        containers = self._containers.of(str(pod))
        if not containers:
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
        """Return True if the pod's annotation differs from what is attached."""
        if self._engine.settings.attachments.hotplug == "off" or self._is_anothers():
            return False
        if container.networks == container.compared:
            return False
        container.compared = container.networks
        networks = pod.annotations.get(selection.NETWORKS_ANNOTATION, "")
        if len(networks) > PARSED_MAX:
            return True
        try:
            return annotation.wanted(networks, pod.namespace) != container.entry.selections
        except CniError:
            # `pod.annotation` reports it.
            return True

    def _is_anothers(self) -> bool:
        """Return True if another program follows the annotations of this node's pods; report it when that changes."""
        controller = self._engine.cluster.hotplug_controller()
        if controller != self._controller:
            if controller:
                text = f"annotations are not followed (hotplug): {controller} does that on this node"
                log.warning("%s", text)
                self._engine.cluster.node_event("Warning", NOT_FOLLOWED, text)
            else:
                log.info("this daemon follows the annotations of pods again: %s has left this node", self._controller)
                # It may have left something undone.
                for container_id, container in self._containers.by_id.items():
                    container.compared = None
                    self._queue.add_after(container_id, 0)
            self._controller = controller
        return bool(controller)

    # --- the root task -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Compare and repair containers for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(), name="kernel")
            group.create_task(self.lacking.run(), name="pods")
            await self._queue.run()

    async def _watch(self) -> None:
        """Read the kernel's reports for ever; first follow the namespaces of containers that are known already."""
        seconds = deadlines.KEEP_INTERVAL_SECONDS
        while self._kernel is None:
            try:
                self._kernel = self._open()
            except OSError as error:
                reason = f"broken attachments are found within {seconds:g} s, not at once: {error.strerror or error}"
                log.warning("%s", reason)
                self._engine.gates.degraded.close(NOT_REPORTED, reason)
                await asyncio.sleep(seconds)
        with contextlib.closing(self._kernel) as kernel:
            for container in self._containers.by_id.values():
                self._follow_namespace(container.entry)
            self._engine.gates.degraded.open(NOT_REPORTED)
            while True:
                await readable(kernel.fileno())
                # What follows within a few milliseconds belongs to it, and a request at work has more to do.
                await asyncio.sleep(
                    deadlines.KEEP_BUSY_SECONDS if self._engine.at_work else deadlines.KEEP_SETTLE_SECONDS
                )
                if not self._read():
                    # Others make links all the time, and each reading costs more than the messages in it.
                    await asyncio.sleep(deadlines.KEEP_NOISE_SECONDS)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # --- records and the kernel --------------------------------------------------------------------------------------

    def _follow(self, container_id: ContainerId, entry: Entry | None, is_read: bool) -> None:
        """Called by the view about a record, in any thread: have the event loop call `_enter`.

        That is before the loop sends the answer of an ADD, so no later change by another program is missed.
        """
        if entry is None or entry.complete:
            self._portal.tell(self._enter, container_id, entry, is_read)

    def _enter(self, container_id: ContainerId, entry: Entry | None, is_read: bool) -> None:
        """Add a container's record, and follow the namespace of a new container; drop it if the record was removed."""
        if entry is None:
            self._containers.leave(container_id)
            self._queue.forget(container_id)
            return
        if not is_read:
            # What the kernel has reported so far of a new container was done by its ADD.
            self._read()
        if self._containers.enter(entry, self._now()):
            self._follow_namespace(entry)
            self._queue.add_after(container_id, self._first_wait(is_read))
            if is_read:
                self._containers.by_id[container_id].asks_from = self._now()
            if is_read and (pod := self._early.get(entry.pod)):
                self._pod_changed(self._containers.by_id[container_id], pod)

    def _first_wait(self, is_read: bool) -> float:
        """Return after how many seconds a container is compared for the first time."""
        if is_read:
            return random.uniform(0.0, deadlines.KEEP_START_SECONDS)
        if self._engine.settings.attachments.ready_condition:
            return 0.0
        # The annotation may have changed during the ADD.
        if self._engine.settings.attachments.hotplug != "off":
            return deadlines.KEEP_YOUNG_SECONDS
        return deadlines.KEEP_INTERVAL_SECONDS * random.uniform(0.5, 1.0)

    def _follow_namespace(self, entry: Entry) -> None:
        if self._kernel is not None:
            try:
                if (number := self._kernel.follow(entry.netns, entry.netns_id, entry.created)) is not None:
                    self._containers.follow(entry.container_id, number)
            except OSError as error:
                log.debug("the kernel does not report changes in namespace %s: %s", entry.netns, error)

    def _read(self) -> bool:
        """Read the kernel's reports, and make the containers due that they concern; return False if there is none."""
        if self._kernel is None or self._kernel.fileno() < 0:
            return False
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
            log.warning("the kernel dropped reports of changes: all pods of the node are compared")
            for container_id in self._containers.by_id:
                self._queue.add_after(container_id, random.uniform(0.0, deadlines.KEEP_START_SECONDS))
        return is_news or found.lost or found.more

    # --- one container -----------------------------------------------------------------------------------------------

    def _place(self, container_id: ContainerId) -> tuple[int, Groups]:
        """Return the container's rank and groups in the queue: groups are its namespace and its annotation's text.

        Only containers whose last upkeep did not wait for a plugin may use the reserved workers.
        """
        container = self._containers.by_id.get(container_id)
        if container is None:
            return URGENT + 1, ()
        is_calm = not container.by_pod and not self._queue.failures(container_id)
        return URGENT if is_calm else URGENT + 1, (container.pod.partition("/")[0], container.networks)

    def _rests_until(self, container_id: ContainerId) -> float:
        container = self._containers.by_id.get(container_id)
        return container.rests_until if container is not None else -NEVER

    async def _work(self, container_id: ContainerId) -> None:
        """Run the upkeep of a container, and report its findings. Raises RetryError if something is left to do."""
        container = self._containers.by_id.get(container_id)
        if container is None:
            return
        container.by_pod = False
        if container_id in self._engine.at_work:
            self._queue.add_after(container_id, deadlines.KEEP_HELD_SECONDS)
            return
        # A change of the kernel is no reason to start programs.
        if asks := self._now() >= container.asks_from:
            container.asks_from = self._now() + deadlines.KEEP_INTERVAL_SECONDS
        work = partial(self._compare, container_id, container, asks)
        try:
            result = await portal.run(Deadline(deadlines.KEEP_SECONDS), work, name="keep")
        finally:
            container.ended = self._now()
        if self._containers.by_id.get(container_id) is not container:
            return
        self._queue.add_after(container_id, deadlines.KEEP_INTERVAL_SECONDS * random.uniform(1.0, 1.1))
        if result is None:
            # The container has ended, and its DEL will come; or it is there already.
            return
        if announce(self._engine, container, result, self._now()):
            container.has_news(self._now())
        if container.is_settling:
            self._queue.add_after(container_id, deadlines.KEEP_YOUNG_SECONDS)
        if result.error is not None or any(item.is_repaired for item in result.left):
            raise RetryError(str(result.error or "not all repairs have succeeded"))

    def _compare(self, container_id: ContainerId, container: Container, asks: bool) -> Compared | None:
        """Call `pod.upkeep`, and note its processor time. In a thread of its own."""
        may_repair = partial(self._may_repair, container)
        try:
            return keep(self._engine, container_id, self._configuration, may_repair, asks=asks)
        finally:
            container.cost = time.thread_time()

    def _may_repair(self, container: Container, item: Finding) -> bool:
        """Return False if the attachment was repaired too often. Runs in the thread of `pod.upkeep`."""
        return container.may_repair(item.attachment.ifname, time.monotonic())

    def _failed(self, container_id: ContainerId, error: Exception, seconds: float) -> None:
        container = self._containers.by_id.get(container_id)
        text = f"networks of pod {container.pod if container else '?'} can't be compared with their record"
        if isinstance(error, CniError | OSError | StoreUnavailableError):
            log.warning("%s: %s; tried again in %.0f s", text, error, seconds)
        else:
            # A fault in one container must not stop the daemon.
            log.error("%s", text, exc_info=error)
