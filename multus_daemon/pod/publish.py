"""What is told about an ADD: the pod's network-status, and Events. Events are never in the way of the ADD."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from multus_daemon import deadlines
from multus_daemon.pod import unsupported
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.networks import MissingDefinitionError
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


def attached(engine: Engine, pod: Pod, record: ContainerRecord, keep: Callable[[], None]) -> None:
    """The runtime's ADD has made `record`: network-status and events. `keep`, which stores it, goes on beside that.

    Raises StatusRequiredError (11), and what `keep` raises.
    """
    attachments = shown(record)
    problem = _write_status(engine, pod, attachments, keep)
    for attachment in attachments:
        if not attachment.hot_plugged:
            added(engine, pod, attachment)
    if problem:
        engine.cluster.event(pod, "Warning", NO_STATUS, f"network-status: {problem}")


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
        reason, message = _as_event(error, reason)
        more = f"; on the node, `multusctl explain {pod}` says more"
        engine.cluster.event(pod, "Warning", reason, message[: EVENT_MESSAGE_MAX - len(more)] + more)
        raise


def _write_status(engine: Engine, pod: Pod, attachments: list[Attachment], keep: Callable[[], None]) -> str:
    """Why the status is not written yet; empty where it is. Raises StatusRequiredError."""
    found = entries(attachments)
    if not found:
        keep()
        return ""
    required = engine.status_write == "required"
    try:
        with deadline.within(deadlines.NETWORK_STATUS_SECONDS):
            engine.cluster.write_network_status(pod, status.render(found), keep, keep_trying=not required)
    except (StatusWriteError, deadline.ExpiredError) as error:
        problem = str(error) or f"not written within {deadlines.NETWORK_STATUS_SECONDS:g} s"
        if required:
            raise StatusRequiredError(
                f"network-status can't be written: {problem} (pod {pod})",
                "statusWrite is 'required', so nothing stays attached",
            ) from error
        log.warning("network-status of pod %s: %s", pod, problem)
        return problem
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
