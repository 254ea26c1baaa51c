"""The one step that announces: the pod's network-status, Events, counts. What is announced is on disk.

Events never fail a request.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any, Final

from multus_daemon import deadlines
from multus_daemon.pod import unsupported
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.networks import MissingDefinitionError
from multus_daemon.pod.plan import PodPlan
from multus_daemon.pod.unsupported import Notice
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Pod
from multus_daemon.spec.cni.errors import CniError, TryAgainLaterError
from multus_daemon.spec.nad import status
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX, StatusWriteError

log = logging.getLogger(__name__)

# Reasons of Warning events. The first is upstream's, the third that of the hot-plug controller.
NO_NETWORK: Final = "NoNetworkFound"
INVALID: Final = "InvalidNetwork"
FAILED: Final = "FailedAddingInterface"
NO_STATUS: Final = "NetworkStatusNotWritten"


class StatusRequiredError(TryAgainLaterError):
    """The network-status must be written, and could not be."""


def required_status(engine: Engine, pod: Pod, record: ContainerRecord) -> None:
    """Write the network-status if an ADD must not succeed without it. Raises StatusRequiredError (11)."""
    if engine.status_write != "required":
        return
    if problem := _write_status(engine, pod, shown(record), keep_trying=False):
        raise StatusRequiredError(
            f"network-status can't be written: {problem} (pod {pod})",
            "statusWrite is 'required', so nothing stays attached",
        )


def attached(engine: Engine, pod: Pod, record: ContainerRecord) -> None:
    """Announce the runtime's ADD, whose record is on disk: network-status and Events. Nothing is undone any more."""
    attachments = shown(record)
    problem = ""
    if engine.status_write != "required":
        problem = _write_status(engine, pod, attachments, keep_trying=True)
    for attachment in attachments:
        if not attachment.hot_plugged:
            added(engine, pod, attachment)
    if problem:
        log.warning("network-status of pod %s: %s", pod, problem)
        engine.cluster.event(pod, "Warning", NO_STATUS, f"network-status: {problem}")


def notices(engine: Engine, pod: Pod, found: Iterable[Notice]) -> None:
    """Report what the pod's author should know although nothing fails: a line in the log, an Event, a count."""
    for notice in found:
        log.warning("%s", notice.text)
        if notice.key:
            engine.count_unsupported_arg(notice.key)
        engine.cluster.event(pod, "Warning", notice.reason, notice.text)


def refusal(engine: Engine, plan: PodPlan) -> None:
    """Report the refusal of the plan as a Warning. Raises it."""
    assert plan.refusal is not None, "a plan that is refused"
    with telling_of_failure(engine, plan.pod, INVALID if plan.is_invalid else FAILED):
        raise plan.refusal


def shown(record: ContainerRecord) -> list[Attachment]:
    """What the network-status has entries for, in its order."""
    # An auxiliary chain has no interface of its own, so there is nothing to tell of it.
    found = [attachment for attachment in record.attachments if not attachment.auxiliary]
    # Clients take the first entry for the cluster network's.
    return sorted(found, key=lambda attachment: attachment.hot_plugged)


def entries(attachments: Iterable[Attachment]) -> list[dict[str, Any]]:
    """The network-status of those that are attached."""
    return [
        entry
        for item in attachments
        if item.result is not None
        for entry in status.entries_for(
            item.name,
            item.ifname,
            item.result,
            cluster_network=item.cluster_network,
            device_info=item.device_info,
            default_route=item.default_route,
        )
    ]


def added(engine: Engine, pod: Pod, attachment: Attachment) -> None:
    """One network is attached: an event, in upstream's words."""
    result = attachment.result
    if result and (result.interfaces or result.ips):
        addresses = " ".join(ip.address for ip in result.ips)
        message = f"Add {attachment.ifname} [{addresses}] from {attachment.name}"
        engine.cluster.event(pod, "Normal", "AddedInterface", message[:EVENT_MESSAGE_MAX])


@contextlib.contextmanager
def telling_of_failure(engine: Engine, pod: Pod, reason: str) -> Iterator[None]:
    """A CniError that ends the block becomes one Warning; `reason` is its reason where the cause has none."""
    try:
        yield
    except CniError as error:
        if isinstance(error, unsupported.UnsupportedArgError):
            engine.count_unsupported_arg(error.key)
        reason, message = _as_event(error, reason)
        more = f"; on the node, `multusctl explain {pod}` says more"
        engine.cluster.event(pod, "Warning", reason, message[: EVENT_MESSAGE_MAX - len(more)] + more)
        raise


def _write_status(engine: Engine, pod: Pod, attachments: list[Attachment], *, keep_trying: bool) -> str:
    """Write the network-status of what is attached; return why that failed, empty if it did not."""
    found = entries(attachments)
    if not found:
        return ""
    try:
        with deadline.within(deadlines.NETWORK_STATUS_SECONDS):
            engine.cluster.write_network_status(pod, status.render(found), keep_trying=keep_trying)
    except (StatusWriteError, deadline.ExpiredError) as error:
        return str(error) or f"not written within {deadlines.NETWORK_STATUS_SECONDS:g} s"
    return ""


def _as_event(error: CniError, reason: str) -> tuple[str, str]:
    """Reason and message; a cause that has a reason of its own goes before `reason`."""
    if isinstance(error, StatusRequiredError):
        return NO_STATUS, str(error)
    if isinstance(error, unsupported.UnsupportedArgError):
        return unsupported.EVENT, str(error)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MissingDefinitionError):
            # Upstream's words, which people's alerts look for; then what everybody else is told.
            return NO_NETWORK, f"{cause}: {error}"
        cause = cause.__cause__
    return reason, str(error)
