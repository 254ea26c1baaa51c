"""Bring one running container to what it should be: to its pod's annotation, then to its record.

Level-triggered: it looks at what is, and does what is missing. So it may come at any time, any number of times, and a
try that fails, or is given up for a DEL, only delays. It holds the container's lock, and gives it up when a DEL of the
container arrives (`Engine.upkeeps`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from multus_daemon import deadlines, logs
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.plugin import Difference
from multus_daemon.pod import annotation
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.records import is_of
from multus_daemon.runtime import deadline
from multus_daemon.runtime.deadline import Interrupted
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Pod
from multus_daemon.spec.cni.errors import CniError, TryAgainLaterError, UnexpectedError, UnknownContainerError, fault
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.nad.following import HOTPLUG_LABEL, Keep, is_followed, keep_of
from multus_daemon.spec.ports import NetworkNotFoundError, PodNotFoundError, StoreUnavailableError

log = logging.getLogger(__name__)

_ROUNDS_MAX: Final = 3
"""A repair may need another one first: a route needs its interface."""
_ENDED: Final = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing of an attachment that differs from its record."""

    attachment: Attachment
    difference: Difference
    keep: Keep

    @property
    def is_repaired(self) -> bool:
        """True if it is to be brought back, and can be."""
        return self.keep == "repair" and self.difference.repair is not None

    def __str__(self) -> str:
        return f"network {self.attachment.name}: {self.difference.text}"


@dataclass(frozen=True, slots=True)
class Compared:
    """The differences of a container, before and after the repairs."""

    record: ContainerRecord
    """As it is on disk now."""
    pod: Pod | None = None
    """None if it is not known."""
    found: Sequence[Finding] = ()
    """The differences before the repairs."""
    left: Sequence[Finding] = ()
    """The differences after the repairs."""
    error: CniError | None = None
    """Why the annotation could not be followed, or a repair failed."""


def keep(
    engine: Engine,
    container_id: ContainerId,
    configuration: Callable[[], bytes],
    may_repair: Callable[[Finding], bool] = lambda _: True,
) -> Compared | None:
    """Do what is missing. None if there is nothing to keep: no complete record of ours, or the container has ended.

    `configuration` returns the standard input of an ADD. `may_repair`: False for what is only reported, although its
    network or pod says otherwise. None also if a DEL of the container arrived. Blocks. Raises CniError if record or
    namespace cannot be read.
    """
    with contextlib.suppress(_DeletedError), _held(engine, container_id) as (record, netns):
        return _keep(engine, record, netns, configuration, may_repair)
    return None


def compare(engine: Engine, container_id: ContainerId) -> Compared:
    """Compare the container with its record, also what `keep` says is left alone; change nothing. Blocks.

    Raises UnknownContainerError (3) if the container has nothing to keep, or a DEL of it arrived, CniError.
    """
    with _held(engine, container_id) as (record, netns):
        pod = _pod(engine, record)
        found = _findings(engine, record, pod, netns, also_off=True)
        return Compared(record, pod, found, found)


def repair(engine: Engine, container_id: ContainerId) -> Compared:
    """Repair what differs, whatever `keep` says. Blocks. Raises as `compare` does."""
    with _held(engine, container_id) as (record, netns):
        pod = _pod(engine, record)
        found = _findings(engine, record, pod, netns, also_off=True)
        is_wanted = lambda item: item.difference.repair is not None  # noqa: E731
        return _repair(engine, record, pod, netns, found, is_wanted, also_off=True)


class _DeletedError(UnknownContainerError):
    """The container has nothing to keep."""


@contextlib.contextmanager
def _held(engine: Engine, container_id: ContainerId) -> Iterator[tuple[ContainerRecord, PodNetns]]:
    """Hold the container's lock; yield its record and its namespace. Raises _DeletedError, also at a DEL's arrival."""
    with engine.upkeeps.of(container_id) as upkeep:
        if upkeep is None:
            raise _DeletedError(f"container {container_id} is being deleted")
        try:
            with engine.locks.hold(container_id):
                upkeep.holds = True
                record = engine.records.find(container_id, search=False)
                if record is None or not record.complete or record.foreign:
                    raise _DeletedError(f"container {container_id} has no complete ADD on record")
                with engine.namespaces.open(record.sandbox.netns) as netns:
                    # A newer container may use the namespace, or its path.
                    is_gone = not netns.exists or netns.is_elsewhere(record.netns_id)
                    if is_gone or engine.records.is_followed(record, netns.path):
                        problem = f"the network namespace of container {container_id} is gone"
                        raise _DeletedError(problem, record.sandbox.netns)
                    yield record, netns
        except Interrupted:
            if not upkeep.is_stopped:
                raise
            log.info("container %s is being deleted: its networks are left to that", container_id)
            raise _DeletedError(f"container {container_id} is being deleted") from None


def _keep(
    engine: Engine,
    record: ContainerRecord,
    netns: PodNetns,
    configuration: Callable[[], bytes],
    may_repair: Callable[[Finding], bool],
) -> Compared:
    problem: CniError | None = None
    pod = _pod(engine, record)
    if pod is not None and pod.phase in _ENDED:
        return Compared(record, pod)
    try:
        if pod is not None and follows(engine, pod):
            record = annotation.follow(engine, record, pod, configuration(), netns)
    except CniError as error:
        problem = error
        # What was detached, attached or undone is on record.
        record = engine.records.find(record.sandbox.container_id, search=False) or record
    found = _findings(engine, record, pod, netns)
    repaired = _repair(engine, record, pod, netns, found, lambda item: item.is_repaired and may_repair(item))
    return Compared(record, pod, found, repaired.left, problem or repaired.error)


def follows(engine: Engine, pod: Pod) -> bool:
    """Return whether changes of the pod's annotation are followed. Raises TryAgainLaterError (11)."""
    mode = engine.policy.hotplug
    if mode == "off" or not is_followed(pod.annotations) or engine.cluster.hotplug_controller():
        return False
    if mode == "on":
        return True
    try:
        return engine.cluster.namespace_labels(pod.namespace).get(HOTPLUG_LABEL) == "true"
    except StoreUnavailableError as error:
        raise TryAgainLaterError(f"labels of namespace {pod.namespace} can't be read: {error}", f"pod {pod}") from error


def _pod(engine: Engine, record: ContainerRecord) -> Pod | None:
    try:
        with deadline.within(deadlines.NODE_READ_SECONDS):
            pod = engine.cluster.pod(record.pod_namespace, record.pod_name, record.pod_uid)
    except (PodNotFoundError, StoreUnavailableError, deadline.ExpiredError) as error:
        log.debug("pod %s is not known: %s", record.pod, error)
        return None
    return pod if is_of(record, pod) else None


def _repair(
    engine: Engine,
    record: ContainerRecord,
    pod: Pod | None,
    netns: PodNetns,
    found: Sequence[Finding],
    is_wanted: Callable[[Finding], bool],
    *,
    also_off: bool = False,
) -> Compared:
    left, error = found, None
    for _ in range(_ROUNDS_MAX):
        wanted = [item for item in left if is_wanted(item)]
        if not wanted:
            break
        error = None
        with engine.netns_held(netns.path):
            for item in wanted:
                error = _repair_one(engine, item, record.pod) or error
        left = _findings(engine, record, pod, netns, also_off=also_off)
    return Compared(record, pod, found, left, error)


def _repair_one(engine: Engine, item: Finding, pod: str) -> CniError | None:
    """Repair one thing; return the error."""
    name, text = item.attachment.name, item.difference.text
    if item.difference.repair is None:
        return None
    how: Literal["success", "error"] = "error"
    place = f"network {name} of pod {pod}: {text}"
    try:
        with logs.fields(network=name, ifname=item.attachment.ifname), deadline.within(deadlines.REPAIR_SECONDS):
            item.difference.repair()
        how = "success"
        log.info("network %s of pod %s is repaired: %s", name, pod, text)
        return None
    except deadline.ExpiredError:
        error: CniError = TryAgainLaterError(f"the repair did not end within {deadlines.REPAIR_SECONDS:g} s", place)
    except CniError as failure:
        error = failure.with_context(place)
    except Exception as failure:
        error = UnexpectedError(f"{type(failure).__name__}: {failure}", place)
        error.__cause__ = failure
    finally:
        engine.metrics.repair(how)
    log.warning("a repair failed: %s", error, exc_info=fault(error))
    return error


def _findings(
    engine: Engine, record: ContainerRecord, pod: Pod | None, netns: PodNetns, *, also_off: bool = False
) -> list[Finding]:
    """Compare each attachment of the container with its record. Changes nothing; blocks, in the thread of `netns`.

    `pod`: None if it is not known. `also_off`: compare what `keep` says is left alone, too. The caller holds the
    container's lock. Raises InvalidNetnsError if the namespace cannot be entered.
    """
    found: list[Finding] = []
    for attachment in record.attachments:
        keep = _keep_of(engine, pod, attachment)
        if keep == "off" and not also_off:
            continue
        found += [Finding(attachment, item, keep) for item in _differences(engine, record, attachment, netns)]
    return found


def _differences(
    engine: Engine, record: ContainerRecord, attachment: Attachment, netns: PodNetns
) -> Sequence[Difference]:
    try:
        with deadline.within(deadlines.COMPARE_SECONDS):
            return engine.runner.differences(record.sandbox, attachment, netns)
    except deadline.ExpiredError:
        return [Difference(f"not compared within {deadlines.COMPARE_SECONDS:g} s", is_certain=False)]
    except CniError as error:
        if not netns.exists:
            raise
        return [Difference(f"can't be compared: {error}", is_certain=False)]


def _keep_of(engine: Engine, pod: Pod | None, attachment: Attachment) -> Keep:
    default = engine.policy.keep
    of_network = {}
    namespace, slash, name = attachment.name.partition("/")
    if slash:
        try:
            of_network = dict(engine.cluster.network(namespace, name).annotations)
        except (NetworkNotFoundError, StoreUnavailableError):
            # What the network said is not known any more.
            pass
    return keep_of(pod.annotations if pod else {}, of_network, default)
