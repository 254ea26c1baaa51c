"""DEL of a container, and of single networks: uses only the record, continues past errors, can be repeated."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from multus_daemon import deadlines, logs
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.leftover import Progress
from multus_daemon.plugins.plugin import NothingLeftError, ResultLeftError
from multus_daemon.pod import publish, schedule
from multus_daemon.pod.engine import Engine, Namespaces
from multus_daemon.pod.request import CniRequest
from multus_daemon.runtime import deadline, timeline
from multus_daemon.runtime.deadline import Interrupted
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni.errors import CniError, TryAgainLaterError, UnexpectedError, fault, from_code
from multus_daemon.spec.cni.names import ContainerId, IfName
from multus_daemon.spec.cni.remedies import about_pod
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX

log = logging.getLogger(__name__)

NOT_RELEASED: Final = "NetworkNotReleased"
NEVER_ATTACHED: Final = "NetworkNeverAttached"


def delete(engine: Engine, request: CniRequest) -> None:
    """Detach the networks on the container's record; without a record, do nothing. Raises CniError."""
    container_id, records = request.container_id, engine.records
    with engine.convergences.none(container_id), engine.serving(request) as netns:
        try:
            with timeline.stage("record"):
                record = records.find(container_id, search=True)
        except CniError as error:
            _unreadable_failed(engine, container_id, error)
            return
        if record is None:
            log.info("DEL of container %s: nothing is known of it, so it is done", container_id)
            return
        timeline.note(f"on record: {', '.join(item.name for item in record.attachments)}")
        if request.spooled and _is_overtaken(engine, record, request.spooled):
            log.warning(
                "spooled DEL of container %s is dropped: the container has been added since, and lives", container_id
            )
            return
        try:
            detach(engine, record, netns, counts=True)
        except CniError as error:
            failed = records.count_failed_delete(container_id, record.deletes_failed)
            if not _is_given_up(engine, container_id, error, failed, is_news=not record.given_up):
                raise
        else:
            records.forget_failed_deletes(container_id)


def _is_overtaken(engine: Engine, record: ContainerRecord, spooled: float) -> bool:
    """Return True if the container was added again after the DEL was written to the spool, and still runs.

    Clocks jump, so the namespace counts more than times. If it is gone, the DEL is harmless. If the time of the DEL is
    in the future, it is useless, and a namespace with processes is left alone. The comparison of records with
    running containers repeats a DEL that is dropped in error.
    """
    netns = record.sandbox.netns
    if not engine.namespaces.is_netns(netns) or is_elsewhere(engine.namespaces, record, netns):
        return False
    if record.created > spooled:
        return True
    return spooled > engine.clock() and netns in engine.namespaces.netns_in_use([netns])


def _is_given_up(engine: Engine, container_id: ContainerId, error: CniError, failed: int, *, is_news: bool) -> bool:
    """Return True if the failed DEL is answered as done; the rest stays on record.

    It is after `delete_tries` failures, or if only networks are left whose hot-plug failed: no client knows of them.
    """
    is_done = 0 < engine.policy.delete_tries <= failed
    times = f"{failed} times" if failed > 1 else "once"
    text = f"DEL failed {times} and is answered as done; what is left is deleted later: {error}"
    try:
        rest = engine.records.find(container_id, search=False)
        if rest is None:
            return is_done
        is_done = is_done or all(item.hot_plugged and item.result is None for item in rest.attachments)
        if not is_done:
            return False
        engine.records.save_without(rest, (), given_up=True)
    except CniError as damage:
        # The pod must go nevertheless. Its missing namespace marks the rest as an orphan.
        if is_done:
            log.error("%s; %s (container %s)", text, damage, container_id, exc_info=fault(error))
        return is_done
    log.error("%s (container %s of pod %s)", text, container_id, rest.pod, exc_info=fault(error))
    if is_news:
        engine.metrics.deletes.given_up.inc()
        publish.about_record(engine.cluster, rest, NOT_RELEASED, text)
    return True


def _unreadable_failed(engine: Engine, container_id: ContainerId, error: CniError) -> None:
    """Count a failed DEL of a container whose record cannot be read. Raises `error`, except on the last try."""
    tries, failed = engine.policy.delete_tries, engine.records.count_failed_delete(container_id)
    if not 0 < tries <= failed:
        raise error
    text = f"DEL of container {container_id} failed {tries} times and is answered as done: {error}"
    log.error("%s", text)
    if failed == tries:
        engine.metrics.deletes.given_up.inc()
        engine.cluster.node_event("Warning", NOT_RELEASED, text[:EVENT_MESSAGE_MAX])


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

    The DELs run in the namespace `netns`; an empty path, or a namespace that is not the record's, is treated as gone.
    Independent networks run concurrently (`pod.schedule`). A network that fails or hangs does not stop the others:
    each gets an equal share of the time that is left of `seconds`. Successful detaches are recorded even if others
    fail or the call is interrupted; `counts` records a failure as a failed DEL of the runtime.

    Returns the stored record of the rest, None if nothing is left. Raises CniError: the first failure with its
    code, the others in the details.
    """
    changes: dict[str, Any] = {}
    if leaving is None:
        leaving = record.attachments
        changes = {"complete": False, "deletes_failed": record.deletes_failed + counts}
    news = [item for item in leaving if not item.leaving]
    record, leaving = engine.records.begin_delete(record, leaving)
    backwards = leaving[::-1]
    before = schedule.backwards(schedule.predecessors(leaving))
    here = [number for number, item in enumerate(backwards) if engine.runner.runs_here(item, "DEL")]
    # Only links of built-ins: a binary may need its own link, and a link of that name may not be ours.
    links = [backwards[number].ifname for number in here if backwards[number].has_interface]
    work = Deletes(engine, record, netns, backwards, _shares(len(backwards), seconds))
    try:
        with own_netns(engine, record, netns, links) as work.netns, timeline.stage("plugin"):
            schedule.in_order(work.delete, before, at_once=engine.policy.networks_at_once, here=here)
    except Interrupted:
        with contextlib.suppress(CniError):
            engine.records.save_without(record, work.done, work.left, **changes)
        raise
    failures = [error for _, error in sorted(work.failures.items())]
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


def _shares(number: int, seconds: float) -> Callable[[], float]:
    """Return a function that gives each of `number` callers an equal share of the time that is left."""
    end, guard, waiting = time.monotonic() + seconds, threading.Lock(), list(range(1, number + 1))

    def share() -> float:
        with guard:
            return max(0.0, end - time.monotonic()) / waiting.pop()

    return share


@dataclass(slots=True)
class Deletes:
    """Runs the DELs of networks of one container."""

    engine: Engine
    record: ContainerRecord
    netns: PodNetns
    """The container's namespace; with an empty path, no namespace may be touched."""
    attachments: Sequence[Attachment]
    share: Callable[[], float]
    """Returns the time limit of the next DEL in seconds."""
    progress: Mapping[int, Progress] = field(default_factory=dict)
    """Progress of the ADD by number of the attachment; set when a failed ADD is undone."""
    done: list[Attachment] = field(default_factory=list)
    left: list[Attachment] = field(default_factory=list)
    """Those of `done` whose cached result could not be removed, as they go on record."""
    failures: dict[int, CniError] = field(default_factory=dict)

    def delete(self, number: int) -> None:
        """Run DEL for the attachment of that number; note the success in `done`, the failure in `failures`.

        If nothing is left that a later DEL could free, a failure is treated as success.
        """
        engine, attachment, pod, seconds = self.engine, self.attachments[number], self.record.pod, self.share()
        failure: CniError | None = None
        with logs.fields(network=attachment.name, ifname=attachment.ifname), self.netns.of_thread() as own:
            sandbox = Sandbox(self.record.sandbox.container_id, own.path)
            try:
                with deadline.within(seconds):
                    try:
                        engine.runner.delete(sandbox, attachment, own, self.progress.get(number))
                    except NothingLeftError as error:
                        _report_nothing_left(engine, self.record, attachment, error)
                        engine.runner.forget(sandbox, attachment)
                    engine.devices.remove(attachment)
            except ResultLeftError as error:
                # The file alone does no harm.
                log.warning("network %s of pod %s: %s", attachment.name, pod, error)
                engine.devices.remove(attachment)
                self.left.append(replace(attachment, result=None, observed=None, cluster_network=False, detached=True))
            except CniError as error:
                failure = about_pod(error, pod)
            except deadline.ExpiredError:
                text = f"DEL of network {attachment.name} did not end within {seconds:.3g} s"
                failure = TryAgainLaterError(text, f"pod {pod}")
            except Exception as error:
                text = f"{type(error).__name__}: {error} (network {attachment.name} of pod {pod})"
                failure = UnexpectedError(text)
                failure.__cause__ = error
        if failure:
            self.failures[number] = failure
        else:
            self.done.append(attachment)


def detach_leftover(engine: Engine, record: ContainerRecord, netns: PodNetns) -> tuple[Attachment, ...]:
    """Undo an ADD that never finished, or whose container is gone, in the namespace that it used.

    Returns what stays on record: the hot-plugged networks of the container that runs in `netns`, and cached results
    that could not be removed. Raises CniError.
    """
    log.warning(
        "container %s of pod %s has an unfinished or outdated record: undone first",
        record.sandbox.container_id,
        record.pod,
    )
    lives = record.sandbox.netns == netns.path and netns.exists and not netns.is_elsewhere(record.netns_id)
    leaving = [item for item in record.attachments if not (lives and item.hot_plugged and item.is_attached)]
    rest = detach(engine, replace(record, complete=False), netns.at(record.sandbox.netns), leaving)
    return rest.attachments if rest else ()


def _report_nothing_left(engine: Engine, record: ContainerRecord, attachment: Attachment, error: CniError) -> None:
    state = "has nothing left" if attachment.result else "was never attached"
    network = f"network {attachment.name}, interface {attachment.ifname!r}"
    text = f"{network}, {state}, so its failed DEL counts as done: {error}"
    log.warning("container %s of pod %s: %s", record.sandbox.container_id, record.pod, text)
    if attachment.result:
        return
    engine.metrics.deletes.never_attached.inc()
    publish.about_record(engine.cluster, record, NEVER_ATTACHED, text)


def joined(failures: Sequence[CniError]) -> CniError:
    """Return the first of `failures` with its code, and the others in its details."""
    first, *others = failures
    if not others:
        return first
    details = " / ".join([*([first.details] if first.details else []), *map(str, others)])
    made = from_code(first.code, first.msg, details)
    made.__cause__ = ExceptionGroup("DEL", failures)
    return made


@contextlib.contextmanager
def own_netns(
    engine: Engine, record: ContainerRecord, netns: PodNetns, leaving: Collection[IfName]
) -> Iterator[PodNetns]:
    """Yield the container's namespace, reopened at the path of `netns` or at the path on record.

    Its path is empty if neither path leads to the container's namespace: plugins must touch no namespace then. The
    locks of both paths are held for the duration of the block, so no ADD begins there. `leaving`: see `PodNetns`.
    Raises IoFailureError (5).
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
                "container %s of pod %s: %s is not its network namespace any more; what it has on the host is deleted",
                record.sandbox.container_id,
                record.pod,
                netns.path,
            )
            engine.metrics.deletes.replaced_namespaces.inc()
        yield own


def is_elsewhere(namespaces: Namespaces, record: ContainerRecord, path: str) -> bool:
    """Return True if another container's namespace is certainly at the path."""
    if not namespaces.is_netns(path):
        return False
    with namespaces.open(path) as netns:
        return netns.is_elsewhere(record.netns_id)


@contextlib.contextmanager
def held_if_free(engine: Engine, container_id: ContainerId) -> Iterator[bool]:
    """Hold the container's lock for the duration of the block; yield False at once if the lock is taken.

    The holder adds or deletes the container, which may take long. A convergence gives the lock up.
    """
    with contextlib.ExitStack() as stack:
        is_free = True
        converges = stack.enter_context(engine.convergences.none(container_id))
        try:
            with deadline.within(deadlines.CONVERGE_END_SECONDS if converges else 0):
                stack.enter_context(engine.locks.hold(container_id))
        except deadline.ExpiredError:
            is_free = False
        yield is_free
