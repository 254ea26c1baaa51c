"""What can't be detached: a day after the first failure it is set aside, and nobody tries any more.

Records of which nothing more can be expected would fail each GC and be tried for ever. What is set aside is told of,
listed, and kept until a person forgets it. Only orphans come here: what a runtime still asks for stays on record.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Final

from multus_daemon import deadlines
from multus_daemon.pod import records
from multus_daemon.pod.engine import Engine
from multus_daemon.spec.attachment import ContainerRecord, Pod
from multus_daemon.spec.cni.errors import CniError, IoFailureError, TryAgainLaterError, UnknownContainerError
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX, CorruptRecordError

log = logging.getLogger(__name__)

EVENT: Final = "AttachmentSetAside"


def set_aside_if_due(engine: Engine, container_id: ContainerId, error: CniError) -> bool:
    """Set aside what is left of an orphan, which has failed with `error`, if that has gone on for a day.

    The caller holds the container's lock. False where it has not, or where the disk does not let it: it is logged.
    """
    try:
        rest = records.find(engine, container_id, search=False)
        now = engine.clock()
        if rest is None or not rest.failing_since or now - rest.failing_since < deadlines.SET_ASIDE_SECONDS:
            return False
        engine.store.set_aside(rest, since=now, why=str(error))
    except (CniError, OSError) as damage:
        log.error("container %s can't be set aside: %s", container_id, damage)
        return False
    names = ", ".join(f"{item.name} ({item.ifname})" for item in rest.attachments)
    text = f"networks that could not be detached for a day are set aside: {names}: {error}"
    log.error("container %s of pod %s: %s; see docs/operations.md", container_id, rest.pod, text)
    engine.count_set_aside()
    engine.cluster.node_event(
        "Warning", EVENT, f"container {container_id} of pod {rest.pod}: {text}"[:EVENT_MESSAGE_MAX]
    )
    return True


def forget(engine: Engine, container_id: ContainerId) -> ContainerRecord | None:
    """Forget a container that is on record or set aside, once a person has seen to it; None: it could not be read.

    Raises UnknownContainerError (3) where nothing is known of it, TryAgainLaterError (11) while its network namespace
    exists, InvalidEnvironmentError (4) for an id that is none, IoFailureError (5).
    """
    with engine.locks.hold(container_id):
        try:
            found = _left_of(engine, container_id)
            if found is not None and engine.links.is_netns(found.sandbox.netns):
                raise TryAgainLaterError(
                    f"container {container_id} can't be forgotten: its network namespace {found.sandbox.netns} exists",
                    "delete the pod, so that the runtime removes it; a runtime that does not know the container any "
                    f"more will not: ip netns delete {os.path.basename(found.sandbox.netns)}",
                )
            known = engine.store.forget(container_id)
        except OSError as error:
            raise IoFailureError(f"container {container_id} can't be forgotten: {error}") from error
    if not known:
        raise UnknownContainerError(
            f"nothing is known of container {container_id}", "`multusctl attachments --leaks` shows what is"
        )
    log.warning("container %s is forgotten: a person has asked for it", container_id)
    return found


def _left_of(engine: Engine, container_id: ContainerId) -> ContainerRecord | None:
    """What is set aside of the container, else its record, without a namespace that is another's now.

    Raises OSError, InvalidEnvironmentError (4) for an id that is none.
    """
    found: ContainerRecord | None = None
    with contextlib.suppress(CorruptRecordError):
        found = engine.store.load(container_id)
    if found is None or found.foreign:
        with contextlib.suppress(CorruptRecordError):
            found = engine.store.recover(container_id) or found
    if found is None:
        found = next((item.record for item in engine.store.aside() if item.container_id == container_id), None)
    if found is None or not found.sandbox.netns:
        return found
    return records.without_followed(found, filter(None, records.read_all(engine).values()))


def tell(engine: Engine, record: ContainerRecord, reason: str, text: str) -> None:
    """One Warning about the record's pod; about the node where the pod is not known."""
    pod = Pod(record.pod_namespace, record.pod_name, record.pod_uid)
    if pod.name:
        engine.cluster.event(pod, "Warning", reason, text[:EVENT_MESSAGE_MAX])
    else:
        message = f"container {record.sandbox.container_id}: {text}"
        engine.cluster.node_event("Warning", reason, message[:EVENT_MESSAGE_MAX])
