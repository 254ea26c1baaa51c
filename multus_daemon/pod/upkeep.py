"""Upkeep of one running container: adapt its networks to the pod's annotation, then repair them.

Level-triggered: it compares the present state and does what is missing. So it may run at any time, any number of times;
if it fails or is stopped, the next upkeep does the rest. It holds the container's lock, and stops when a DEL of the
container arrives (`Engine.upkeeps`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from multus_daemon import deadlines, logs
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.pod import annotation
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.records import is_of
from multus_daemon.runtime import deadline
from multus_daemon.runtime.deadline import Interrupted
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Difference, Pod
from multus_daemon.spec.cni.errors import (
    CniError,
    Origin,
    TryAgainLaterError,
    UnexpectedError,
    UnknownContainerError,
    fault,
)
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.nad.selection import HOTPLUG_LABEL, Keep, is_followed, keep_of
from multus_daemon.spec.ports import NetworkNotFoundError, PodNotFoundError, StoreUnavailableError

log = logging.getLogger(__name__)

_ROUNDS_MAX: Final = 3
"""Maximum number of rounds: a repair may need an earlier one, as a route needs its interface."""
_ENDED: Final = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference of an attachment from its record, and whether it may be repaired."""

    attachment: Attachment
    difference: Difference
    keep: Keep

    @property
    def is_repaired(self) -> bool:
        """True if the settings ask for a repair, and a built-in can do it."""
        return self.keep == "repair" and self.difference.repair is not None

    def __str__(self) -> str:
        return f"network {self.attachment.name}: {self.difference.text}"


@dataclass(frozen=True, slots=True)
class Compared:
    """The differences of a container, before and after the repairs."""

    record: ContainerRecord
    """The container's record as it is on disk now."""
    pod: Pod | None = None
    """None if it is not known."""
    found: Sequence[Finding] = ()
    """The differences before the repairs."""
    left: Sequence[Finding] = ()
    """The differences after the repairs."""
    asked: bool = False
    """True if the CHECK of binaries was run, of attachments without a difference."""
    error: CniError | None = None
    """Why the annotation could not be followed, or a repair failed."""


def keep(
    engine: Engine,
    container_id: ContainerId,
    configuration: Callable[[], bytes],
    may_repair: Callable[[Finding], bool] = lambda _: True,
    *,
    asks: bool = False,
) -> Compared | None:
    """Run an upkeep; return its outcome. None if there is no complete record of ours, or the container has ended.

    `configuration` returns the standard input of an ADD. `may_repair` returns False for findings that must only be
    reported, even if the settings ask for a repair. `asks`: run the CHECK of binaries, once. Returns None also if a DEL
    of the container arrives. Blocks. Raises CniError if record or namespace cannot be read.
    """
    with contextlib.suppress(_DeletedError), _held(engine, container_id) as (record, netns):
        return _keep(engine, record, netns, configuration, may_repair, asks)
    return None


def compare(engine: Engine, container_id: ContainerId, *, repairs: bool = False) -> Compared:
    """Compare the container with its record, whatever the setting `keep` is; `repairs`: also repair it. Blocks.

    Raises UnknownContainerError (3) if it has no complete record or has ended, or a DEL of it arrives; CniError.
    """
    with _held(engine, container_id) as (record, netns):
        return _repair(engine, record, _pod(engine, record), netns, lambda _: repairs, also_off=True)


class _DeletedError(UnknownContainerError):
    """The container has no complete record, has ended, or is being deleted."""


@contextlib.contextmanager
def _held(engine: Engine, container_id: ContainerId) -> Iterator[tuple[ContainerRecord, PodNetns]]:
    """Hold the container's lock; yield its record and namespace. Raises _DeletedError, also when a DEL arrives."""
    limit = deadline.current()
    with engine.upkeeps.of(container_id) as is_wanted:
        if not is_wanted:
            raise _DeletedError(f"container {container_id} is being deleted")
        try:
            with engine.locks.hold(container_id):
                engine.upkeeps.holders.add(container_id)
                record = engine.records.find(container_id, search=False)
                if record is None or not record.complete or record.foreign:
                    raise _DeletedError(f"container {container_id} has no record of a complete ADD")
                with engine.namespaces.open(record.sandbox.netns) as netns:
                    # A newer container may use the namespace, or its path.
                    is_gone = not netns.exists or netns.is_elsewhere(record.netns_id)
                    if is_gone or engine.records.is_followed(record, netns.path):
                        problem = f"the network namespace of container {container_id} is gone"
                        raise _DeletedError(problem, record.sandbox.netns)
                    yield record, netns
        except Interrupted:
            if not limit.stopped:
                raise
            log.info(
                "the upkeep of container %s is stopped: the container is being deleted, or the daemon stops",
                container_id,
            )
            raise _DeletedError(f"container {container_id} is being deleted") from None


def _keep(
    engine: Engine,
    record: ContainerRecord,
    netns: PodNetns,
    configuration: Callable[[], bytes],
    may_repair: Callable[[Finding], bool],
    asks: bool,
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
    compared = _repair(engine, record, pod, netns, lambda item: item.keep == "repair" and may_repair(item), asks=asks)
    return replace(compared, error=problem or compared.error)


def follows(engine: Engine, pod: Pod) -> bool:
    """Return True if the pod's networks follow changes of its annotation. Raises TryAgainLaterError (11)."""
    mode = engine.settings.attachments.hotplug
    if mode == "off" or not is_followed(pod.annotations) or engine.cluster.hotplug_controller():
        return False
    if mode == "on":
        return True
    try:
        return engine.cluster.namespace_labels(pod.namespace).get(HOTPLUG_LABEL) == "true"
    except StoreUnavailableError as error:
        raise TryAgainLaterError(
            f"labels of namespace {pod.namespace} can't be read: {error}", f"pod {pod}", origin=Origin.API
        ) from error


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
    is_wanted: Callable[[Finding], bool],
    *,
    also_off: bool = False,
    asks: bool = True,
) -> Compared:
    """Compare the container with its record; repair the findings for which `is_wanted` is true. Raises CniError."""
    found = left = _findings(engine, record, pod, netns, also_off=also_off, asks=asks)
    error = None
    for _ in range(_ROUNDS_MAX):
        wanted = [item for item in left if item.difference.repair and is_wanted(item)]
        if not wanted:
            break
        error = None
        with engine.netns_held(netns.path):
            for item in wanted:
                error = _repair_one(engine, item, record.pod) or error
        # A person who has asked for the comparison sees all that is left.
        left = _findings(engine, record, pod, netns, also_off=also_off, asks=also_off)
    return Compared(record, pod, found, left, asks, error)


def _repair_one(engine: Engine, item: Finding, pod: str) -> CniError | None:
    """Repair one finding; return the error, None after a success."""
    name, text = item.attachment.name, item.difference.text
    if item.difference.repair is None:
        return None
    how: Literal["success", "error"] = "error"
    place = f"network {name} of pod {pod}: {text}"
    try:
        with logs.fields(network=name, ifname=item.attachment.ifname), deadline.within(deadlines.REPAIR_SECONDS):
            item.difference.repair()
        how = "success"
        log.info("repaired network %s of pod %s: %s", name, pod, text)
        return None
    except deadline.ExpiredError:
        error: CniError = TryAgainLaterError(
            f"the repair did not end within {deadlines.REPAIR_SECONDS:g} s", place, origin=Origin.NODE
        )
    except CniError as failure:
        error = failure.with_context(place)
    except Exception as failure:
        error = UnexpectedError(f"{type(failure).__name__}: {failure}", place)
        error.__cause__ = failure
    finally:
        engine.metrics.repairs.labels(how).inc()
    log.warning("a repair failed: %s", error, exc_info=fault(error))
    return error


def _findings(
    engine: Engine, record: ContainerRecord, pod: Pod | None, netns: PodNetns, *, also_off: bool, asks: bool
) -> list[Finding]:
    """Compare each attachment of the container with its record. Changes nothing; blocks, in the thread of `netns`.

    `pod`: None if it is not known. `also_off`: also compare networks whose setting `keep` is `off`. `asks`: run the
    CHECK of binaries where nothing differs. The caller holds the container's lock. Raises InvalidNetnsError if the
    namespace cannot be entered.
    """
    found: list[Finding] = []
    for attachment in record.attachments:
        keep = _keep_of(engine, pod, attachment)
        if keep == "off" and not also_off:
            continue
        found += [Finding(attachment, item, keep) for item in _differences(engine, record, attachment, netns, asks)]
    return found


def _differences(
    engine: Engine, record: ContainerRecord, attachment: Attachment, netns: PodNetns, asks: bool
) -> Sequence[Difference]:
    try:
        with deadline.within(deadlines.COMPARE_SECONDS):
            return engine.runner.differences(record.sandbox, attachment, netns, asks=asks)
    except deadline.ExpiredError:
        return [Difference(f"not compared within {deadlines.COMPARE_SECONDS:g} s", is_certain=False)]
    except CniError as error:
        if not netns.exists:
            raise
        return [Difference(f"can't be compared: {error}", is_certain=False)]


def _keep_of(engine: Engine, pod: Pod | None, attachment: Attachment) -> Keep:
    default = engine.settings.attachments.keep
    of_network = {}
    namespace, slash, name = attachment.name.partition("/")
    if slash:
        try:
            of_network = dict(engine.cluster.network(namespace, name).annotations)
        except (NetworkNotFoundError, StoreUnavailableError):
            # What the network said is not known any more.
            pass
    return keep_of(pod.annotations if pod else {}, of_network, default)
