"""DEL of a container. A DEL that fails too often is answered with success, so that the pod can end.

An orphan whose DELs failed for a day is set aside (`aside/`), as its record would fail each GC for ever. An Event
reports it, `multusctl` lists it, and it stays there until a person lets the daemon forget it. A container that the
runtime still deletes is not set aside.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Final

from multus_daemon import deadlines
from multus_daemon.pod import publish
from multus_daemon.pod.detach import detach, is_elsewhere
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.request import CniRequest
from multus_daemon.pod.view import Entry
from multus_daemon.runtime import timeline
from multus_daemon.spec.attachment import ContainerRecord
from multus_daemon.spec.cni.errors import (
    CniError,
    IoFailureError,
    Origin,
    TryAgainLaterError,
    UnknownContainerError,
    fault,
)
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.ports import CorruptRecordError

log = logging.getLogger(__name__)

NOT_RELEASED: Final = "NetworkNotReleased"
SET_ASIDE: Final = "AttachmentSetAside"
SET_ASIDE_TRIES: Final = 5
"""Number of failed attempts of this daemon before an orphan is set aside."""


def delete(engine: Engine, request: CniRequest) -> None:
    """Detach the networks on the container's record; without a record, do nothing. Raises CniError."""
    container_id, records = request.container_id, engine.records
    with engine.upkeeps.none(container_id), engine.serving(request) as netns:
        try:
            with timeline.stage("record"):
                record = records.find(container_id, search=True)
        except CniError as error:
            _unreadable_failed(engine, container_id, error)
            return
        if record is None:
            log.info("DEL of container %s: it has no record, so nothing is left to delete", container_id)
            return
        timeline.note(f"on record: {', '.join(item.name for item in record.attachments)}")
        if request.spooled and _is_overtaken(engine, record, request.spooled):
            log.warning(
                "spooled DEL of container %s is dropped: the container was added again after it, and still runs",
                container_id,
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

    Clocks jump, so the namespace counts more than times. If it is gone, the DEL does no harm. If the DEL's time is in
    the future, it says nothing, and a namespace with processes counts as added again. Reconciling repeats a DEL dropped
    in error.
    """
    netns = record.sandbox.netns
    if not engine.namespaces.is_netns(netns) or is_elsewhere(engine.namespaces, record.netns_id, netns):
        return False
    if record.created > spooled:
        return True
    return spooled > engine.clock() and netns in engine.namespaces.netns_in_use([netns])


def _is_given_up(engine: Engine, container_id: ContainerId, error: CniError, failed: int, *, is_news: bool) -> bool:
    """Return True if the failed DEL must be answered with success; the networks that are left stay on record.

    That is so after `delete_tries` failures, and if only networks are left whose hot-plug failed: no client knows them.
    """
    is_done = 0 < engine.settings.deletes.tries <= failed
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
        # The pod must go nevertheless.
        if is_done:
            engine.records.given_up.add(container_id)
            log.error("%s; %s (container %s)", text, damage, container_id, exc_info=fault(error))
        return is_done
    log.error("%s (container %s of pod %s)", text, container_id, rest.pod, exc_info=fault(error))
    if is_news:
        engine.metrics.deletes_given_up.inc()
        publish.about_record(engine.cluster, rest, NOT_RELEASED, text)
    return True


def _unreadable_failed(engine: Engine, container_id: ContainerId, error: CniError) -> None:
    """Count a failed DEL of a container with an unreadable record. Raises `error` before the last of `delete_tries`."""
    tries, failed = engine.settings.deletes.tries, engine.records.count_failed_delete(container_id)
    if not 0 < tries <= failed:
        raise error
    engine.records.given_up.add(container_id)
    text = f"DEL of container {container_id} failed {tries} times and is answered as done: {error}"
    log.error("%s", text)
    if failed == tries:
        engine.metrics.deletes_given_up.inc()
        engine.cluster.node_event("Warning", NOT_RELEASED, text)


def quarantine_if_due(engine: Engine, container_id: ContainerId, error: CniError) -> bool:
    """Set an orphan, whose DEL failed with `error`, aside if its DELs have failed for a day.

    The caller holds the container's lock. Returns False if that is not due, or if the disk fails, which is logged.
    """
    try:
        rest = engine.records.find(container_id, search=False)
        now = engine.clock()
        tries, seconds = engine.records.count_failed_orphan(container_id)
        # The clock may have been wrong, at the first failure or now.
        is_tried = tries >= SET_ASIDE_TRIES and seconds >= deadlines.SET_ASIDE_LEAST_SECONDS
        is_due = is_tried and rest is not None and now - rest.failing_since >= deadlines.SET_ASIDE_SECONDS
        if rest is None or not rest.failing_since or not is_due:
            return False
        engine.records.set_aside(rest, since=now, why=str(error))
    except (CniError, OSError) as damage:
        log.error("container %s can't be set aside: %s", container_id, damage)
        return False
    names = ", ".join(f"{item.name} ({item.ifname})" for item in rest.attachments)
    text = f"networks that could not be detached for a day are set aside: {names}: {error}"
    where = f"container {container_id} of pod {rest.pod}"
    log.error("%s (%s); see docs/operations.md", text, where, exc_info=fault(error))
    engine.metrics.set_aside.inc()
    engine.cluster.node_event("Warning", SET_ASIDE, f"{where}: {text}")
    return True


def forget(engine: Engine, container_id: ContainerId) -> ContainerRecord | None:
    """Remove the record of a container, also one that is set aside, for a person; return it, None if unreadable.

    Raises UnknownContainerError (3) if nothing is known of it, TryAgainLaterError (11) while its network namespace
    exists, InvalidEnvironmentError (4) for an invalid id, IoFailureError (5).
    """
    with engine.locks.hold(container_id):
        try:
            record = _left_of(engine, container_id)
            if record is not None and engine.namespaces.is_netns(record.sandbox.netns):
                raise TryAgainLaterError(
                    f"container {container_id} can't be forgotten: its network namespace {record.sandbox.netns} exists",
                    remedy="delete the pod, so that the runtime removes it; if it does not know the container: "
                    f"ip netns delete {os.path.basename(record.sandbox.netns)}",
                    origin=Origin.CLIENT,
                )
            known = engine.records.forget(container_id)
        except OSError as error:
            raise IoFailureError(f"container {container_id} can't be forgotten: {error}") from error
    if not known:
        raise UnknownContainerError(
            f"nothing is known of container {container_id}",
            remedy="`multusctl attachments --leaks` lists the containers that can be forgotten",
            origin=Origin.CLIENT,
        )
    log.warning("container %s is forgotten: a person has asked for it", container_id)
    return record


def _left_of(engine: Engine, container_id: ContainerId) -> ContainerRecord | None:
    """Return the container's record, also one that is set aside; `netns` is empty if another container has it now."""
    store = engine.records.store
    record: ContainerRecord | None = None
    with contextlib.suppress(CorruptRecordError):
        record = store.load(container_id)
    if record is None or record.foreign:
        with contextlib.suppress(CorruptRecordError):
            record = store.recover(container_id) or record
    if record is None:
        record = next((item.record for item in store.aside() if item.container_id == container_id), None)
    if record is None or not record.sandbox.netns:
        return record
    engine.records.refresh()
    own = Entry.of(record)
    is_followed = any(own.is_followed_by(other) for other in engine.records.view.at(record.sandbox.netns))
    return record.in_netns("") if is_followed else record
