"""The records of containers: reading them, writing what is left of one, and the lock of a container that is free."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from multus_daemon.kernel.ops import PodNetns
from multus_daemon.pod.engine import Engine
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Pod
from multus_daemon.spec.cni.errors import IoFailureError
from multus_daemon.spec.cni.names import ContainerId, IfName
from multus_daemon.spec.ports import CorruptRecordError

log = logging.getLogger(__name__)


def find(engine: Engine, container_id: ContainerId, *, search: bool) -> ContainerRecord | None:
    """The container's record; `search`: what another daemon left too, where it takes a search through its files.

    Raises IoFailureError (5) where what there is can't be read: nothing may be lost then.
    """
    try:
        damage: CorruptRecordError | None = None
        record: ContainerRecord | None = None
        try:
            # An ADD will write there, and waits for the disk as long as it may. A DEL may have nothing to write, so it
            # reads in a thread beside its own, where the disk is needed for it: that thread is 0.5 ms.
            load = functools.partial(engine.store.load, container_id)
            if search:
                record = engine.store.load_at_once(container_id) or engine.reads.of(container_id, load)
            else:
                record = load()
        except CorruptRecordError as error:
            damage = error
        if damage or (record.foreign if record else search):
            record = engine.reads.of(container_id, engine.store.recover, container_id) or record
        if damage and record is None:
            raise damage
    except CorruptRecordError as error:
        raise IoFailureError(
            f"record of container {container_id} is damaged: {error}",
            f"free by hand what it held, then: multusctl attachments forget {container_id}",
        ) from error
    except OSError as error:
        raise IoFailureError(f"record of container {container_id} can't be read: {error}") from error
    if damage:
        log.warning("record of container %s is taken from elsewhere: %s", container_id, damage)
    return record


def without(engine: Engine, record: ContainerRecord, done: Collection[Attachment]) -> ContainerRecord | None:
    """Write the record without what of it is `done`, or remove it with the last. Raises IoFailureError (5)."""
    # The same objects: to compare what they hold, each with each, takes minutes where a pod has many.
    gone = {id(item) for item in done}
    rest = replace(record, attachments=tuple(item for item in record.attachments if id(item) not in gone))
    try:
        if rest.attachments:
            engine.store.save(rest)
            return rest
        remove(engine, record.sandbox.container_id)
        return None
    except OSError as error:
        raise IoFailureError(
            f"record of container {record.sandbox.container_id} can't be "
            f"{'written' if rest.attachments else 'removed'}: {error}"
        ) from error


def remove(engine: Engine, container_id: ContainerId) -> None:
    """Remove the container's record. Raises OSError."""
    engine.store.remove(container_id)
    engine.occupants.leave(container_id)


def read(engine: Engine, container_ids: Sequence[ContainerId]) -> dict[ContainerId, ContainerRecord | None]:
    """Our own records of the containers; of a damaged one, what is known from elsewhere, None if nothing. Blocks.

    Raises OSError.
    """
    found: dict[ContainerId, ContainerRecord | None] = {}
    for container_id in container_ids:
        try:
            record = engine.store.load(container_id)
        except CorruptRecordError as damage:
            log.debug("%s", damage)
            found[container_id] = _recovered(engine, container_id)
        else:
            if record is not None and not record.foreign:
                found[container_id] = record
    return found


def read_all(engine: Engine) -> dict[ContainerId, ContainerRecord | None]:
    """As `read`, of every container of ours."""
    return read(engine, engine.store.containers(foreign=False))


def _recovered(engine: Engine, container_id: ContainerId) -> ContainerRecord | None:
    try:
        return engine.store.recover(container_id)
    except CorruptRecordError:
        return None


def is_of(record: ContainerRecord, pod: Pod) -> bool:
    """Whether the record is the pod's. Of a static pod the API has a UID of its own."""
    if (record.pod_namespace, record.pod_name) != (pod.namespace, pod.name):
        return False
    return not record.pod_uid or record.pod_uid == pod.uid or pod.is_static


def is_elsewhere(engine: Engine, record: ContainerRecord, path: str) -> bool:
    """Report whether it is certain that another container's namespace is at the path."""
    if not engine.links.is_netns(path):
        return False
    with engine.links.open(path) as netns:
        return netns.is_elsewhere(record.netns_id)


@contextlib.contextmanager
def own_netns(
    engine: Engine, record: ContainerRecord, netns: PodNetns, leaving: Collection[IfName]
) -> Iterator[PodNetns]:
    """Yield the container's namespace, opened anew: at the path of `netns`, or at the path on record.

    Its path is empty if another container, or nothing, is at both: plugins must touch no namespace then. The locks of
    both paths are held for the duration of the block, so no ADD begins there. `leaving`: see `PodNetns`. Raises
    IoFailureError (5).
    """
    known = record.sandbox.netns
    with contextlib.ExitStack() as stack:
        for path in sorted({netns.path, known} - {""}) if netns.path else ():
            stack.enter_context(engine.locks.hold(path))
        own = stack.enter_context(netns.at(netns.path, leaving))
        if own.path and own.is_elsewhere(record.netns_id):
            own = stack.enter_context(netns.at(known, leaving))
            is_known = record.netns_id and own.exists and not own.is_elsewhere(record.netns_id)
            own = own if is_known else stack.enter_context(netns.at(""))
        if own.path and _is_followed(engine, record, own.path):
            own = stack.enter_context(netns.at(""))
        if netns.path and not own.path:
            log.warning(
                "container %s of pod %s: %s is not its network namespace any more; what it has on the host is deleted",
                record.sandbox.container_id,
                record.pod,
                netns.path,
            )
            engine.count_replaced_netns()
        yield own


def _is_followed(engine: Engine, record: ContainerRecord, path: str) -> bool:
    """Report whether a newer container uses the namespace at the path. Raises IoFailureError (5)."""
    occupants = engine.occupants
    try:
        if not occupants.is_complete:
            engine.reads.of(("occupants",), lambda: _fill(engine))
        others = [key for key in sorted(occupants.at(path)) if key != record.sandbox.container_id]
        found = engine.reads.of(("occupants",), functools.partial(read, engine, others)) if others else {}
    except OSError as error:
        raise IoFailureError(f"records of containers can't be read: {error}") from error
    return not without_followed(record.in_netns(path), filter(None, found.values())).sandbox.netns


def _fill(engine: Engine) -> None:
    def netns_of(container_id: ContainerId) -> str:
        # Nearly always the kernel has the record in memory.
        record = engine.store.load_at_once(container_id) or read(engine, [container_id]).get(container_id)
        return record.sandbox.netns if record else ""

    engine.occupants.fill(lambda: engine.store.containers(foreign=False), netns_of)


def without_followed(record: ContainerRecord, records: Iterable[ContainerRecord]) -> ContainerRecord:
    """The record, without its namespace where one of `records` is of a container that has taken its place there.

    Names of namespaces are used again by who chooses them; a DEL in it would strip the newer container. That one has an
    interface of the same name: its ADD would have been refused had the older one still been there.
    """
    own = _ifnames(record)
    for other in records:
        is_other = other.sandbox.container_id != record.sandbox.container_id
        is_newer = other.sandbox.netns == record.sandbox.netns and other.created > record.created
        if is_other and is_newer and own & _ifnames(other):
            return record.in_netns("")
    return record


def _ifnames(record: ContainerRecord) -> set[str]:
    return {attachment.ifname for attachment in record.attachments if not attachment.auxiliary}


@contextlib.contextmanager
def held_if_free(engine: Engine, container_id: ContainerId) -> Iterator[bool]:
    """Hold the container's lock for the duration of the block, without waiting for it; False where it is not free.

    Whoever has it is about to add or delete the container, which is then no business of ours, and may take long.
    """
    with contextlib.ExitStack() as stack:
        is_free = True
        try:
            with deadline.within(0):
                stack.enter_context(engine.locks.hold(container_id))
        except deadline.ExpiredError:
            is_free = False
        yield is_free
