"""Attach networks to a container: all networks of a plan, or none.

ADD, a client of `/delegate` and a change of the pod's annotation attach networks here. A base record and a plan become
the new record. For an ADD the base has no attachment, else those of the container.

1. The write-ahead record is on disk before the first plugin runs: a DEL after a crash finds all that may be there.
2. The plugins run, independent networks side by side (`pod.schedule`).
3. The default routes move to the network that asks for them.
4. The results are written, to libcni's cache and to the record.

If anything fails, DEL undoes each ADD that has begun, also the failed one, and the base is written again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from multus_daemon import deadlines, logs
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.metrics.declared import Outcome
from multus_daemon.plugins.plugin import Progress, outcome_of
from multus_daemon.pod import detach, gateway, publish, schedule, unsupported
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.plan import PodPlan
from multus_daemon.runtime import deadline, timeline
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni.errors import (
    ASK_INTERFACE,
    CniError,
    InvalidAnnotationError,
    InvalidNetnsError,
    IoFailureError,
    Origin,
    UnexpectedError,
    about_pod,
    fault,
)
from multus_daemon.spec.cni.names import IfName
from multus_daemon.spec.cni.result import Result

log = logging.getLogger(__name__)


def refuse(engine: Engine, plan: PodPlan, sandbox: Sandbox) -> None:
    """Report the plan's notices. If the plan has a refusal, send an Event and raise it."""
    publish.notices(engine, plan.pod, plan.notices)
    if plan.refusal:
        reason = publish.INVALID if plan.is_invalid else publish.FAILED
        publish.failure(engine, plan.pod, plan.refusal, reason, sandbox)
        raise plan.refusal


def attach(
    engine: Engine, base: ContainerRecord, plan: PodPlan, netns: PodNetns, *, completes: bool = False
) -> tuple[ContainerRecord, Sequence[Attachment]]:
    """Attach the networks of the plan to the container of `base`, or none of them. The caller holds its lock.

    `completes`: these networks complete the runtime's ADD. Returns the record as it is on disk, and the plan's
    attachments with their results. Raises the CniError of the plan's first failed network, after an Event.
    """
    sandbox = Sandbox(base.sandbox.container_id, netns.path)
    with publish.failures(engine, plan.pod, sandbox), engine.netns_held(netns.path), contextlib.ExitStack() as undo:
        work = _begin(engine, base, plan, netns)
        undo.callback(work.undo)
        with timeline.stage("record"):
            engine.records.save(work.record)
        timeline.note("planned and recorded")
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
    """Check that the new interface names are free in the namespace, and prepare the attaching. Raises CniError."""
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
    """The state of one call of `attach`."""

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
    """How far each ADD that has begun came, by its number in the plan."""
    has_moved_routes: bool = False

    @property
    def record(self) -> ContainerRecord:
        """The base with the networks of the plan."""
        return replace(self.base, attachments=(*self.base.attachments, *self.made))

    def run_plugins(self) -> None:
        """Run ADD for each network. Raises CniError."""
        engine, plan = self.engine, self.plan
        # The record comes first, the plugins after: so GC of a network sees each attachment, or is over.
        with timeline.stage("queue"):
            for item in self.made:
                with engine.gc.networks.hold(item.config.name):
                    pass
        at_once, patience = engine.networks_at_once, deadlines.SETTLE_SECONDS
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
        began = time.monotonic()
        ended: Outcome = "success"
        try:
            self._prepare_device_info(attachment)
            with logs.fields(network=attachment.name, ifname=attachment.ifname), self.netns.of_thread() as own:
                result = engine.runner.add(sandbox, attachment, own, progress)
            self.made[number] = replace(attachment, result=result)
            # At once: the pod's other networks may take seconds more, and the daemon may be killed meanwhile.
            if number not in self.plan.here:
                self._remember(sandbox, self.made[number])
        except BaseException as error:
            ended = outcome_of(error)
            if isinstance(error, CniError):
                lacks = self.plan.networks[number].lacks
                raise about_pod(error.changed(remedy=lacks), self.plan.pod, attachment.name) from error
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
                ahead = map(gateway.move(netns, pod, asking, dry_run=True).noted, self.base.attachments)
                foreseen = replace(self.base, attachments=(*ahead, *self.plan.attachments))
                self.engine.records.save(foreseen, durable=False)
            move = gateway.move(netns, pod, asking)
            self.has_moved_routes = True
            self.base = replace(self.base, attachments=tuple(map(move.done, self.base.attachments)))
            self.made = [move.done(item) for item in self.made]

    def unmet_requests(self) -> Sequence[unsupported.Notice]:
        """Return a notice for each request that the results do not show. Raises CniError with `strictRequests`."""
        asked = zip(self.made, (network.asked for network in self.plan.networks), strict=True)
        return unsupported.after_add(self.plan.pod, asked, strict=self.plan.strict)

    def keep(self, *, completes: bool) -> ContainerRecord:
        """Write the results to libcni's cache and to the record; return the record. Raises IoFailureError (5)."""
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
        """Write one result to libcni's cache. Raises IoFailureError (5)."""
        self.engine.runner.remember(sandbox, attachment, len(self.base.attachments) + len(self.made))
        self.cached[attachment.key] = attachment.result

    def undo(self) -> None:
        """Run DEL for each ADD that has begun, in reverse; write the base again, and restore its default routes."""
        begun = [(self.made[number], self.progress[number]) for number in sorted(self.progress)]
        detach.undo(self.engine, self.record, self.base, self.netns, begun)
        if not (self.has_moved_routes and self.base.attachments):
            return
        try:
            with deadline.given(Deadline(deadlines.UNDO_SECONDS)):
                left = self.engine.records.find(self.base.sandbox.container_id, search=False)
                routes_back(self.engine, left or self.base, self.netns)
        except CniError as error:
            log.error("the default routes of pod %s could not be restored: %s", self.base.pod, error)


def routes_back(engine: Engine, record: ContainerRecord, netns: PodNetns) -> ContainerRecord:
    """Restore the pod's default routes that a network, which is detached now, had replaced.

    The caller holds the lock of the namespace. Returns the record as it is on disk. Raises CniError.
    """
    back = gateway.restore(netns, record.pod, record.attachments)
    for before, item in zip(record.attachments, back, strict=True):
        if item is not before:
            engine.runner.remember(record.sandbox, item, len(back))
    record = replace(record, attachments=back)
    engine.records.save(record)
    return record


def _require_room(staying: Sequence[Attachment], plan: PodPlan, netns: PodNetns) -> str:
    """Check that the new interface names are free in the namespace; return its identity. Raises CniError."""
    if problem := netns.problem:
        raise InvalidNetnsError(f"{netns.path} {problem}", f"pod {plan.pod}: CNI_NETNS must be a network namespace")
    owners = {item.ifname: item.name for item in staying if not (item.auxiliary or item.detached)}
    for attachment in plan.attachments:
        if owner := owners.get(attachment.ifname):
            raise InvalidAnnotationError(
                f"interface {attachment.ifname!r} of network {attachment.name} belongs to network {owner}",
                f"pod {plan.pod}",
                remedy=ASK_INTERFACE,
            )
    try:
        taken = netns.existing([item.ifname for item in plan.attachments if not item.auxiliary])
        netns_id = netns.identity()
    except OSError as error:
        raise InvalidNetnsError(f"{netns.path} can't be entered: {error}", f"pod {plan.pod}") from error
    if taken:
        wanting = next(item for item in plan.attachments if item.ifname == taken[0])
        raise InvalidAnnotationError(
            f"interface {taken[0]!r} of network {wanting.name} already exists in the pod's network namespace",
            f"pod {plan.pod}; {netns.path}",
            remedy="" if wanting.cluster_network else ASK_INTERFACE,
            # An earlier ADD has left it: the runtime makes a new namespace.
            origin=Origin.NOBODY if wanting.cluster_network else None,
        )
    return netns_id


def _observed(netns: PodNetns, pod: str, made: list[Attachment]) -> list[Attachment]:
    """Return the attachments with the part of their results that the kernel has, which CHECK compares later.

    Results of built-ins match the kernel, unless one changes what another has made. Results of binaries may not: a
    later plugin of the chain, or of another network of the pod, may move or remove what an earlier one reported.
    """
    looked_for = [(item.ifname, item.result) for item in made if item.result is not None]
    if all(item.is_built_in and not item.changes_others for item in made) or not looked_for:
        return made
    try:
        observed = iter(netns.observe(looked_for))
    except OSError as error:
        log.warning(
            "pod %s: namespace %s cannot be read after the ADD, so CHECK will compare less: %s", pod, netns.path, error
        )
        return made
    return [item if item.result is None else replace(item, observed=next(observed)) for item in made]
