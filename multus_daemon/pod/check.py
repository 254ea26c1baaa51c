"""CHECK for networks of a container: the kernel must still have what ADD made.

CRI-O calls CHECK in every pod start. So it runs no binary without `strictCheck`: `node.keep` runs the CHECK of binaries
later. If the kernel has everything, a built-in's failing CHECK is no error: another plugin may have moved a route.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins import compare
from multus_daemon.pod import publish
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.request import CniRequest
from multus_daemon.runtime import timeline
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni import versions
from multus_daemon.spec.cni.errors import (
    ChangedError,
    CniError,
    InvalidNetnsError,
    Origin,
    UnknownContainerError,
    about_pod,
)

log = logging.getLogger(__name__)

EVENT: Final = "NetworkCheckFailed"


def check(engine: Engine, request: CniRequest) -> None:
    """Compare each attachment of the container with the kernel, in order. Raises the first failure as CniError."""
    with engine.serving(request) as netns:
        with timeline.stage("record"):
            record = engine.records.find(request.container_id, search=True)
        if record is None:
            raise UnknownContainerError(
                f"container {request.container_id} has no record",
                f"pod {request.args.namespace}/{request.args.name}: no ADD has succeeded",
            )
        if not record.complete:
            raise UnknownContainerError(
                f"pod {record.pod}: ADD of container {request.container_id} never finished",
                remedy="delete the pod, so that the runtime makes a new container",
                origin=Origin.CALL,
            )
        strict = engine.net_conf(request.stdin).strict_check
        check_some(engine, record, announced(record), netns, strict=strict)


def announced(record: ContainerRecord) -> list[Attachment]:
    """Return the attachments that a client knows: without a hot-plug that a crash cut off, and without leaving ones."""
    return [item for item in record.attachments if item.is_attached or not (item.hot_plugged or item.leaving)]


def check_some(
    engine: Engine, record: ContainerRecord, attachments: Sequence[Attachment], netns: PodNetns, *, strict: bool
) -> None:
    """Check these `attachments`; `strict`: run binaries too, fail if only a plugin's CHECK fails. Raises CniError."""
    for failure in failures(engine, record, attachments, netns, strict=strict):
        if strict or failure.is_certain:
            raise failure.error
        text = (
            f"CHECK of network {failure.attachment.name}, interface {failure.attachment.ifname}, failed, but the "
            f"kernel has what the ADD made, so the pod goes on: {failure.error}"
        )
        log.warning("container %s of pod %s: %s", record.sandbox.container_id, record.pod, text)
        engine.metrics.check_failures.inc()
        with timeline.stage("publish"):
            publish.about_record(engine.cluster, record, EVENT, text)


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed CHECK of an attachment."""

    attachment: Attachment
    error: CniError
    is_certain: bool
    """False if only a plugin's CHECK failed, and the kernel has what the ADD made."""


def failures(
    engine: Engine, record: ContainerRecord, attachments: Sequence[Attachment], netns: PodNetns, *, strict: bool
) -> Iterator[Failure]:
    """Yield each failure of these `attachments`; `strict`: also run the CHECK of binaries.

    Raises InvalidNetnsError (8) if `netns` is not the container's.
    """
    if problem := netns.problem:
        raise InvalidNetnsError(f"{netns.path} {problem}", f"pod {record.pod}: CNI_NETNS must be a network namespace")
    if netns.is_elsewhere(record.netns_id):
        raise InvalidNetnsError(
            f"{netns.path} is not the network namespace of container {record.sandbox.container_id}", f"pod {record.pod}"
        )
    sandbox = Sandbox(record.sandbox.container_id, netns.path)
    for attachment in attachments:
        if attachment.config.disable_check:
            continue
        with timeline.stage("plugin"):
            try:
                missing = next((item.text for item in compare.missing(attachment, netns)), "")
            except OSError as refusal:
                missing = f"{netns.path} can't be looked into: {refusal}"
        try:
            if strict or attachment.is_built_in:
                with timeline.stage("plugin"):
                    _ask_plugins(engine, sandbox, attachment, netns)
        except CniError as failure:
            # With built-ins alone, nothing can have moved what their CHECK looks for.
            is_ours = attachment.is_built_in and attachment.observed is None
            is_certain = bool(missing) or attachment.result is None or is_ours
            yield Failure(attachment, about_pod(failure, record.pod, attachment.name), is_certain)
        else:
            if missing:
                place = f'network="{attachment.name}" interface="{attachment.ifname}", CHECK'
                error = ChangedError(
                    f"{missing} ({place}) (pod {record.pod})",
                    remedy="something has removed it since the ADD; delete the pod, so that it is made again",
                )
                yield Failure(attachment, error, True)


def _ask_plugins(engine: Engine, sandbox: Sandbox, attachment: Attachment, netns: PodNetns) -> None:
    """Run CHECK of the plugins if the cniVersion has it. Raises CniError, but not for a plugin without CHECK."""
    if not versions.at_least(attachment.config.cni_version, "0.4.0"):
        return
    try:
        engine.runner.check(sandbox, attachment, netns)
    except CniError as error:
        if not compare.NOT_IMPLEMENTED.search(error.msg):
            raise
        log.debug("CHECK of network %s: %s", attachment.name, error)
