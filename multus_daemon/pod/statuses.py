"""Repair of network-statuses that differ from the records.

An ADD does not wait long for the API server, and a status that is still to be written is lost with the daemon. Each
status is made again from the records. Entries of interfaces that others have brought stay.
"""

from __future__ import annotations

import logging

from multus_daemon import deadlines
from multus_daemon.pod import publish
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.records import is_of
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import ContainerRecord, Pod
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId, IfName
from multus_daemon.spec.nad import network_status
from multus_daemon.spec.ports import PodNotFoundError, StatusWriteError, StoreUnavailableError

log = logging.getLogger(__name__)

_ENDED = frozenset({"Succeeded", "Failed"})


def bring_up_to_date(engine: Engine, container_id: ContainerId) -> bool:
    """Write the network-status of the container's pod if it is missing or outdated; return False if it is not.

    The newest container of a pod counts, if its record is ours and complete. If the write fails, the store tries again
    later. Blocks. Raises StoreUnavailableError, also if the node's pods are not known, StatusWriteError, CniError if
    the record cannot be read, deadline.ExpiredError.
    """
    pods = {str(pod): pod for pod in engine.cluster.node_pods() if pod.phase not in _ENDED}
    entry = engine.records.view.get(container_id)
    pod = pods.get(entry.pod) if entry else None
    if entry is None or pod is None or not is_of(entry, pod):
        return False
    others = engine.records.view.of_pod(entry.pod)
    if any(other.created > entry.created and other.complete and is_of(other, pod) for other in others):
        return False
    with deadline.within(deadlines.STATUSES_POD_SECONDS), engine.locks.hold(container_id):
        record = engine.records.find(container_id, search=False)
        return record is not None and record.complete and not record.foreign and _bring_up_to_date(engine, record)


def after_repeated_add(engine: Engine, record: ContainerRecord) -> None:
    """Write the network-status of a container whose lock the caller holds. A failure is logged."""
    try:
        with deadline.within(deadlines.NETWORK_STATUS_SECONDS):
            _bring_up_to_date(engine, record)
    except (StatusWriteError, StoreUnavailableError, deadline.ExpiredError) as error:
        log.warning("network-status of pod %s: %s", record.pod, str(error) or type(error).__name__)


def after_change(engine: Engine, container_id: ContainerId, pod: Pod, record: ContainerRecord | None = None) -> None:
    """Write the network-status of a container whose networks have changed; a failure is logged, and tried again.

    `record`: as it is on disk now; None if that must be read, because the change failed.
    In any case: what is known of the pod's annotation may be older than the last status. The caller holds the lock.
    """
    try:
        with deadline.within(deadlines.NETWORK_STATUS_SECONDS):
            record = record or engine.records.find(container_id, search=False)
            if record is not None:
                present = pod.annotations.get(network_status.ANNOTATION, "")
                engine.cluster.write_network_status(pod, _wanted(engine, pod, record) or present, keep_trying=True)
    except (CniError, StatusWriteError, StoreUnavailableError, deadline.ExpiredError) as error:
        log.warning("network-status of pod %s: %s", pod, str(error) or type(error).__name__)


def _bring_up_to_date(engine: Engine, record: ContainerRecord) -> bool:
    try:
        pod = engine.cluster.pod(record.pod_namespace, record.pod_name, record.pod_uid)
    except PodNotFoundError:
        return False
    wanted = _wanted(engine, pod, record) if is_of(record, pod) else None
    if wanted is None:
        return False
    log.info("network-status of pod %s is not what is attached: it is written anew", pod)
    engine.cluster.write_network_status(pod, wanted, keep_trying=True)
    return True


def _wanted(engine: Engine, pod: Pod, record: ContainerRecord) -> str | None:
    """Return the right annotation; None if it is there, or if the container's namespace cannot be looked into."""
    shown = publish.shown(record)
    own = publish.entries(engine.device_files, (item for item in shown if not item.hot_plugged))
    hot_plugged = publish.entries(engine.device_files, (item for item in shown if item.hot_plugged))
    if not own and not hot_plugged:
        return None
    try:
        present = network_status.parse(pod.annotations.get(network_status.ANNOTATION, ""))
    except CniError:
        present = []
    others = [IfName(name) for name in network_status.interfaces_of_others(present, [*own, *hot_plugged])]
    if not engine.namespaces.is_netns(record.sandbox.netns):
        return None
    try:
        with engine.namespaces.open(record.sandbox.netns) as netns:
            there = netns.existing(others) if others else []
    except OSError as error:
        log.debug("network-status of pod %s is left alone: %s: %s", pod, record.sandbox.netns, error)
        return None
    gone = {item.ifname for item in shown if not item.is_attached}
    wanted = network_status.brought_up_to_date(present, own, hot_plugged=hot_plugged, there=there, gone=gone)
    return None if wanted is None else network_status.render(wanted)
