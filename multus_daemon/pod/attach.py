"""Attach networks to a container: all that a plan names, or none.

ADD, a client of `/delegate` and a change of the pod's annotation attach networks here. A base record and a plan become
a record: the base is empty for an ADD, and what the container has for the others.

1. The write-ahead record is on disk before the first plugin runs: a DEL after a crash finds all that may be there.
2. The plugins run, independent networks side by side (`pod.schedule`).
3. The default routes move to the network that asks for them.
4. The results are kept, in libcni's cache and on record.

If anything fails, DEL undoes each ADD that has begun, the failed one too, and the base is written again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from multus_daemon import deadlines, logs
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins import outcome
from multus_daemon.plugins.plugin import Progress
from multus_daemon.pod import detach, gateway, publish, schedule, unsupported
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.plan import PlannedNetwork, PodPlan
from multus_daemon.runtime import deadline, timeline
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni.errors import (
    CniError,
    InvalidNetnsError,
    InvalidNetworkConfigError,
    IoFailureError,
    UnexpectedError,
    fault,
    from_code,
)
from multus_daemon.spec.cni.names import IfName
from multus_daemon.spec.cni.remedies import about_pod
from multus_daemon.spec.cni.result import Result

log = logging.getLogger(__name__)


def refuse(engine: Engine, plan: PodPlan, sandbox: Sandbox) -> None:
    """Report the plan's notices; raise its refusal, if it has one, after an Event."""
    publish.notices(engine, plan.pod, plan.notices)
    if plan.refusal:
        reason = publish.INVALID if plan.is_invalid else publish.FAILED
        publish.failure(engine, plan.pod, plan.refusal, reason, sandbox)
        raise plan.refusal


def attach(
    engine: Engine, base: ContainerRecord, plan: PodPlan, netns: PodNetns, *, completes: bool = False
) -> tuple[ContainerRecord, Sequence[Attachment]]:
    """Attach the networks of the plan to the container of `base`, or none of them. The caller holds its lock.

    `completes`: with these networks the runtime's ADD is complete. Returns the record as it is on disk, and the
    networks of the plan with their results. Raises CniError, after an Event about the pod: of the first network in the
    plan that failed.
    """
    sandbox = Sandbox(base.sandbox.container_id, netns.path)
    with publish.failures(engine, plan.pod, sandbox), engine.netns_held(netns.path), contextlib.ExitStack() as undo:
        work = _begin(engine, base, plan, netns)
        undo.callback(work.undo)
        work.write_ahead()
        work.run_plugins()
        work.move_routes()
        notices = work.unmet_requests()
        record = work.keep(completes=completes)
        if completes:
            with timeline.stage("publish"):
                publish.required_status(engine, plan.pod, record)
        undo.pop_all()
    with timeline.stage("publish"):
        publish.notices(engine, plan.pod, notices)
        publish.devices(engine, record, work.made)
    return record, work.made


def _begin(engine: Engine, base: ContainerRecord, plan: PodPlan, netns: PodNetns) -> _Attaching:
    """Return the attachment of the plan's networks, for which the namespace has room. Raises CniError."""
    # A new result takes the place of one that could not be removed.
    keys = {item.key for item in plan.attachments}
    staying = tuple(item for item in base.attachments if not (item.detached and item.key in keys))
    with timeline.stage("record"):
        netns_id = _require_room(staying, plan, netns)
    base = replace(base, attachments=staying, netns_id=base.netns_id or netns_id)
    cached = {item.key: item.result for item in staying}
    return _Attaching(engine, base, plan, netns, list(plan.attachments), cached)


@dataclass(slots=True)
class _Attaching:
    """One call of `attach`."""

    engine: Engine
    base: ContainerRecord
    """The record without the networks of the plan, which an undo writes again."""
    plan: PodPlan
    netns: PodNetns
    made: list[Attachment]
    """The networks of the plan, with the results so far."""
    cached: dict[tuple[str, IfName], Result | None]
    """The results that libcni's cache has, by network and interface."""
    progress: dict[int, Progress] = field(default_factory=dict)
    """For each ADD that has begun, by its number in the plan."""
    has_moved_routes: bool = False

    @property
    def record(self) -> ContainerRecord:
        """The base with the networks of the plan."""
        return replace(self.base, attachments=(*self.base.attachments, *self.made))

    def write_ahead(self) -> None:
        """Write the write-ahead record. Raises IoFailureError (5)."""
        with timeline.stage("record"):
            self.engine.records.save(self.record)
        timeline.note("planned and recorded")

    def run_plugins(self) -> None:
        """Run ADD for each network. Raises CniError."""
        engine, plan = self.engine, self.plan
        # The record comes first, the plugins after: so GC of a network sees each attachment, or is over.
        with timeline.stage("queue"):
            engine.gc.barriers.passed(item.config.name for item in self.made)
        at_once, patience = engine.policy.networks_at_once, deadlines.SETTLE_SECONDS
        with timeline.stage("plugin"):
            errors = schedule.in_order(self._add, plan.before, at_once=at_once, here=plan.here, patience=patience)
        for error in list(errors.values())[1:]:
            # The error of the request is that of the first.
            log.warning("another network of pod %s has failed too: %s", plan.pod, error, exc_info=fault(error))
        if errors:
            raise next(iter(errors.values()))

    def _add(self, number: int) -> None:
        """Run ADD for one network and measure it; put its result into `made`. Raises CniError."""
        engine, attachment = self.engine, self.made[number]
        sandbox = Sandbox(self.base.sandbox.container_id, self.netns.path)
        progress = self.progress[number] = Progress()
        began, ended = time.monotonic(), outcome.SUCCESS
        try:
            self._prepare_device_info(attachment)
            with logs.fields(network=attachment.name, ifname=attachment.ifname), self.netns.of_thread() as own:
                result = engine.runner.add(sandbox, attachment, own, progress)
            self.made[number] = replace(attachment, result=result)
            # At once: the pod's other networks may take seconds more, and the daemon may be killed meanwhile.
            if number not in self.plan.here:
                self._remember(sandbox, self.made[number])
        except BaseException as error:
            ended = outcome.of(error)
            if isinstance(error, CniError):
                raise about_pod(_explained(error, self.plan.networks[number]), self.plan.pod) from error
            if not isinstance(error, Exception):
                raise
            place = f"{detach.describe(attachment)} of pod {self.plan.pod}"
            raise UnexpectedError(f"{type(error).__name__}: {error}", place) from error
        finally:
            engine.metrics.network(attachment.name, ended, time.monotonic() - began)

    def _prepare_device_info(self, attachment: Attachment) -> None:
        """Copy the device plugin's file to that of the attachment (device-info SPEC 5.1). Raises IoFailureError (5)."""
        if path := attachment.info_file:
            try:
                self.engine.device_files.prepare(attachment, path)
            except OSError as error:
                raise IoFailureError(
                    f"device-info file can't be prepared: {error}", f"network {attachment.name}: {path}"
                ) from error

    def move_routes(self) -> None:
        """Move the default routes to the network that asks for them, if one does. Raises CniError."""
        asking = next((item for item in self.made if item.default_route), None)
        if asking is None:
            return
        netns, pod = self.netns, self.base.pod
        with timeline.stage("keep"):
            if self.base.attachments:
                # A running pod lives on after a crash, and gets back the routes that are on record.
                ahead = map(gateway.foresee(netns, pod, asking).noted, self.base.attachments)
                foreseen = replace(self.base, attachments=(*ahead, *self.plan.attachments))
                self.engine.records.save(foreseen, durable=False)
            move = gateway.move(netns, pod, asking)
            self.has_moved_routes = True
            self.base = replace(self.base, attachments=tuple(map(move.done, self.base.attachments)))
            self.made = [move.done(item) for item in self.made]

    def unmet_requests(self) -> Sequence[unsupported.Notice]:
        """Return the requests of the pod that the results do not show. Raises CniError if they must be met."""
        asked = zip(self.made, (network.asked for network in self.plan.networks), strict=True)
        return unsupported.after_add(self.plan.pod, asked, strict=self.plan.strict)

    def keep(self, *, completes: bool) -> ContainerRecord:
        """Put the results into libcni's cache and on record; return the record. Raises IoFailureError (5)."""
        with timeline.stage("keep"):
            try:
                for attachment in self.record.attachments:
                    if self.cached.get(attachment.key) is not attachment.result:
                        self._remember(self.base.sandbox, attachment)
            except CniError as error:
                raise about_pod(error, self.base.pod) from error
            self.made = _observed(self.netns, self.base.pod, self.made)
            record = replace(self.record, complete=self.base.complete or completes)
            self.engine.records.save(record, durable=False)
        timeline.note("results recorded")
        return record

    def _remember(self, sandbox: Sandbox, attachment: Attachment) -> None:
        """Put the result into libcni's cache. Raises IoFailureError (5)."""
        self.engine.runner.remember(sandbox, attachment, len(self.base.attachments) + len(self.made))
        self.cached[attachment.key] = attachment.result

    def undo(self) -> None:
        """Run DEL for each ADD that has begun, in reverse; write the base again, and give back its default routes."""
        begun = [(self.made[number], self.progress[number]) for number in sorted(self.progress)]
        detach.undo(self.engine, self.record, self.base, self.netns, begun)
        if not (self.has_moved_routes and self.base.attachments):
            return
        try:
            with deadline.given(Deadline(deadlines.UNDO_SECONDS)):
                left = self.engine.records.find(self.base.sandbox.container_id, search=False)
                routes_back(self.engine, left or self.base, self.netns)
        except CniError as error:
            log.error("undoing the default route of pod %s failed: %s", self.base.pod, error)


def routes_back(engine: Engine, record: ContainerRecord, netns: PodNetns) -> ContainerRecord:
    """Give the pod the default routes back that one of its networks, which is gone now, had replaced.

    The caller holds the lock of the namespace. Returns the record as it is on disk. Raises CniError.
    """
    back = gateway.restore(netns, record.pod, record.attachments)
    for before, item in zip(record.attachments, back, strict=True):
        if item is not before:
            engine.runner.remember(record.sandbox, item, len(back))
    record = replace(record, attachments=back)
    engine.records.save(record)
    return record


def _explained(error: CniError, network: PlannedNetwork) -> CniError:
    """Return the error of a plugin with the reason why its network has no device, if it has none."""
    if not network.lacks:
        return error
    return from_code(error.code, error.msg, f"{network.lacks}; {error.details}".removesuffix("; "))


def _require_room(staying: Sequence[Attachment], plan: PodPlan, netns: PodNetns) -> str:
    """Return the identity of the namespace, in which no link has the name of a new interface. Raises CniError."""
    if problem := netns.problem:
        raise InvalidNetnsError(f"{netns.path} {problem}", f"pod {plan.pod}: CNI_NETNS must be one")
    owners = {item.ifname: item.name for item in staying if not (item.auxiliary or item.detached)}
    for attachment in plan.attachments:
        if owner := owners.get(attachment.ifname):
            raise InvalidNetworkConfigError(
                f"interface {attachment.ifname!r} belongs to network {owner}",
                f"network {attachment.name} of pod {plan.pod} needs that name",
            )
    try:
        taken = netns.existing([item.ifname for item in plan.attachments if not item.auxiliary])
        netns_id = netns.identity()
    except OSError as error:
        raise InvalidNetnsError(f"{netns.path} can't be entered: {error}", f"pod {plan.pod}") from error
    if taken:
        wanting = next(item for item in plan.attachments if item.ifname == taken[0])
        raise InvalidNetworkConfigError(
            f"interface {taken[0]!r} already exists in {netns.path}",
            f"network {wanting.name} of pod {plan.pod} needs that name",
        )
    return netns_id


def _observed(netns: PodNetns, pod: str, made: list[Attachment]) -> list[Attachment]:
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
