"""ADD: all networks of a pod, or none and the reason. And `attached`, by which networks come to a container."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from multus_daemon import deadlines
from multus_daemon.kernel.ops import PodNetns
from multus_daemon.pod import detach, devices, gateway, publish, records, schedule, statuses, unsupported
from multus_daemon.pod.engine import INDICATOR_GATE, Engine
from multus_daemon.pod.gather import find_pod, gather
from multus_daemon.pod.plan import PodPlan, plan_pod
from multus_daemon.pod.request import CniRequest
from multus_daemon.runtime import deadline, timeline
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni.errors import (
    CniError,
    InternalError,
    InvalidEnvironmentError,
    InvalidNetnsError,
    InvalidNetworkConfigError,
    IoFailureError,
    TryAgainLaterError,
)
from multus_daemon.spec.cni.result import Result

log = logging.getLogger(__name__)


def add(engine: Engine, request: CniRequest) -> Result:
    """Attach every network of the pod; the cluster network's result. Raises CniError.

    A repeated ADD for a container that lives returns what the first one did and touches nothing but the
    network-status, where that does not tell of it.
    """
    container_id = request.container_id
    with (
        engine.locks.hold(container_id),
        engine.links.open(request.netns, may_be_own=request.netns_override) as netns,
    ):
        engine.adds.begins(container_id)
        record = records.find(engine, container_id, search=False)
        hot_plugged: tuple[Attachment, ...] = ()
        if record is not None:
            if _lives(engine, record, netns, request.ifname):
                log.info("ADD of container %s repeated: the stored result is returned", container_id)
                statuses.after_repeated_add(engine, record)
                return _cluster_result(record)
            hot_plugged = detach.detach_leftover(engine, record, netns)
        if reason := engine.gates.closed.get(INDICATOR_GATE):
            raise TryAgainLaterError(reason)
        net_conf = engine.net_conf(request.stdin)
        pod = find_pod(engine, request.args)
        plan = plan_pod(request, gather(engine, pod, net_conf), engine.runner, engine.device_files)
        publish.notices(engine, pod, plan.notices)
        if plan.refusal:
            publish.refusal(engine, plan)
        timeline.note(f"networks: {', '.join(item.name for item in plan.attachments)}")
        base = ContainerRecord(
            sandbox=request.sandbox,
            ifname=request.ifname,
            pod_namespace=pod.namespace,
            pod_name=pod.name,
            pod_uid=request.args.uid or pod.uid,
            attachments=hot_plugged,
            created=engine.clock(),
        )
        with (
            publish.telling_of_failure(engine, pod, publish.FAILED),
            attached(engine, base, plan, netns, completes=True) as made,
        ):
            notices = unsupported.after_add(pod, made.record.attachments, strict=net_conf.strict_requests)
            keep(engine, made)
            timeline.note("results recorded")
            publish.required_status(engine, pod, made.record)
        publish.notices(engine, pod, notices)
        publish.attached(engine, pod, made.record)
        timeline.note("network-status handed over")
        return _cluster_result(made.record)


def _lives(engine: Engine, record: ContainerRecord, netns: PodNetns, ifname: str) -> bool:
    """True where the record is that of a finished ADD whose interfaces are all still there."""
    if not record.complete or record.sandbox.netns != netns.path or not netns.exists:
        return False
    if netns.is_elsewhere(record.netns_id):
        return False
    if record.ifname != ifname:
        raise InvalidEnvironmentError(
            f"CNI_IFNAME is {ifname!r}, and container {record.sandbox.container_id} has its cluster network on "
            f"{record.ifname!r}",
            f"pod {record.pod}",
        )
    # What was added to the running container comes and goes by itself.
    return interfaces_live(netns, [item for item in record.attachments if not item.hot_plugged])


def interfaces_live(netns: PodNetns, attachments: Iterable[Attachment]) -> bool:
    """True where the namespace has every interface that the ADDs of `attachments` have reported to be in it.

    Raises InvalidNetnsError if the namespace can't be entered.
    """
    made = [attachment.ifname for attachment in attachments if attachment.has_interface]
    try:
        return netns.existing(made) == made
    except OSError as error:
        raise InvalidNetnsError(f"{netns.path} can't be entered: {error}") from error


def _cluster_result(record: ContainerRecord) -> Result:
    """The cluster network's result; where none is known as that (upstream's files), the first network's."""
    attachments = sorted(record.attachments, key=lambda attachment: not attachment.cluster_network)
    return (attachments[0].result if attachments else None) or Result()


@dataclass(frozen=True, slots=True)
class Made:
    """What `attached` has come to."""

    record: ContainerRecord
    """With every result in it."""
    changed: tuple[Attachment, ...]
    """Those of it whose results are not where libcni has them, or others than there."""


@contextlib.contextmanager
def attached(
    engine: Engine, base: ContainerRecord, plan: PodPlan, netns: PodNetns, *, completes: bool
) -> Iterator[Made]:
    """Run ADD for each network of the plan, then the block with what came of it, which the block is to `keep`.

    Those that have nothing to do with each other run side by side (`pod.schedule`); whatever is told and kept
    has the order of the list. The caller holds the container's lock.

    `base` is the record without them; `completes` says that with them the runtime's ADD is complete. The write-ahead
    record is on disk before the first plugin runs, so that a DEL after a crash at any point finds what there may be to
    undo. At the end of the runtime's ADD default routes come to where they were asked for.

    Where a plugin or the block fails, interruption included, what was begun is undone in reverse, the attachment
    that failed included, and the record is `base` again (none if that holds nothing), unless some undoing failed.
    Raises CniError, that of the first in the list that failed, and what the block raises.
    """
    undo_failed: list[str] = []
    sandbox = Sandbox(base.sandbox.container_id, netns.path)
    in_all = len(base.attachments) + len(plan.networks)
    new = [replace(attachment, networks=in_all) for attachment in plan.attachments]
    with engine.locks.hold(netns.path), contextlib.ExitStack() as undo:
        netns_id = _require_room(engine, base, new, netns)
        base = replace(base, netns_id=base.netns_id or netns_id)
        # As it is then: with the default routes moved, results in `base` are others too.
        undo.callback(lambda: _put_back(engine, base, undo_failed))
        _save(engine, replace(base, attachments=(*base.attachments, *new)))
        timeline.note("planned and recorded")
        # On record before, plugins begin after: so GC of a network sees each attachment, or is over.
        engine.barriers.passed(attachment.config.name for attachment in new)
        begun: set[int] = set()
        made = list(new)
        undo.callback(_undo_all, engine, base, netns, begun, made, undo_failed)
        errors = schedule.in_order(
            functools.partial(_add_one, engine, sandbox, netns, plan, begun, made),
            plan.before,
            at_once=engine.attach_concurrency,
            here=plan.here,
            patience=deadlines.SETTLE_SECONDS,
        )
        for error in list(errors.values())[1:]:
            log.error("another network of pod %s has failed too: %s", base.pod, error)
        if errors:
            raise next(iter(errors.values()))
        before = present = (*base.attachments, *made)
        if completes:
            present = gateway.moved(netns, base.pod, before)
            base = replace(base, attachments=present[: len(base.attachments)])
        later = {len(base.attachments) + number for number in plan.here}
        changed = tuple(now for at, now in enumerate(present) if now is not before[at] or at in later)
        observed = _observed(netns, base.pod, present if completes else present[len(base.attachments) :])
        present = (*present[: len(present) - len(observed)], *observed)
        yield Made(replace(base, attachments=present, complete=base.complete or completes), changed)
        undo.pop_all()


def _add_one(
    engine: Engine,
    sandbox: Sandbox,
    netns: PodNetns,
    plan: PodPlan,
    begun: set[int],
    made: list[Attachment],
    number: int,
) -> None:
    """Run ADD for one of the new attachments; its result goes to `made`."""
    attachment = made[number]
    begun.add(number)
    try:
        devices.prepare(engine, attachment)
        with netns.of_thread() as own:
            result = engine.runner.add(sandbox, attachment, own)
        made[number] = replace(attachment, result=result, device_info=devices.info(engine, attachment))
        # At once, where the pod's other networks may take seconds more and the daemon may be killed meanwhile.
        if number not in plan.here:
            engine.runner.remember(sandbox, made[number])
    except CniError as error:
        raise error.with_context(f"pod {plan.pod}") from error
    except Exception as error:
        raise InternalError(f"{type(error).__name__}: {error}", f"{_describe(attachment)} of pod {plan.pod}") from error


def _require_room(engine: Engine, base: ContainerRecord, new: Sequence[Attachment], netns: PodNetns) -> str:
    """Return the identity of the namespace, in which no link has the name of a new interface. Raises CniError."""
    if problem := engine.links.netns_problem(netns.path):
        raise InvalidNetnsError(f"{netns.path} {problem}", f"pod {base.pod}: CNI_NETNS must be one")
    owners = {item.ifname: item.name for item in base.attachments if not item.auxiliary}
    for attachment in new:
        if owner := owners.get(attachment.ifname):
            raise InvalidNetworkConfigError(
                f"interface {attachment.ifname!r} belongs to network {owner}",
                f"network {attachment.name} of pod {base.pod} needs that name",
            )
    try:
        taken = netns.existing([item.ifname for item in new if not item.auxiliary])
        netns_id = netns.identity()
    except OSError as error:
        raise InvalidNetnsError(f"{netns.path} can't be entered: {error}", f"pod {base.pod}") from error
    if taken:
        wanting = next(item for item in new if item.ifname == taken[0])
        raise InvalidNetworkConfigError(
            f"interface {taken[0]!r} already exists in {netns.path}",
            f"network {wanting.name} of pod {base.pod} needs that name",
        )
    return netns_id


def _observed(netns: PodNetns, pod: str, made: Sequence[Attachment]) -> tuple[Attachment, ...]:
    """Return the attachments with what the kernel has of their results, which CHECK compares later.

    Results of built-ins say what there is. Those of binaries may not: a later plugin of the chain moves or removes what
    an earlier one reported, also for another network of the pod.
    """
    looked_for = [(item.ifname, item.result) for item in made if item.result is not None]
    if all(item.is_built_in for item in made) or not looked_for:
        return tuple(made)
    try:
        found = iter(netns.observe(looked_for))
    except OSError as error:
        log.warning(
            "pod %s: %s cannot be looked into, so CHECK will compare less: %s",
            pod,
            netns.path,
            error,
        )
        return tuple(made)
    return tuple(item if item.result is None else replace(item, observed=next(found)) for item in made)


def _undo_all(
    engine: Engine,
    base: ContainerRecord,
    netns: PodNetns,
    begun: set[int],
    made: Sequence[Attachment],
    failed: list[str],
) -> None:
    """Run DEL for those of the new attachments that are `begun`, in reverse; one that fails stops no other."""
    for number in sorted(begun, reverse=True):
        attachment = made[number]
        # Whatever became of the request: a deadline of its own.
        with deadline.given(Deadline()):
            error = detach.delete(engine, base, attachment, netns, deadlines.UNDO_SECONDS)
        if error:
            failed.append(attachment.name)
            log.error("undoing %s of pod %s failed: %s", _describe(attachment), base.pod, error)


def _put_back(engine: Engine, base: ContainerRecord, undo_failed: list[str]) -> None:
    if undo_failed:
        return
    try:
        if base.attachments:
            engine.store.save(base)
        else:
            records.remove(engine, base.sandbox.container_id)
    except OSError as error:
        log.error("record of container %s can't be put back: %s", base.sandbox.container_id, error)


def keep(engine: Engine, made: Made) -> None:
    """Store what `attached` has given. Raises IoFailureError (5)."""
    record = made.record
    try:
        for attachment in made.changed:
            engine.runner.remember(record.sandbox, attachment)
    except CniError as error:
        raise error.with_context(f"pod {record.pod}") from error
    _save(engine, record, durable=False)


def _save(engine: Engine, record: ContainerRecord, *, durable: bool = True) -> None:
    engine.occupants.enter(record.sandbox.netns, record.sandbox.container_id)
    try:
        engine.store.save(record, durable=durable)
    except OSError as error:
        raise IoFailureError(
            f"record of container {record.sandbox.container_id} can't be written: {error} (pod {record.pod})",
            "check free space and permissions of the daemon's cniDir",
        ) from error


def _describe(attachment: Attachment) -> str:
    return f'network {attachment.name}, interface "{attachment.ifname}"'
