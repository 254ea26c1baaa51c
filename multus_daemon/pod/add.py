"""ADD: all networks of a pod, or none and the reason. `attach` executes the plan of a hot-plug too."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from multus_daemon import deadlines, logs
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins import outcome
from multus_daemon.plugins.leftover import Progress
from multus_daemon.pod import gateway, publish, schedule, statuses, unsupported
from multus_daemon.pod.delete import Deletes, detach_leftover
from multus_daemon.pod.engine import INDICATOR_GATE, Engine
from multus_daemon.pod.gather import find_pod, gather
from multus_daemon.pod.plan import PlannedNetwork, PodPlan, plan_pod
from multus_daemon.pod.request import CniRequest
from multus_daemon.runtime import deadline, timeline
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni.errors import (
    CniError,
    InvalidEnvironmentError,
    InvalidNetnsError,
    InvalidNetworkConfigError,
    TryAgainLaterError,
    UnexpectedError,
    fault,
    from_code,
)
from multus_daemon.spec.cni.remedies import about_pod
from multus_daemon.spec.cni.result import Result

log = logging.getLogger(__name__)


def add(engine: Engine, request: CniRequest) -> Result:
    """Attach every network of the pod, or none; return the cluster network's result. Raises CniError.

    A repeated ADD for a container that lives returns the stored result and changes nothing, except an outdated
    network-status.
    """
    container_id = request.container_id
    with engine.serving(request) as netns:
        engine.gc.add_begins(container_id)
        with timeline.stage("record"):
            record = engine.records.find(container_id, search=False)
        staying: tuple[Attachment, ...] = ()
        if record is not None:
            if _lives(record, netns, request.ifname):
                log.info("ADD of container %s repeated: the stored result is returned", container_id)
                statuses.after_repeated_add(engine, record)
                return _cluster_result(record)
            staying = detach_leftover(engine, record, netns)
        if reason := engine.gates.closed.get(INDICATOR_GATE):
            raise TryAgainLaterError(reason)
        with timeline.stage("gather"):
            net_conf = engine.policy.net_conf(request.stdin)
            pod = find_pod(engine.cluster, request.args)
            inputs = gather(engine, pod, net_conf)
        with timeline.stage("plan"):
            plan = plan_pod(request, inputs, engine.runner, engine.devices.files)
        publish.notices(engine, pod, plan.notices)
        if plan.refusal:
            publish.failure(engine, pod, plan.refusal, publish.INVALID if plan.is_invalid else publish.FAILED, request)
            raise plan.refusal
        timeline.note(f"networks: {', '.join(item.name for item in plan.attachments)}")
        base = ContainerRecord(
            sandbox=Sandbox(container_id, request.netns),
            ifname=request.ifname,
            pod_namespace=pod.namespace,
            pod_name=pod.name,
            pod_uid=request.args.uid or pod.uid,
            attachments=staying,
            created=engine.clock(),
        )
        try:
            with engine.netns_held(netns.path), contextlib.ExitStack() as undo:
                attaching = attach(engine, base, plan, netns, undo, completes=True)
                asked = zip(attaching.new, (network.asked for network in plan.networks), strict=True)
                notices = unsupported.after_add(pod, asked, strict=net_conf.strict_requests)
                with timeline.stage("keep"):
                    keep(engine, attaching)
                timeline.note("results recorded")
                with timeline.stage("publish"):
                    publish.required_status(engine, pod, attaching.record)
                undo.pop_all()
        except CniError as error:
            publish.failure(engine, pod, error, publish.FAILED, request)
            raise
        with timeline.stage("publish"):
            publish.notices(engine, pod, notices)
            publish.attached(engine, pod, attaching.record)
        timeline.note("network-status handed over")
        return _cluster_result(attaching.record)


def _lives(record: ContainerRecord, netns: PodNetns, ifname: str) -> bool:
    """Return True if the record is that of a finished ADD whose interfaces are all still there. Raises CniError."""
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
    # A hot-plugged network comes and goes by itself, and one whose DEL has begun goes.
    return interfaces_live(netns, [item for item in record.attachments if item.is_attached and not item.hot_plugged])


def interfaces_live(netns: PodNetns, attachments: Sequence[Attachment]) -> bool:
    """Return True if the namespace has every interface that the ADDs of `attachments` reported in it.

    Raises InvalidNetnsError if the namespace cannot be entered.
    """
    made = [attachment.ifname for attachment in attachments if attachment.has_interface]
    try:
        return netns.existing(made) == made
    except OSError as error:
        raise InvalidNetnsError(f"{netns.path} can't be entered: {error}") from error


def _cluster_result(record: ContainerRecord) -> Result:
    """Return the cluster network's result; if none is known as such (upstream's files), the first network's."""
    attachments = record.attachments
    cluster = next((item for item in attachments if item.cluster_network), attachments[0] if attachments else None)
    return (cluster and cluster.result) or Result()


def attach(
    engine: Engine,
    base: ContainerRecord,
    plan: PodPlan,
    netns: PodNetns,
    undo: contextlib.ExitStack,
    *,
    completes: bool,
) -> Attaching:
    """Run ADD for each network of the plan. The caller keeps the result, or has `undo` take everything back.

    Independent networks run side by side (`pod.schedule`); the record has the order of the plan. The caller holds the
    locks of the container and of the namespace. `base` is the record without the networks of the plan; `completes`
    says that with them the runtime's ADD is complete. The write-ahead record is on disk before the first plugin runs,
    so that a DEL after a crash finds everything that may have been made. The default routes are moved last.

    On failure, also of the caller, `undo` runs DEL in reverse, for the attachment that failed too, and writes `base`
    again (removes the record if `base` is empty), unless a DEL failed. Raises CniError: of the first in the list that
    failed.
    """
    # The new result takes the place of one that could not be removed.
    keys = {item.key for item in plan.attachments}
    stays = tuple(item for item in base.attachments if not (item.detached and item.key in keys))
    base = replace(base, attachments=stays)
    with timeline.stage("record"):
        netns_id = _require_room(base, plan.attachments, netns)
        attaching = Attaching(
            engine, replace(base, netns_id=base.netns_id or netns_id), plan, netns, list(plan.attachments)
        )
        undo.callback(attaching.undo)
        engine.records.save(replace(attaching.base, attachments=(*base.attachments, *plan.attachments)))
    timeline.note("planned and recorded")
    # The record comes first, the plugins after: so GC of a network sees each attachment, or is over.
    with timeline.stage("queue"):
        engine.gc.barriers.passed(attachment.config.name for attachment in plan.attachments)
    at_once, patience = engine.policy.networks_at_once, deadlines.SETTLE_SECONDS
    with timeline.stage("plugin"):
        errors = schedule.in_order(attaching.add, plan.before, at_once=at_once, here=plan.here, patience=patience)
    for error in list(errors.values())[1:]:
        # The error of the request is that of the first.
        log.warning("another network of pod %s has failed too: %s", base.pod, error, exc_info=fault(error))
    if errors:
        raise next(iter(errors.values()))
    known = len(base.attachments)
    before = present = (*base.attachments, *attaching.made)
    with timeline.stage("keep"):
        if any(item.default_route for item in (present if completes else present[known:])):
            if not completes:
                # The pod lives on after a crash, and needs its routes.
                ahead = gateway.foresee(netns, base.pod, present)[:known]
                engine.records.save(replace(attaching.base, attachments=(*ahead, *plan.attachments)), durable=False)
            present = gateway.move(netns, base.pod, present)
            attaching.base = replace(attaching.base, attachments=present[:known])
        later = {known + number for number in plan.here}
        attaching.changed = [now for at, now in enumerate(present) if now is not before[at] or at in later]
        first = 0 if completes else known
        present = (*present[:first], *_observed(netns, base.pod, present[first:]))
    attaching.new = present[known:]
    attaching.record = replace(attaching.base, attachments=present, complete=base.complete or completes)
    return attaching


@dataclass(slots=True)
class Attaching:
    """The ADDs of one plan: their results, and their undo."""

    engine: Engine
    base: ContainerRecord
    """The record that an undo restores."""
    plan: PodPlan
    netns: PodNetns
    made: list[Attachment]
    """The networks of the plan, with the results of their plugins."""
    progress: dict[int, Progress] = field(default_factory=dict)
    """For each ADD that has begun, by number."""
    changed: list[Attachment] = field(default_factory=list)
    """The attachments whose result libcni's cache lacks, or has as it was before."""
    new: tuple[Attachment, ...] = ()
    """The networks of the plan as they go on record; set when all have succeeded, as is `record`."""
    record: ContainerRecord = field(init=False)
    """The record with every result."""

    def add(self, number: int) -> None:
        """Run ADD for one network and measure it; put its result into `made`. Raises CniError."""
        engine, attachment = self.engine, self.made[number]
        sandbox = Sandbox(self.base.sandbox.container_id, self.netns.path)
        progress = self.progress[number] = Progress()
        began, ended = time.monotonic(), outcome.SUCCESS
        try:
            if attachment.info_file:
                engine.devices.prepare(attachment)
            with logs.fields(network=attachment.name, ifname=attachment.ifname), self.netns.of_thread() as own:
                result = engine.runner.add(sandbox, attachment, own, progress)
            self.made[number] = replace(attachment, result=result)
            # At once: the pod's other networks may take seconds more, and the daemon may be killed meanwhile.
            if number not in self.plan.here:
                engine.runner.remember(sandbox, self.made[number], len(self.base.attachments) + len(self.made))
        except BaseException as error:
            ended = outcome.of(error)
            if isinstance(error, CniError):
                raise about_pod(_explained(error, self.plan.networks[number]), self.plan.pod) from error
            if not isinstance(error, Exception):
                raise
            place = f"{_describe(attachment)} of pod {self.plan.pod}"
            raise UnexpectedError(f"{type(error).__name__}: {error}", place) from error
        finally:
            engine.metrics.network(attachment.name, ended, time.monotonic() - began)

    def undo(self) -> None:
        """Run DEL for each ADD that has begun, in reverse; then write `base` again, unless a DEL failed."""
        engine, base = self.engine, self.base
        whole = replace(base, attachments=(*base.attachments, *self.made))
        whole, _ = engine.records.begin_delete(whole, [self.made[number] for number in self.progress])
        self.made = list(whole.attachments[len(base.attachments) :])
        work = Deletes(engine, base, self.netns, self.made, lambda: deadlines.UNDO_SECONDS, self.progress)
        for number in sorted(self.progress, reverse=True):
            # A deadline of its own, whatever the request's is.
            with deadline.given(Deadline()), timeline.stage("plugin"):
                work.delete(number)
            if error := work.failures.get(number):
                what = _describe(self.made[number])
                log.error("undoing %s of pod %s failed: %s", what, base.pod, error, exc_info=fault(error))
        if work.failures:
            return
        try:
            engine.records.save_without(base, (), work.left)
        except CniError as error:
            log.error("record of container %s can't be put back: %s", base.sandbox.container_id, error)


def _explained(error: CniError, network: PlannedNetwork) -> CniError:
    """Return the error of a plugin with the reason why its network has no device, if it has none."""
    if not network.lacks:
        return error
    return from_code(error.code, error.msg, f"{network.lacks}; {error.details}".removesuffix("; "))


def _require_room(base: ContainerRecord, new: Sequence[Attachment], netns: PodNetns) -> str:
    """Return the identity of the namespace, in which no link has the name of a new interface. Raises CniError."""
    if problem := netns.problem:
        raise InvalidNetnsError(f"{netns.path} {problem}", f"pod {base.pod}: CNI_NETNS must be one")
    owners = {item.ifname: item.name for item in base.attachments if not (item.auxiliary or item.detached)}
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


def _observed(netns: PodNetns, pod: str, made: Sequence[Attachment]) -> Sequence[Attachment]:
    """Return the attachments with the part of their results that the kernel has, which CHECK compares later.

    Results of built-ins are what the kernel has, unless one changes what another has made. Those of binaries may not
    be: a later plugin of the chain moves or removes what an earlier one reported, also for another network of the pod.
    """
    looked_for = [(item.ifname, item.result) for item in made if item.result is not None]
    if all(item.is_built_in and not item.changes_others for item in made) or not looked_for:
        return made
    try:
        observed = iter(netns.observe(looked_for))
    except OSError as error:
        log.warning("pod %s: %s cannot be looked into, so CHECK will compare less: %s", pod, netns.path, error)
        return made
    return [item if item.result is None else replace(item, observed=next(observed)) for item in made]


def keep(engine: Engine, attaching: Attaching) -> None:
    """Store the results of `attach`. Raises IoFailureError (5)."""
    record = attaching.record
    try:
        for attachment in attaching.changed:
            engine.runner.remember(record.sandbox, attachment, len(record.attachments))
    except CniError as error:
        raise about_pod(error, record.pod) from error
    engine.records.save(record, durable=False)


def _describe(attachment: Attachment) -> str:
    return f'network {attachment.name}, interface "{attachment.ifname}"'
