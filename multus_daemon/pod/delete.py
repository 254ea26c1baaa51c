"""DEL of a container. A DEL that fails too often is answered as done: the pod must be able to go."""

from __future__ import annotations

import logging
from typing import Final

from multus_daemon.pod import publish
from multus_daemon.pod.detach import detach, is_elsewhere
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.request import CniRequest
from multus_daemon.runtime import timeline
from multus_daemon.spec.attachment import ContainerRecord
from multus_daemon.spec.cni.errors import CniError, fault
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX

log = logging.getLogger(__name__)

NOT_RELEASED: Final = "NetworkNotReleased"


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
    if not engine.namespaces.is_netns(netns) or is_elsewhere(engine.namespaces, record.netns_id, netns):
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
