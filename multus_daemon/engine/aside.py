"""What can't be detached: a day after the first failure it is set aside, and nobody tries any more.

Records of which nothing more can be expected would fail each GC and be tried for ever. What is set aside is told of,
listed, and kept until a person forgets it. Only orphans come here: what a runtime still asks for stays on record.
"""

from __future__ import annotations

import logging
from typing import Final

from multus_daemon import deadlines
from multus_daemon.attachment import ContainerRecord, Pod, SetAside
from multus_daemon.cni.errors import CniError, IoFailureError
from multus_daemon.cni.names import ContainerId
from multus_daemon.engine import records
from multus_daemon.engine.engine import Engine
from multus_daemon.ports import EVENT_MESSAGE_MAX

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


def listed(engine: Engine) -> list[SetAside]:
    """What is set aside, by container. Raises IoFailureError (5)."""
    try:
        return engine.store.aside()
    except OSError as error:
        raise IoFailureError(f"what is set aside can't be read: {error}") from error


def forget(engine: Engine, container_id: ContainerId) -> bool:
    """Forget what was set aside of the container, once a person has seen to it; False where that is nothing.

    Raises InvalidEnvironmentError (4) for an id that is none, IoFailureError (5).
    """
    with engine.locks.hold(container_id):
        try:
            known = engine.store.forget(container_id)
        except OSError as error:
            raise IoFailureError(f"container {container_id} can't be forgotten: {error}") from error
    if known:
        log.warning("container %s, which was set aside, is forgotten", container_id)
    return known


def tell(engine: Engine, record: ContainerRecord, reason: str, text: str) -> None:
    """One Warning about the record's pod; about the node where the pod is not known."""
    pod = Pod(record.pod_namespace, record.pod_name, record.pod_uid)
    if pod.name:
        engine.cluster.event(pod, "Warning", reason, text[:EVENT_MESSAGE_MAX])
    else:
        message = f"container {record.sandbox.container_id}: {text}"
        engine.cluster.node_event("Warning", reason, message[:EVENT_MESSAGE_MAX])
