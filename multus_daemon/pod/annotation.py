"""Bring a running container to the networks of its pod's annotation: detach what is gone, attach what is new.

The whole change is planned before anything is detached, so a refusal changes nothing. Then what was detached stays
detached, and what fails to attach is undone; the next try looks at the record again.

The attachments are like those of the runtime's ADD: not `hot_plugged`, so CHECK and a repeated ADD expect them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from dataclasses import replace
from typing import Final, Literal

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.pod import add, changes, gateway, publish, statuses, unsupported
from multus_daemon.pod.changes import Changes
from multus_daemon.pod.delete import detach
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.gather import gather_some
from multus_daemon.pod.plan import PodPlan, plan_more
from multus_daemon.pod.request import CniRequest
from multus_daemon.spec.attachment import ContainerRecord, Pod
from multus_daemon.spec.cni.errors import CniError, InvalidNetnsError
from multus_daemon.spec.cni.names import IfName, KubernetesArgs
from multus_daemon.spec.cni.remedies import about_pod
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.following import allows_none

log = logging.getLogger(__name__)

_NAMES_MORE: Final = 32
"""Number of names beyond the first that are looked for in the namespace."""


def follow(engine: Engine, record: ContainerRecord, pod: Pod, stdin: bytes, netns: PodNetns) -> ContainerRecord:
    """Do what the annotation asks for; return the record as it is stored then.

    The caller holds the container's lock; the record is complete, and `netns` is its namespace. `stdin`: that of an
    ADD. An empty or missing annotation asks for nothing. Raises CniError, also for a malformed annotation.
    """
    if record.lacks_routes:
        try:
            with engine.netns_held(netns.path):
                record = _routes_back(engine, record, netns)
        except CniError as error:
            # The networks do not wait for it.
            log.warning("%s", error)
    annotation = pod.annotations.get(selection.NETWORKS_ANNOTATION, "")
    if not annotation.strip() or pod.host_network:
        return record
    request = _request(record, netns, stdin)
    try:
        elements = selection.parse(annotation, pod_namespace=pod.namespace)
    except CniError as error:
        publish.failure(engine, pod, error, publish.INVALID, request)
        raise about_pod(error, pod) from error
    if not elements and not allows_none(pod.annotations):
        return record
    asked = changes.between(record, elements)
    if not (asked.leaving or asked.new):
        return record
    engine.gc.add_begins(record.sandbox.container_id)
    plan = _plan(engine, record, pod, asked, request, netns)
    publish.notices(engine, pod, plan.notices)
    if plan.refusal:
        publish.failure(engine, pod, plan.refusal, publish.INVALID if plan.is_invalid else publish.FAILED, request)
        raise plan.refusal
    done: ContainerRecord | None = None
    try:
        if asked.leaving:
            record = _detach(engine, record, asked, netns)
            publish.detached(engine.cluster, pod, asked.leaving)
        if asked.new:
            record = _attach(engine, record, pod, plan, request, netns)
        done = record
    except CniError as error:
        publish.failure(engine, pod, error, publish.FAILED, request)
        raise
    finally:
        statuses.after_change(engine, record.sandbox.container_id, pod, done)
    return record


def _request(record: ContainerRecord, netns: PodNetns, stdin: bytes) -> CniRequest:
    """Return the ADD that the runtime would send."""
    container_id = record.sandbox.container_id
    args = KubernetesArgs(record.pod_namespace, record.pod_name, record.pod_uid, container_id, ())
    return CniRequest("ADD", container_id, netns.path, record.ifname, args, stdin)


def _plan(
    engine: Engine, record: ContainerRecord, pod: Pod, asked: Changes, request: CniRequest, netns: PodNetns
) -> PodPlan:
    """Plan the new networks. Raises CniError for what is not the pod's fault."""
    inputs = gather_some(engine, pod, engine.policy.net_conf(request.stdin), asked.new)
    names = list(itertools.islice(changes.candidates(asked), len(asked.new) + _NAMES_MORE))
    names += [IfName(item.interface) for item in asked.new if item.interface]
    leaving = {item.ifname for item in asked.leaving}
    try:
        taken = [name for name in netns.existing(names) if name not in leaving]
    except OSError as error:
        raise InvalidNetnsError(f"{netns.path} can't be entered: {error}", f"pod {pod}") from error
    try:
        changes.refuse_second_gateway(asked)
        ifnames = changes.interface_names(asked, taken)
    except CniError as error:
        refusal = about_pod(error, pod)
        refusal.__cause__ = error
        return PodPlan(pod, refusal=refusal, is_invalid=True)
    return plan_more(request, inputs, asked.staying, ifnames, engine.runner, engine.devices.files)


def _detach(engine: Engine, record: ContainerRecord, asked: Changes, netns: PodNetns) -> ContainerRecord:
    how: Literal["success", "error"] = "error"
    try:
        record = detach(engine, replace(record, failing_since=0.0), netns, asked.leaving) or record
        if any(item.default_route for item in asked.leaving):
            with engine.netns_held(netns.path):
                record = _routes_back(engine, record, netns)
        how = "success"
        return record
    finally:
        engine.metrics.hotplug("DEL", how, len(asked.leaving))


def _routes_back(engine: Engine, record: ContainerRecord, netns: PodNetns) -> ContainerRecord:
    """Give the pod the default routes back that it had before one of its networks replaced them."""
    back = gateway.restore(netns, record.pod, record.attachments)
    for before, item in zip(record.attachments, back, strict=True):
        if item is not before:
            engine.runner.remember(record.sandbox, item, len(back))
    record = replace(record, attachments=back)
    engine.records.save(record)
    return record


def _attach(
    engine: Engine, record: ContainerRecord, pod: Pod, plan: PodPlan, request: CniRequest, netns: PodNetns
) -> ContainerRecord:
    how: Literal["success", "error"] = "error"
    try:
        with engine.netns_held(netns.path), contextlib.ExitStack() as undo:
            made: add.Attaching | None = None

            def routes_back() -> None:
                """After the new networks are detached; only if one of them has moved the routes."""
                if made is None or not any(item.default_route for item in plan.attachments):
                    return
                try:
                    left = engine.records.find(record.sandbox.container_id, search=False)
                    _routes_back(engine, left or made.base, netns)
                except CniError as error:
                    log.error("undoing the default route of pod %s failed: %s", record.pod, error)

            undo.callback(routes_back)
            made = add.attach(engine, record, plan, netns, undo, completes=False)
            asked = zip(made.new, (network.asked for network in plan.networks), strict=True)
            strict = engine.policy.net_conf(request.stdin).strict_requests
            notices = unsupported.after_add(pod, asked, strict=strict)
            add.keep(engine, made)
            undo.pop_all()
            how = "success"
    finally:
        engine.metrics.hotplug("ADD", how, len(plan.networks))
    publish.notices(engine, pod, notices)
    publish.plugged(engine.cluster, pod, made.new)
    publish.devices(engine, made.record, made.new)
    return made.record
