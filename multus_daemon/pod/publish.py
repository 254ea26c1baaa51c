"""The one step that announces: the pod's network-status, Events, counts. The record is on disk before.

Events never fail a request.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, Final

from multus_daemon import deadlines
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.networks import MissingDefinitionError
from multus_daemon.pod.request import CniRequest
from multus_daemon.pod.unsupported import EVENT as NOT_MET
from multus_daemon.pod.unsupported import Notice, UnsupportedArgError
from multus_daemon.runtime import deadline
from multus_daemon.runtime.timeline import Timeline
from multus_daemon.spec import claims
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Pod, Sandbox
from multus_daemon.spec.cni.errors import CniError, TryAgainLaterError
from multus_daemon.spec.cni.remedies import HANGS, MORE
from multus_daemon.spec.nad import network_status
from multus_daemon.spec.nad.device_info import DeviceInfo
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX, DeviceFiles, Events, StatusWriteError

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


class StatusRequiredError(TryAgainLaterError):
    """The network-status must be written, and could not be."""


def required_status(engine: Engine, pod: Pod, record: ContainerRecord) -> None:
    """Write the network-status if an ADD must not succeed without it. Raises StatusRequiredError (11)."""
    if engine.policy.status_write == "required" and (problem := _write_status(engine, pod, record, keep_trying=False)):
        raise StatusRequiredError(
            f"network-status can't be written: {problem} (pod {pod})",
            "statusWrite is 'required', so nothing stays attached",
        )


def attached(engine: Engine, pod: Pod, record: ContainerRecord) -> None:
    """Announce the runtime's ADD, whose record is on disk: network-status and Events."""
    problem = ""
    if engine.policy.status_write != "required":
        problem = _write_status(engine, pod, record, keep_trying=True)
    for attachment in shown(record):
        if not attachment.hot_plugged:
            added(engine.cluster, pod, attachment)
    if problem:
        log.warning("network-status of pod %s: %s", pod, problem)
        engine.cluster.event(pod, "Warning", NO_STATUS, f"network-status: {problem}")


def added(events: Events, pod: Pod, attachment: Attachment) -> None:
    """Send the Event that one network is attached, in upstream's words."""
    result = attachment.result
    if result and (result.interfaces or result.ips):
        addresses = " ".join(ip.address for ip in result.ips)
        message = f"Add {attachment.ifname} [{addresses}] from {attachment.name}"
        events.event(pod, "Normal", "AddedInterface", message[:EVENT_MESSAGE_MAX])


def plugged(events: Events, pod: Pod, made: Iterable[Attachment]) -> None:
    """Send an Event for each network that a running pod has got."""
    for item in made:
        addresses = " ".join(ip.address for ip in item.result.ips) if item.result else ""
        message = f"network {item.name}, interface {item.ifname}, is attached [{addresses}]"
        events.event(pod, "Normal", PLUGGED, message[:EVENT_MESSAGE_MAX])


def detached(events: Events, pod: Pod, gone: Iterable[Attachment]) -> None:
    """Send an Event for each network that a running pod has lost, because it asks for it no more."""
    for item in gone:
        events.event(pod, "Normal", UNPLUGGED, f"network {item.name}, interface {item.ifname}, is detached")


def notices(engine: Engine, pod: Pod, found: Iterable[Notice]) -> None:
    """Report warnings for the pod's author, although nothing fails: a line in the log, an Event, a count."""
    for notice in found:
        log.warning("%s", notice.text)
        if notice.key:
            engine.metrics.unmet_request(notice.key)
        engine.cluster.event(pod, "Warning", notice.reason, notice.text)


@contextlib.contextmanager
def failures(engine: Engine, pod: Pod, sandbox: Sandbox) -> Iterator[None]:
    """Report a CniError of the block as the failure of an ADD."""
    try:
        yield
    except CniError as error:
        failure(engine, pod, error, FAILED, sandbox)
        raise


def failure(engine: Engine, pod: Pod, error: CniError, reason: str, sandbox: Sandbox) -> None:
    """Report the failure of an ADD as one Warning; `reason` is used if the cause has none of its own.

    Kubernetes counts Events together only if their texts are equal, and each try has a container of its own.
    """
    if isinstance(error, UnsupportedArgError):
        engine.metrics.unmet_request(error.key)
    reason, message = _as_event(error, reason)
    for own, name in (
        (sandbox.netns, "the pod's network namespace"),
        (f"container {sandbox.container_id}", "the container"),
    ):
        message = message.replace(own, name) if own else message
    more = f"{MORE}{engine.policy.explain} {pod}"
    engine.cluster.event(pod, "Warning", reason, message[: EVENT_MESSAGE_MAX - len(more)] + more)


def slow(engine: Engine, request: CniRequest, timeline: Timeline) -> None:
    """Send a Warning that an ADD still runs, and in which plugin: it fails minutes later. Runs on the event loop."""
    pod = Pod(request.args.namespace, request.args.name, request.args.uid)
    for what, (began, limit) in tuple(timeline.doing.items()):
        text = f"{what} has run for {time.time() - began:.0f} s and is ended after {limit:.0f} s (pod {pod}); {HANGS}"
        engine.cluster.event(pod, "Warning", SLOW, text[:EVENT_MESSAGE_MAX])


def devices(engine: Engine, record: ContainerRecord, changed: Iterable[Attachment]) -> None:
    """Report the devices of the ResourceClaims of `changed`, as the record has them.

    What another container of the pod has of a claim stays reported: an earlier one may be deleted late.
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
    """Send one Warning about the record's pod; about the node if the pod is not known."""
    pod = Pod(record.pod_namespace, record.pod_name, record.pod_uid)
    if pod.name:
        events.event(pod, "Warning", reason, text[:EVENT_MESSAGE_MAX])
    else:
        message = f"container {record.sandbox.container_id}: {text}"
        events.node_event("Warning", reason, message[:EVENT_MESSAGE_MAX])


def shown(record: ContainerRecord) -> list[Attachment]:
    """Return the attachments with entries in the network-status, in its order: the cluster network first.

    An auxiliary chain has no interface of its own, so it has no entry.
    """
    return sorted((item for item in record.attachments if not item.auxiliary), key=attrgetter("hot_plugged"))


def entries(files: DeviceFiles, attachments: Iterable[Attachment]) -> list[dict[str, Any]]:
    """Return the network-status of those that are attached, with their device-info."""
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


def _device_info(files: DeviceFiles, attachment: Attachment) -> DeviceInfo | None:
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
    """Return reason and message; a cause with a reason of its own wins over `reason`."""
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
