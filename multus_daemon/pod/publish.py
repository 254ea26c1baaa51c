"""Write the pod's network-status, send Events and count them: the only step that does, after the record is on disk.

Events never fail a request. A status that waits for the API server is lost when the daemon ends: `bring_up_to_date`
makes it again from the record. Entries of interfaces that other programs have added stay.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, Final

from multus_daemon import deadlines
from multus_daemon.cluster.devices import NodeDeviceFiles
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.networks import MissingDefinitionError
from multus_daemon.pod.records import is_of
from multus_daemon.pod.request import CniRequest
from multus_daemon.pod.unsupported import EVENT as NOT_MET
from multus_daemon.pod.unsupported import Notice, UnsupportedArgError
from multus_daemon.runtime import deadline
from multus_daemon.runtime.timeline import Timeline
from multus_daemon.spec import claims
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Pod, Sandbox
from multus_daemon.spec.cni.errors import HANGS, MORE, CniError, Origin, TryAgainLaterError
from multus_daemon.spec.cni.names import ContainerId, IfName
from multus_daemon.spec.nad import network_status
from multus_daemon.spec.ports import (
    EVENT_MESSAGE_MAX,
    Events,
    PodNotFoundError,
    StatusWriteError,
    StoreUnavailableError,
)

log = logging.getLogger(__name__)

# Reasons of Warning events. The first is upstream's, the third that of the hot-plug controller.
NO_NETWORK: Final = "NoNetworkFound"
INVALID: Final = "InvalidNetwork"
FAILED: Final = "FailedAddingInterface"
NO_STATUS: Final = "NetworkStatusNotWritten"
SLOW: Final = "AddingInterfaceIsSlow"
# Reasons of Normal events.
PLUGGED: Final = "NetworkAttached"
UNPLUGGED: Final = "NetworkDetached"

_ENDED: Final = frozenset({"Succeeded", "Failed"})


class StatusRequiredError(TryAgainLaterError):
    """The network-status must be written (`statusWrite`), and could not be."""


def required_status(engine: Engine, pod: Pod, record: ContainerRecord) -> None:
    """Write the network-status if an ADD must not succeed without it. Raises StatusRequiredError (11)."""
    if engine.settings.kubernetes.status_write == "required" and (
        problem := _write_status(engine, pod, record, keep_trying=False)
    ):
        raise StatusRequiredError(
            f"network-status can't be written: {problem} (pod {pod})",
            "statusWrite is 'required', so nothing stays attached",
            origin=Origin.API,
        )


def attached(engine: Engine, pod: Pod, record: ContainerRecord) -> None:
    """Write the network-status and send the Events of the runtime's ADD, whose record is on disk."""
    problem = ""
    if engine.settings.kubernetes.status_write != "required":
        problem = _write_status(engine, pod, record, keep_trying=True)
    for attachment in shown(record):
        if not attachment.hot_plugged:
            added(engine.cluster, pod, attachment)
    if problem:
        log.warning("network-status of pod %s: %s", pod, problem)
        engine.cluster.event(pod, "Warning", NO_STATUS, f"network-status: {problem}")


def added(events: Events, pod: Pod, attachment: Attachment) -> None:
    """Send the Event that a network is attached, with upstream's text."""
    result = attachment.result
    if result and (result.interfaces or result.ips):
        addresses = " ".join(ip.address for ip in result.ips)
        events.event(pod, "Normal", "AddedInterface", f"Add {attachment.ifname} [{addresses}] from {attachment.name}")


def plugged(events: Events, pod: Pod, made: Iterable[Attachment]) -> None:
    """Send an Event for each network that a running pod has got."""
    for item in made:
        addresses = " ".join(ip.address for ip in item.result.ips) if item.result else ""
        events.event(pod, "Normal", PLUGGED, f"network {item.name}, interface {item.ifname}, is attached [{addresses}]")


def detached(events: Events, pod: Pod, gone: Iterable[Attachment]) -> None:
    """Send an Event for each network that was detached from a running pod, as its annotation no longer names it."""
    for item in gone:
        events.event(pod, "Normal", UNPLUGGED, f"network {item.name}, interface {item.ifname}, is detached")


def notices(engine: Engine, pod: Pod, found: Iterable[Notice]) -> None:
    """Report warnings for the pod's author: each is logged, sent as an Event and counted."""
    for notice in found:
        log.warning("%s", notice.text)
        if notice.key:
            engine.metrics.unmet_requests.labels(notice.key).inc()
        engine.cluster.event(pod, "Warning", notice.reason, notice.text)


@contextlib.contextmanager
def failures(engine: Engine, pod: Pod, sandbox: Sandbox) -> Iterator[None]:
    """If the block raises a CniError, report it as the failure of an ADD, and raise it."""
    try:
        yield
    except CniError as error:
        failure(engine, pod, error, FAILED, sandbox)
        raise


def failure(engine: Engine, pod: Pod, error: CniError, reason: str, sandbox: Sandbox) -> None:
    """Report the failure of an ADD as one Warning Event; `reason`: of the Event, if the error's kind has none.

    The text has no container id: Kubernetes counts Events together only if their texts are equal.
    """
    if isinstance(error, UnsupportedArgError):
        engine.metrics.unmet_requests.labels(error.key).inc()
    reason, message = _as_event(error, reason)
    for own, name in (
        (sandbox.netns, "the pod's network namespace"),
        (f"container {sandbox.container_id}", "the container"),
    ):
        message = message.replace(own, name) if own else message
    more = f"{MORE}{engine.explain} {pod}"
    engine.cluster.event(pod, "Warning", reason, message[: EVENT_MESSAGE_MAX - len(more)] + more)


def slow(engine: Engine, request: CniRequest, timeline: Timeline) -> None:
    """Send a Warning Event that an ADD is slow, and in which plugin. Runs on the event loop."""
    pod = Pod(request.args.namespace, request.args.name, request.args.uid)
    for what, (began, limit) in tuple(timeline.doing.items()):
        text = f"{what} has run for {time.time() - began:.0f} s and is ended after {limit:.0f} s (pod {pod}); {HANGS}"
        engine.cluster.event(pod, "Warning", SLOW, text)


def devices(engine: Engine, record: ContainerRecord, changed: Iterable[Attachment]) -> None:
    """Report which devices of the ResourceClaims of `changed` are attached now, according to the record.

    Devices that another container of the pod has stay reported: an earlier container may be deleted late.
    """
    changed = [item for item in changed if item.claimed]
    if not changed:
        return
    pod = Pod(record.pod_namespace, record.pod_name, record.pod_uid)
    reports = claims.reports(changed, record.attachments, record.created)
    others = engine.records.claims_of_others(record) if not all(report.entries for report in reports) else ()
    for report in reports:
        if report.entries or report.claim_uid not in others:
            engine.cluster.device_status(pod, report)


def about_record(events: Events, record: ContainerRecord, reason: str, text: str) -> None:
    """Send a Warning Event about the record's pod, or about the node if the pod is not known."""
    pod = Pod(record.pod_namespace, record.pod_name, record.pod_uid)
    if pod.name:
        events.event(pod, "Warning", reason, text)
    else:
        events.node_event("Warning", reason, f"container {record.sandbox.container_id}: {text}")


def shown(record: ContainerRecord) -> list[Attachment]:
    """Return the attachments with entries in the network-status, in its order: the cluster network first.

    An auxiliary chain has no interface of its own, so it has no entry.
    """
    return sorted((item for item in record.attachments if not item.auxiliary), key=attrgetter("hot_plugged"))


def entries(files: NodeDeviceFiles, attachments: Iterable[Attachment]) -> list[dict[str, Any]]:
    """Return the network-status entries of those `attachments` that are attached, with their device-info."""
    return [
        entry
        for item in attachments
        if item.result is not None and item.is_attached
        for entry in network_status.entries_for(
            item.name,
            item.ifname,
            item.result,
            cluster_network=item.cluster_network,
            device_info=_device_info(files, item) if item.info_file else None,
            default_route=item.default_route,
        )
    ]


def _device_info(files: NodeDeviceFiles, attachment: Attachment) -> Mapping[str, Any] | None:
    """Return the content of the attachment's device-info file; None if it is missing or unusable, which is logged."""
    path = attachment.info_file
    try:
        return files.read(path)
    except (CniError, OSError) as error:
        log.warning("network %s: its device-info is left out of the status: %s (%s)", attachment.name, error, path)
        return None


def _write_status(engine: Engine, pod: Pod, record: ContainerRecord, *, keep_trying: bool) -> str:
    """Write the network-status; return why that failed, empty if it did not."""
    written = entries(engine.device_files, shown(record))
    if not written:
        return ""
    try:
        with deadline.within(deadlines.NETWORK_STATUS_SECONDS):
            engine.cluster.write_network_status(pod, network_status.render(written), keep_trying=keep_trying)
    except (StatusWriteError, deadline.ExpiredError) as error:
        return str(error) or f"not written within {deadlines.NETWORK_STATUS_SECONDS:g} s"
    return ""


def _as_event(error: CniError, reason: str) -> tuple[str, str]:
    """Return reason and message of an Event; the reason is that of the error's kind, else `reason`."""
    if isinstance(error, StatusRequiredError):
        return NO_STATUS, str(error)
    if isinstance(error, UnsupportedArgError):
        return NOT_MET, str(error)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MissingDefinitionError):
            # Upstream's words first, which alerts match.
            return NO_NETWORK, f"{cause}: {error}"
        cause = cause.__cause__
    return reason, str(error)


def bring_up_to_date(engine: Engine, container_id: ContainerId) -> bool:
    """Write the network-status of the container's pod if it is missing or outdated; return False if it was right.

    Only the pod's newest container counts, and only with a complete record of this daemon. If the write fails, the
    store retries later. Blocks. Raises StoreUnavailableError, also if the node's pods are not known, StatusWriteError,
    CniError if the record cannot be read, deadline.ExpiredError.
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
    with _tried(record.pod):
        _bring_up_to_date(engine, record)


def after_change(engine: Engine, container_id: ContainerId, pod: Pod, record: ContainerRecord | None = None) -> None:
    """Write the network-status of a container whose networks have changed; a failure is logged, and the write retried.

    `record`: as on disk; None: read it, because the change failed. The status is always written, as the known
    annotation of the pod may be older than the last write. The caller holds the container's lock.
    """
    with _tried(pod):
        if record := record or engine.records.find(container_id, search=False):
            present = pod.annotations.get(network_status.ANNOTATION, "")
            engine.cluster.write_network_status(pod, _wanted(engine, pod, record) or present, keep_trying=True)


@contextlib.contextmanager
def _tried(pod: Pod | str) -> Iterator[None]:
    """Limit the time of the block, which writes the network-status; log its failure."""
    try:
        with deadline.within(deadlines.NETWORK_STATUS_SECONDS):
            yield
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
    log.info("network-status of pod %s differs from what is attached: writing it again", pod)
    engine.cluster.write_network_status(pod, wanted, keep_trying=True)
    return True


def _wanted(engine: Engine, pod: Pod, record: ContainerRecord) -> str | None:
    """Return the right value of the annotation; None if the pod has it, or if the namespace cannot be read."""
    listed = shown(record)
    own = entries(engine.device_files, (item for item in listed if not item.hot_plugged))
    hot_plugged = entries(engine.device_files, (item for item in listed if item.hot_plugged))
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
        log.debug(
            "network-status of pod %s is not changed, as namespace %s can't be read: %s",
            pod,
            record.sandbox.netns,
            error,
        )
        return None
    gone = {item.ifname for item in listed if not item.is_attached}
    wanted = network_status.brought_up_to_date(present, own, hot_plugged=hot_plugged, there=there, gone=gone)
    return None if wanted is None else network_status.render(wanted)
