"""Detach networks from a container: the mirror of `pod.attach`. It uses only the record, and can be repeated.

DEL, the DEL of `/delegate`, a change of the pod's annotation, GC, the removal of orphans and the undo of a failed ADD
detach networks here. Attachments are marked as leaving on record before the first DEL, so that they are not repaired.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from multus_daemon import deadlines, logs
from multus_daemon.kernel.pod_netns import NodeNamespaces, PodNetns
from multus_daemon.plugins.plugin import NothingLeftError, Progress, ResultLeftError
from multus_daemon.pod import publish, schedule
from multus_daemon.pod.engine import Engine
from multus_daemon.runtime import deadline, timeline
from multus_daemon.runtime.deadline import Deadline, Interrupted
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni.errors import (
    CniError,
    Origin,
    TryAgainLaterError,
    UnexpectedError,
    about_pod,
    fault,
)
from multus_daemon.spec.cni.names import ContainerId, IfName

log = logging.getLogger(__name__)

NEVER_ATTACHED: Final = "NetworkNeverAttached"


def detach(
    engine: Engine,
    record: ContainerRecord,
    netns: PodNetns,
    leaving: Sequence[Attachment] | None = None,
    *,
    seconds: float = deadlines.DETACH_SECONDS,
    counts: bool = False,
) -> ContainerRecord | None:
    """Run DEL for the attachments in `leaving` (None: all), in the reverse order of their ADDs.

    The DELs run in the namespace `netns`; if its path is empty, or it is not that of the record, it counts as gone.
    Independent networks run concurrently (`pod.schedule`). A network that fails or hangs does not stop the others: each
    gets an equal share of the time that is left of `seconds`. Successful detaches are recorded even if others fail or
    the call is interrupted. `counts`: count a failure as a failed DEL of the runtime.

    Returns the stored record of the attachments that are left, None if none is. Raises the first failure as CniError
    with its code, the others in its details.
    """
    changes: dict[str, Any] = {}
    if leaving is None:
        leaving = record.attachments
        changes = {"complete": False, "deletes_failed": record.deletes_failed + counts}
    news = [item for item in leaving if not item.leaving]
    record, leaving = engine.records.begin_delete(record, leaving)
    work = _Detaching(engine, record, netns)
    try:
        failures = work.run(leaving, seconds)
    except Interrupted:
        with contextlib.suppress(CniError):
            engine.records.save_without(record, work.done, work.left, **changes)
        raise
    if failures and not record.failing_since:
        changes["failing_since"] = engine.clock()
    rest = None
    try:
        with timeline.stage("keep"):
            rest = engine.records.save_without(record, work.done, work.left, **changes)
    except CniError as error:
        failures.append(error)
    publish.devices(engine, record, [*news, *work.done])
    if failures:
        raise joined(failures)
    return rest


def undo(
    engine: Engine,
    record: ContainerRecord,
    base: ContainerRecord,
    netns: PodNetns,
    begun: Sequence[tuple[Attachment, Progress]],
) -> None:
    """Run DEL for the ADDs in `begun`, in reverse; then write `base`, or remove the record if `base` has no attachment.

    `record` stays if a DEL fails. Each DEL has a deadline of its own, not the request's. Failures are logged.
    """
    record, leaving = engine.records.begin_delete(record, [attachment for attachment, _ in begun])
    work, has_failed = _Detaching(engine, base, netns), False
    for attachment, (_, progress) in reversed([*zip(leaving, begun, strict=True)]):
        with deadline.given(Deadline()), timeline.stage("plugin"):
            error = work.delete(attachment, deadlines.UNDO_SECONDS, progress)
        if error:
            has_failed = True
            log.error(
                "the undo of %s of pod %s failed: %s", describe(attachment), base.pod, error, exc_info=fault(error)
            )
    if has_failed:
        return
    try:
        engine.records.save_without(base, (), work.left)
    except CniError as error:
        log.error("the earlier record of container %s can't be written again: %s", base.sandbox.container_id, error)


def _shares(number: int, seconds: float) -> Callable[[], float]:
    """Return a function that returns each of `number` callers an equal share of the seconds that are left."""
    end, guard, waiting = time.monotonic() + seconds, threading.Lock(), list(range(1, number + 1))

    def share() -> float:
        with guard:
            return max(0.0, end - time.monotonic()) / waiting.pop()

    return share


@dataclass(slots=True)
class _Detaching:
    """The state of the DELs of one container's networks."""

    engine: Engine
    record: ContainerRecord
    netns: PodNetns
    """The container's namespace; if its path is empty, plugins must not touch a namespace."""
    done: list[Attachment] = field(default_factory=list)
    left: list[Attachment] = field(default_factory=list)
    """Attachments in `done` whose cached result could not be removed, as they are recorded."""

    def run(self, leaving: Sequence[Attachment], seconds: float) -> list[CniError]:
        """Run DEL for each attachment, in reverse order; return the failures, in that order. Raises CniError."""
        engine, backwards = self.engine, leaving[::-1]
        before = schedule.predecessors(backwards)
        here = [number for number, item in enumerate(backwards) if engine.runner.deletes_here(item)]
        # Only links of built-ins: a binary may need its own link, and a link of that name may not be ours.
        links = [backwards[number].ifname for number in here if backwards[number].removes_interface]
        share = _shares(len(backwards), seconds)
        failed: dict[int, CniError] = {}

        def delete(number: int) -> None:
            if error := self.delete(backwards[number], share()):
                failed[number] = error

        with own_netns(engine, self.record, self.netns, links) as self.netns, timeline.stage("plugin"):
            schedule.in_order(delete, before, at_once=engine.networks_at_once, here=here)
        return [error for _, error in sorted(failed.items())]

    def delete(self, attachment: Attachment, seconds: float, progress: Progress | None = None) -> CniError | None:
        """Run DEL for the attachment within `seconds`; add it to `done`, or return the error.

        `progress`: of the ADD, if this is its undo. If a later DEL could free nothing, a failure counts as success.
        """
        engine, pod = self.engine, self.record.pod
        with logs.fields(network=attachment.name, ifname=attachment.ifname), self.netns.of_thread() as own:
            sandbox = Sandbox(self.record.sandbox.container_id, own.path)
            try:
                with deadline.within(seconds):
                    try:
                        engine.runner.delete(sandbox, attachment, own, progress)
                    except NothingLeftError as error:
                        self._report_nothing_left(attachment, error)
                        engine.runner.forget(sandbox, attachment)
            except ResultLeftError as error:
                # The file alone does no harm.
                log.warning("network %s of pod %s: %s", attachment.name, pod, error)
                self.left.append(replace(attachment, result=None, observed=None, cluster_network=False, detached=True))
            except CniError as error:
                return about_pod(error, pod, attachment.name)
            except deadline.ExpiredError:
                text = f"DEL of network {attachment.name} did not end within {seconds:.3g} s"
                return TryAgainLaterError(text, f"pod {pod}", origin=Origin.NODE)
            except Exception as error:
                failure = UnexpectedError(f"{type(error).__name__}: {error} (network {attachment.name} of pod {pod})")
                failure.__cause__ = error
                return failure
            self._remove_device_info(attachment)
        self.done.append(attachment)
        return None

    def _remove_device_info(self, attachment: Attachment) -> None:
        """Remove the attachment's device-info file. A failure is only logged: the file does no harm."""
        if path := attachment.info_file:
            try:
                self.engine.device_files.remove(path)
            except OSError as error:
                log.warning("network %s: its device-info file can't be removed: %s", attachment.name, error)

    def _report_nothing_left(self, attachment: Attachment, error: CniError) -> None:
        record, state = self.record, "has nothing left" if attachment.result else "was never attached"
        network = f"network {attachment.name}, interface {attachment.ifname!r}"
        text = f"{network}, {state}, so its failed DEL counts as done: {error}"
        log.warning("container %s of pod %s: %s", record.sandbox.container_id, record.pod, text)
        if not attachment.result:
            self.engine.metrics.never_attached.inc()
            publish.about_record(self.engine.cluster, record, NEVER_ATTACHED, text)


def describe(attachment: Attachment) -> str:
    """Return network and interface, for messages."""
    return f'network {attachment.name}, interface "{attachment.ifname}"'


def joined(failures: Sequence[CniError]) -> CniError:
    """Return the first of `failures` with its code, and the others in its details."""
    first, *others = failures
    if not others:
        return first
    made = first.changed(details=" / ".join(filter(None, (first.details, *map(str, others)))))
    made.__cause__ = ExceptionGroup(first.msg, failures)
    return made


@contextlib.contextmanager
def own_netns(
    engine: Engine, record: ContainerRecord, netns: PodNetns, leaving: Collection[IfName]
) -> Iterator[PodNetns]:
    """Yield the container's namespace, opened at the path of `netns` or at the recorded path.

    The yielded path is empty if the container's namespace is at neither path: plugins must not touch a namespace then.
    The locks of both paths are held during the block, so that no ADD begins there. `leaving`: see `PodNetns`. Raises
    IoFailureError (5).
    """
    known = record.sandbox.netns
    with contextlib.ExitStack() as stack:
        for path in sorted({netns.path, known} - {""}) if netns.path else ():
            stack.enter_context(engine.netns_held(path))
        own = stack.enter_context(netns.at(netns.path, leaving))
        if own.path and own.is_elsewhere(record.netns_id):
            own = stack.enter_context(netns.at(known, leaving))
            is_known = record.netns_id and own.exists and not own.is_elsewhere(record.netns_id)
            own = own if is_known else stack.enter_context(netns.at(""))
        if own.path and engine.records.is_followed(record, own.path):
            own = stack.enter_context(netns.at(""))
        if netns.path and not own.path:
            log.warning(
                "container %s of pod %s: %s is no longer its network namespace; only its state on the host is deleted",
                record.sandbox.container_id,
                record.pod,
                netns.path,
            )
            engine.metrics.replaced_namespaces.inc()
        yield own


def is_elsewhere(namespaces: NodeNamespaces, netns_id: str, path: str) -> bool:
    """Return True if the namespace at the path certainly is not the one with identity `netns_id`."""
    if not namespaces.is_netns(path):
        return False
    with namespaces.open(path) as netns:
        return netns.is_elsewhere(netns_id)


@contextlib.contextmanager
def held_if_free(engine: Engine, container_id: ContainerId) -> Iterator[bool]:
    """Hold the container's lock for the duration of the block; yield False at once if the lock is taken.

    A request that holds it may take long. An upkeep that holds it is stopped, and gives it up.
    """
    with contextlib.ExitStack() as stack:
        is_free = True
        is_kept = stack.enter_context(engine.upkeeps.none(container_id))
        try:
            with deadline.within(deadlines.KEEP_END_SECONDS if is_kept else 0):
                stack.enter_context(engine.locks.hold(container_id))
        except deadline.ExpiredError:
            is_free = False
        yield is_free
