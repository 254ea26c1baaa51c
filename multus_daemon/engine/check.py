"""CHECK for networks of a container, against what ADD made of them."""

from __future__ import annotations

from collections.abc import Sequence

from multus_daemon.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.cni import versions
from multus_daemon.cni.errors import CniError, InternalError, InvalidNetnsError, UnknownContainerError
from multus_daemon.engine import records
from multus_daemon.engine.engine import Engine
from multus_daemon.engine.request import CniRequest


def check(engine: Engine, request: CniRequest) -> None:
    """Run CHECK for each attachment of the container in order; the first failure ends it. Raises CniError."""
    engine.links.allow_own_netns(request.netns_override)
    with engine.locks.hold(request.container_id):
        record = records.find(engine, request.container_id, search=True)
        if record is None:
            raise UnknownContainerError(
                f"container {request.container_id} has no networks here",
                f"pod {request.args.namespace}/{request.args.name}: no ADD is on record",
            )
        if not record.complete:
            raise UnknownContainerError(
                f"pod {record.pod}: ADD of container {request.container_id} never finished",
                "delete the container and add it anew",
            )
        check_some(engine, record, told_of(record), request.netns)


def told_of(record: ContainerRecord) -> list[Attachment]:
    """The attachments that somebody was told of.

    A crash can have cut off the ADD of a network to the running container: nobody was told that it is there.
    """
    return [item for item in record.attachments if item.result is not None or not item.hot_plugged]


def check_some(engine: Engine, record: ContainerRecord, attachments: Sequence[Attachment], netns: str) -> None:
    """Run CHECK for these `attachments` of the record. Raises CniError."""
    if problem := engine.links.netns_problem(netns):
        raise InvalidNetnsError(f"{netns} {problem}", f"pod {record.pod}: CNI_NETNS must be one")
    if engine.links.is_elsewhere(netns, record.netns_id):
        raise InvalidNetnsError(
            f"{netns} is not the network namespace of container {record.sandbox.container_id}", f"pod {record.pod}"
        )
    sandbox = Sandbox(record.sandbox.container_id, netns)
    for attachment in attachments:
        try:
            if versions.allows(attachment.config.cni_version, "CHECK"):
                engine.runner.check(sandbox, attachment)
            else:
                _compare(engine, sandbox, attachment)
        except CniError as error:
            raise error.with_context(f"pod {record.pod}") from error


def _compare(engine: Engine, sandbox: Sandbox, attachment: Attachment) -> None:
    """CHECK of a network of before 0.4.0, whose plugins know no such verb: the kernel against the result on record.

    A device in user space has no interface that could be looked for. Raises InternalError.
    """
    if attachment.config.disable_check or attachment.result is None or attachment.device_id:
        return
    try:
        problem = engine.links.first_missing(sandbox.netns, attachment.ifname, attachment.result)
    except OSError as error:
        problem = f"{sandbox.netns} can't be looked into: {error}"
    if problem:
        raise InternalError(
            f'{problem} (network="{attachment.name}" interface="{attachment.ifname}", CHECK)',
            "something has taken it away since the ADD; delete the pod and let it be made again",
        )
