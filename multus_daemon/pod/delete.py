"""DEL of a container: as the runtime asks for it, as the spool repeats it, and its end where it never succeeds."""

from __future__ import annotations

import logging
from typing import Final

from multus_daemon.pod import aside, detach, records
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.request import CniRequest
from multus_daemon.runtime import timeline
from multus_daemon.spec.attachment import ContainerRecord
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX

log = logging.getLogger(__name__)

EVENT: Final = "NetworkNotReleased"


def delete(engine: Engine, request: CniRequest) -> None:
    """Detach what the record of the container names; a container without one is done. Raises CniError."""
    container_id = request.container_id
    with (
        engine.locks.hold(container_id),
        engine.links.open(request.netns, may_be_own=request.netns_override) as netns,
    ):
        try:
            record = records.find(engine, container_id, search=True)
        except CniError as error:
            _unreadable_failed(engine, container_id, error)
            return
        if record is None:
            log.info("DEL of container %s: nothing is known of it, so it is done", container_id)
            return
        timeline.note(f"on record: {', '.join(item.name for item in record.attachments)}")
        if request.spooled and _is_overtaken(engine, record, request.spooled):
            log.warning(
                "spooled DEL of container %s is dropped: the container has been added since, and lives",
                container_id,
            )
            return
        try:
            detach.detach(engine, record, netns, counts=True)
        except CniError as error:
            failed = engine.failed_deletes.count(container_id, record.deletes_failed)
            if not _is_last(engine, failed) and not _is_only_of_hot_plugs(engine, container_id):
                raise
            _give_up(engine, container_id, error, failed, is_news=not record.given_up)
        else:
            engine.failed_deletes.forget(container_id)


def _is_overtaken(engine: Engine, record: ContainerRecord, spooled: float) -> bool:
    """True where the container was added anew after the DEL was written down, and lives.

    Clocks jump: what the namespace shows counts more than times. Where it is gone nothing can be harmed; where the
    DEL is of the future, its time says nothing, and a namespace in which processes run is let be. What is dropped
    in error the comparison of records with what lives finds again.
    """
    netns = record.sandbox.netns
    if not engine.links.is_netns(netns) or records.is_elsewhere(engine, record, netns):
        return False
    if record.created > spooled:
        return True
    return spooled > engine.clock() and netns in engine.links.netns_in_use([netns])


# --- what never succeeds -----------------------------------------------------------------------------------------


def _is_last(engine: Engine, failed: int) -> bool:
    return 0 < engine.delete_tries <= failed


def _is_only_of_hot_plugs(engine: Engine, container_id: ContainerId) -> bool:
    """Whether all that is left are networks whose hot-plug has failed: nobody was told that the pod has them."""
    try:
        rest = records.find(engine, container_id, search=False)
    except CniError:
        return False
    return rest is not None and all(item.hot_plugged and item.result is None for item in rest.attachments)


def _give_up(engine: Engine, container_id: ContainerId, error: CniError, failed: int, *, is_news: bool) -> None:
    """The runtime is told that it is done; what is left stays on record."""
    times = f"{failed} times" if failed > 1 else "once"
    text = f"DEL failed {times} and is answered as done; what is left is deleted later: {error}"
    try:
        rest = records.find(engine, container_id, search=False)
        if rest is None:
            return
        detach.give_up(engine, rest)
    except CniError as damage:
        # The pod must go nevertheless. That its namespace is gone will tell.
        log.error("container %s: %s; %s", container_id, text, damage)
        return
    log.error("container %s of pod %s: %s", container_id, rest.pod, text)
    if is_news:
        engine.count_given_up()
        aside.tell(engine, rest, EVENT, text)


def _unreadable_failed(engine: Engine, container_id: ContainerId, error: CniError) -> None:
    """A DEL of a container whose record can't be read has failed. Raises `error`, but for the last try."""
    failed = engine.failed_deletes.count(container_id)
    if not _is_last(engine, failed):
        raise error
    text = f"DEL of container {container_id} failed {engine.delete_tries} times and is answered as done: {error}"
    log.error("%s", text)
    if failed == engine.delete_tries:
        engine.count_given_up()
        engine.cluster.node_event("Warning", EVENT, text[:EVENT_MESSAGE_MAX])
