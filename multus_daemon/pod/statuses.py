"""Network-statuses that say something else than the records: an ADD does not wait long for the API server, and what it
leaves to be written later is lost with the daemon. The records have it all: each status is made from them again.

By content, whoever wrote it and when: entries of interfaces that others have brought stay.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from multus_daemon import deadlines
from multus_daemon.pod import devices, publish, records
from multus_daemon.pod.engine import Engine
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import ContainerRecord, Pod
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId, IfName
from multus_daemon.spec.nad import status
from multus_daemon.spec.ports import PodNotFoundError, StatusWriteError, StoreUnavailableError

log = logging.getLogger(__name__)

_ENDED = frozenset({"Succeeded", "Failed"})


def outdated(engine: Engine) -> list[ContainerId]:
    """The containers of this node whose pods' network-status is missing or not what is on record. Touches nothing.

    Of a pod the newest container counts; what has no complete record of ours is left alone. Raises OSError where the
    records can't be listed, StoreUnavailableError where it is not known which pods there are.
    """
    pods = {str(pod): pod for pod in engine.cluster.node_pods() if pod.phase not in _ENDED}
    newest: dict[str, ContainerRecord] = {}
    for record in records.read_all(engine).values():
        if record is None or not record.complete or record.pod not in pods:
            continue
        other = newest.get(record.pod)
        if records.is_of(record, pods[record.pod]) and (other is None or other.created < record.created):
            newest[record.pod] = record
    return [
        record.sandbox.container_id
        for name, record in newest.items()
        if _wanted(engine, pods[name], record) is not None
    ]


def bring_up_to_date(engine: Engine, container_id: ContainerId) -> bool:
    """Write the network-status of the container's pod anew if it still has to be; False where it has not.

    What can't be written now the store goes on with. Raises StatusWriteError, StoreUnavailableError, CniError
    where the record can't be read, deadline.ExpiredError.
    """
    with deadline.within(deadlines.STATUSES_POD_SECONDS), engine.locks.hold(container_id):
        record = records.find(engine, container_id, search=False)
        return record is not None and record.complete and not record.foreign and _bring_up_to_date(engine, record)


def after_repeated_add(engine: Engine, record: ContainerRecord) -> None:
    """The same for a container whose lock the caller holds. What fails is for the log."""
    try:
        with deadline.within(deadlines.NETWORK_STATUS_SECONDS):
            _bring_up_to_date(engine, record)
    except (StatusWriteError, StoreUnavailableError, deadline.ExpiredError) as error:
        log.warning("network-status of pod %s: %s", record.pod, str(error) or type(error).__name__)


def _bring_up_to_date(engine: Engine, record: ContainerRecord) -> bool:
    try:
        pod = engine.cluster.pod(record.pod_namespace, record.pod_name, record.pod_uid)
    except PodNotFoundError:
        return False
    wanted = _wanted(engine, pod, record) if records.is_of(record, pod) else None
    if wanted is None:
        return False
    log.info("network-status of pod %s is not what is attached: it is written anew", pod)
    engine.cluster.write_network_status(pod, wanted, keep_trying=True)
    return True


def _wanted(engine: Engine, pod: Pod, record: ContainerRecord) -> str | None:
    """What the annotation has to be; None where it is that, or where the container's namespace can't be looked into."""
    shown = [replace(item, device_info=devices.info(engine, item)) for item in publish.shown(record)]
    own = publish.entries(item for item in shown if not item.hot_plugged)
    hot_plugged = publish.entries(item for item in shown if item.hot_plugged)
    if not own and not hot_plugged:
        return None
    try:
        present = status.parse(pod.annotations.get(status.ANNOTATION, ""))
    except CniError:
        present = []
    others = [IfName(name) for name in status.interfaces_of_others(present, [*own, *hot_plugged])]
    if not engine.links.is_netns(record.sandbox.netns):
        return None
    try:
        with engine.links.open(record.sandbox.netns) as netns:
            there = netns.existing(others) if others else []
    except OSError as error:
        log.debug("network-status of pod %s is left alone: %s: %s", pod, record.sandbox.netns, error)
        return None
    wanted = status.brought_up_to_date(present, own, hot_plugged=hot_plugged, there=there)
    return None if wanted is None else status.render(wanted)
