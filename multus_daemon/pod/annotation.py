"""Bring a running container to the networks of its pod's annotation: detach what is gone, attach what is new.

The whole change is planned before anything is detached, so a refusal changes nothing. Then what was detached stays
detached, and what fails to attach is undone; the next try looks at the record again.

The attachments are like those of the runtime's ADD: not `hot_plugged`, so CHECK and a repeated ADD expect them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, Literal

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.pod import changes, publish, statuses
from multus_daemon.pod.attach import attach, refuse, routes_back
from multus_daemon.pod.changes import Changes
from multus_daemon.pod.detach import detach
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.gather import gather
from multus_daemon.pod.plan import PodPlan, plan_pod
from multus_daemon.pod.request import CniRequest
from multus_daemon.spec.attachment import ContainerRecord, Pod, Sandbox
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
                record = routes_back(engine, record, netns)
        except CniError as error:
            # The networks do not wait for it.
            log.warning("%s", error)
    annotation = pod.annotations.get(selection.NETWORKS_ANNOTATION, "")
    if not annotation.strip() or pod.host_network:
        return record
    sandbox = Sandbox(record.sandbox.container_id, netns.path)
    try:
        elements = selection.parse(annotation, pod_namespace=pod.namespace)
    except CniError as error:
        publish.failure(engine, pod, error, publish.INVALID, sandbox)
        raise about_pod(error, pod) from error
    if not elements and not allows_none(pod.annotations):
        return record
    asked = changes.between(record, elements)
    if not (asked.leaving or asked.new):
        return record
    engine.gc.add_begins(record.sandbox.container_id)
    plan = _plan(engine, record, pod, asked, stdin, netns)
    refuse(engine, plan, sandbox)
    done: ContainerRecord | None = None
    try:
        if asked.leaving:
            with publish.failures(engine, pod, sandbox), _counted(engine, "DEL", len(asked.leaving)):
                record = _detach(engine, record, asked, netns)
            publish.detached(engine.cluster, pod, asked.leaving)
        if asked.new:
            with _counted(engine, "ADD", len(asked.new)):
                record, new = attach(engine, record, plan, netns)
            publish.plugged(engine.cluster, pod, new)
        done = record
    finally:
        statuses.after_change(engine, sandbox.container_id, pod, done)
    return record


@contextlib.contextmanager
def _counted(engine: Engine, verb: Literal["ADD", "DEL"], networks: int) -> Iterator[None]:
    """Count what becomes of the networks in the block."""
    how: Literal["success", "error"] = "error"
    try:
        yield
        how = "success"
    finally:
        engine.metrics.hotplug(verb, how, networks)


def _plan(engine: Engine, record: ContainerRecord, pod: Pod, asked: Changes, stdin: bytes, netns: PodNetns) -> PodPlan:
    """Plan the new networks. Raises CniError for what is not the pod's fault."""
    container_id = record.sandbox.container_id
    args = KubernetesArgs(record.pod_namespace, record.pod_name, record.pod_uid, container_id, ())
    # The ADD that the runtime would send.
    request = CniRequest("ADD", container_id, netns.path, record.ifname, args, stdin)
    inputs = gather(engine, pod, engine.policy.net_conf(request.stdin), asked.new)
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
    return plan_pod(request, inputs, engine.runner, engine.device_files, staying=asked.staying, ifnames=ifnames)


def _detach(engine: Engine, record: ContainerRecord, asked: Changes, netns: PodNetns) -> ContainerRecord:
    """Detach what is no longer asked for; return the record of the rest. Raises CniError."""
    record = detach(engine, replace(record, failing_since=0.0), netns, asked.leaving) or record
    if any(item.default_route for item in asked.leaving):
        with engine.netns_held(netns.path):
            return routes_back(engine, record, netns)
    return record
