"""Quarantine: the networks of an orphan that could not be detached for a day are not tried any more.

Otherwise such a record would fail each GC, for ever. An Event reports a container in quarantine, `multusctl` lists it,
and it is kept until a person forgets it. A container that a runtime still asks for stays on record.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Final

from multus_daemon import deadlines
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.view import Entry
from multus_daemon.spec.attachment import ContainerRecord
from multus_daemon.spec.cni.errors import CniError, IoFailureError, TryAgainLaterError, UnknownContainerError, fault
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX, CorruptRecordError

log = logging.getLogger(__name__)

EVENT: Final = "AttachmentSetAside"
TRIES: Final = 5
"""Failed attempts of this daemon before an orphan is set aside."""


def quarantine_if_due(engine: Engine, container_id: ContainerId, error: CniError) -> bool:
    """Put an orphan, whose DEL failed with `error`, into quarantine if its DELs have failed for a day.

    The caller holds the container's lock. False if it is not due, or if the disk fails, which is logged.
    """
    try:
        rest = engine.records.find(container_id, search=False)
        now = engine.clock()
        tries, seconds = engine.records.count_failed_orphan(container_id)
        # The clock may have been wrong, at the first failure or now.
        is_tried = tries >= TRIES and seconds >= deadlines.SET_ASIDE_LEAST_SECONDS
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
    engine.metrics.deletes.set_aside.inc()
    message = f"container {container_id} of pod {rest.pod}: {text}"
    engine.cluster.node_event("Warning", EVENT, message[:EVENT_MESSAGE_MAX])
    return True


def forget(engine: Engine, container_id: ContainerId) -> ContainerRecord | None:
    """Forget a container on record or in quarantine, for a person; return its record, None if unreadable.

    Raises UnknownContainerError (3) if nothing is known of it, TryAgainLaterError (11) while its network namespace
    exists, InvalidEnvironmentError (4) for an invalid id, IoFailureError (5).
    """
    with engine.locks.hold(container_id):
        try:
            record = _left_of(engine, container_id)
            if record is not None and engine.namespaces.is_netns(record.sandbox.netns):
                raise TryAgainLaterError(
                    f"container {container_id} can't be forgotten: its network namespace {record.sandbox.netns} exists",
                    "delete the pod, so that the runtime removes it; a runtime that does not know the container any "
                    f"more will not: ip netns delete {os.path.basename(record.sandbox.netns)}",
                )
            known = engine.records.forget(container_id)
        except OSError as error:
            raise IoFailureError(f"container {container_id} can't be forgotten: {error}") from error
    if not known:
        raise UnknownContainerError(
            f"nothing is known of container {container_id}", "`multusctl attachments --leaks` shows what is"
        )
    log.warning("container %s is forgotten: a person has asked for it", container_id)
    return record


def _left_of(engine: Engine, container_id: ContainerId) -> ContainerRecord | None:
    """Return the container's record, else that in quarantine; without a namespace that is another container's now.

    Raises OSError, InvalidEnvironmentError (4) for an invalid id.
    """
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
