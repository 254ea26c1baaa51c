"""CHECK for networks of a container: the kernel must have what ADD left.

The plugins are asked too, but one whose CHECK fails right after a good ADD must not stop a pod that starts: CRI-O calls
CHECK in every pod start, and plugins such as sbr move routes that the CHECK of an earlier plugin misses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.compare import NOT_IMPLEMENTED
from multus_daemon.pod import publish
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.request import CniRequest
from multus_daemon.runtime import timeline
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni import versions
from multus_daemon.spec.cni.errors import CniError, InternalError, InvalidNetnsError, UnknownContainerError
from multus_daemon.spec.cni.remedies import about_pod

log = logging.getLogger(__name__)

EVENT: Final = "NetworkCheckFailed"


def check(engine: Engine, request: CniRequest) -> None:
    """Compare each attachment of the container with the kernel, in order. Raises CniError: the first failure."""
    with engine.serving(request) as netns:
        with timeline.stage("record"):
            record = engine.records.find(request.container_id, search=True)
        if record is None:
            raise UnknownContainerError(
                f"container {request.container_id} is not on record",
                f"pod {request.args.namespace}/{request.args.name}: no ADD is on record",
            )
        if not record.complete:
            raise UnknownContainerError(
                f"pod {record.pod}: ADD of container {request.container_id} never finished",
                "delete the container and add it anew",
            )
        strict = engine.policy.net_conf(request.stdin).strict_check
        check_some(engine, record, announced(record), netns, strict=strict)


def announced(record: ContainerRecord) -> list[Attachment]:
    """Return the attachments that a client knows of: of no hot-plug that a crash cut off, nor of what is leaving."""
    return [item for item in record.attachments if item.is_attached or not (item.hot_plugged or item.leaving)]


def check_some(
    engine: Engine, record: ContainerRecord, attachments: Sequence[Attachment], netns: PodNetns, *, strict: bool
) -> None:
    """Check these `attachments`; `strict`: fail if only a plugin fails. Raises CniError."""
    for failure in failures(engine, record, attachments, netns):
        if strict or failure.is_certain:
            raise failure.error
        text = (
            f"CHECK of network {failure.attachment.name}, interface {failure.attachment.ifname}, failed, but the "
            f"kernel has what the ADD made, so the pod goes on: {failure.error}"
        )
        log.warning("container %s of pod %s: %s", record.sandbox.container_id, record.pod, text)
        engine.metrics.check_failed()
        with timeline.stage("publish"):
            publish.about_record(engine.cluster, record, EVENT, text)


@dataclass(frozen=True, slots=True)
class Failure:
    """A CHECK of an attachment that failed."""

    attachment: Attachment
    error: CniError
    is_certain: bool
    """False if a plugin failed and the kernel has what the ADD made."""


def failures(
    engine: Engine, record: ContainerRecord, attachments: Sequence[Attachment], netns: PodNetns
) -> Iterator[Failure]:
    """Yield what is wrong with these `attachments`. Raises InvalidNetnsError (8) if `netns` is not the container's."""
    if problem := netns.problem:
        raise InvalidNetnsError(f"{netns.path} {problem}", f"pod {record.pod}: CNI_NETNS must be one")
    if netns.is_elsewhere(record.netns_id):
        raise InvalidNetnsError(
            f"{netns.path} is not the network namespace of container {record.sandbox.container_id}", f"pod {record.pod}"
        )
    sandbox = Sandbox(record.sandbox.container_id, netns.path)
    for attachment in attachments:
        if attachment.config.disable_check:
            continue
        with timeline.stage("plugin"):
            missing = _missing(attachment, netns)
        try:
            with timeline.stage("plugin"):
                _ask_plugins(engine, sandbox, attachment, netns)
        except CniError as failure:
            # With built-ins alone, nothing can have moved what their CHECK looks for.
            is_certain = bool(missing) or attachment.result is None or _is_ours(attachment)
            yield Failure(attachment, about_pod(failure, record.pod), is_certain)
        else:
            if missing:
                place = f'network="{attachment.name}" interface="{attachment.ifname}", CHECK'
                error = InternalError(
                    f"{missing} ({place}) (pod {record.pod})",
                    "something has taken it away since the ADD; delete the pod and let it be made again",
                )
                yield Failure(attachment, error, True)


def _missing(attachment: Attachment, netns: PodNetns) -> str:
    """Return the part of the ADD's result that the kernel lacks; empty if everything is there."""
    expected = attachment.observed or attachment.result
    if expected is None:
        return ""
    if _is_ours(attachment) and not any(item.sandbox for item in expected.interfaces):
        # An IPAM plugin alone: its addresses are on no interface.
        return ""
    if attachment.observed is None and not attachment.is_built_in:
        if attachment.device_id:
            # A device in user space has no interface.
            return ""
        # Another daemon, or an older one, ran the ADD: the plugins may have moved the routes of the result on purpose.
        if _has_check(attachment):
            expected = replace(expected, routes=())
    try:
        return netns.first_missing(attachment.ifname, expected, observed=attachment.observed is not None)
    except OSError as error:
        return f"{netns.path} can't be looked into: {error}"


def _is_ours(attachment: Attachment) -> bool:
    """Return True if built-ins alone served the pod's ADD, and none changes what another has made."""
    return attachment.is_built_in and attachment.observed is None


def _has_check(attachment: Attachment) -> bool:
    return versions.at_least(attachment.config.cni_version, "0.4.0")


def _ask_plugins(engine: Engine, sandbox: Sandbox, attachment: Attachment, netns: PodNetns) -> None:
    """Run CHECK of the plugins if the cniVersion has it. Raises CniError; a plugin without CHECK is no failure."""
    if not _has_check(attachment):
        return
    try:
        engine.runner.check(sandbox, attachment, netns)
    except CniError as error:
        if not NOT_IMPLEMENTED.search(error.msg):
            raise
        log.debug("CHECK of network %s: %s", attachment.name, error)
