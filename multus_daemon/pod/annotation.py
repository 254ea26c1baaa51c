"""Make the networks of a running container follow its pod's annotation: detach removed ones, attach new ones.

The whole change is planned before anything is detached, so a refusal changes nothing. After that, a network that fails
to attach is undone, and detached networks stay detached; the next attempt begins with the record.

The attachments are like those of the runtime's ADD: not `hot_plugged`, so CHECK and a repeated ADD expect them.

The elements of the annotation are compared with those that the recorded attachments were made for. An attachment that
stays keeps its interface name. A changed element is a new one: its old attachment is detached, and a new one is made.
So is an attachment whose ADD or DEL was cut off: it has no result, or is marked as leaving. An attachment that was not
made for an element is detached only if its DEL has begun: the cluster network, the networks of every pod, those of
`/delegate`, and those of an earlier version, whose records do not name the element.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.pod import publish
from multus_daemon.pod.attach import attach, refuse, routes_back
from multus_daemon.pod.detach import detach
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.gather import gather
from multus_daemon.pod.plan import PodPlan, plan_pod
from multus_daemon.pod.request import CniRequest
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Pod, Sandbox
from multus_daemon.spec.cni.errors import (
    ASK_INTERFACE,
    CniError,
    InvalidAnnotationError,
    InvalidNetnsError,
    about_pod,
)
from multus_daemon.spec.cni.names import IfName, KubernetesArgs
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.selection import NetworkSelection, allows_none

log = logging.getLogger(__name__)

NAMES_MAX: Final = 256
"""The largest N of an interface name `net<N>`."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The attachments that stay and those that are detached for an annotation, and the networks to attach."""

    staying: tuple[Attachment, ...]
    leaving: tuple[Attachment, ...] = ()
    new: tuple[NetworkSelection, ...] = ()
    """The elements to attach, in the order of the annotation."""


def follow(engine: Engine, record: ContainerRecord, pod: Pod, stdin: bytes, netns: PodNetns) -> ContainerRecord:
    """Detach and attach networks as the annotation asks; return the record as stored after that.

    The caller holds the container's lock; the record is complete, and `netns` is its namespace. `stdin`: configuration
    as for an ADD. An empty or missing annotation asks for no network. Raises CniError, also for a malformed annotation.
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
    asked = between(record, elements)
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
        publish.after_change(engine, sandbox.container_id, pod, done)
    return record


@contextlib.contextmanager
def _counted(engine: Engine, verb: Literal["ADD", "DEL"], networks: int) -> Iterator[None]:
    """Count the networks of the block in the metrics, by the outcome of the block."""
    how: Literal["success", "error"] = "error"
    try:
        yield
        how = "success"
    finally:
        engine.metrics.hotplugged.labels(verb, how).inc(networks)


def _plan(engine: Engine, record: ContainerRecord, pod: Pod, asked: Changes, stdin: bytes, netns: PodNetns) -> PodPlan:
    """Plan the new networks. Raises CniError for errors that the pod's author did not cause."""
    container_id = record.sandbox.container_id
    args = KubernetesArgs(record.pod_namespace, record.pod_name, record.pod_uid, container_id, ())
    # The ADD that the runtime would send.
    request = CniRequest("ADD", container_id, netns.path, record.ifname, args, stdin)
    inputs = gather(engine, pod, engine.net_conf(request.stdin), asked.new)
    leaving = {item.ifname for item in asked.leaving}
    try:
        refuse_second_gateway(asked)
        ifnames = interface_names(asked, lambda name: name not in leaving and bool(netns.existing([name])))
    except OSError as error:
        raise InvalidNetnsError(f"{netns.path} can't be entered: {error}", f"pod {pod}") from error
    except CniError as error:
        refusal = about_pod(error, pod)
        refusal.__cause__ = error
        return PodPlan(pod, refusal=refusal, is_invalid=True)
    return plan_pod(request, inputs, engine.runner, engine.device_files, staying=asked.staying, ifnames=ifnames)


def _detach(engine: Engine, record: ContainerRecord, asked: Changes, netns: PodNetns) -> ContainerRecord:
    """Detach the networks that the annotation no longer names; return the record of the others. Raises CniError."""
    record = detach(engine, replace(record, failing_since=0.0), netns, asked.leaving) or record
    if any(item.default_route for item in asked.leaving):
        with engine.netns_held(netns.path):
            return routes_back(engine, record, netns)
    return record


def wanted(annotation: str, namespace: str) -> tuple[str, ...]:
    """Return the elements of an annotation in canonical form, sorted. Raises CniError."""
    return tuple(sorted(item.canonical for item in selection.parse(annotation, pod_namespace=namespace)))


def between(record: ContainerRecord, elements: Sequence[NetworkSelection]) -> Changes:
    """Return which attachments to detach, and which `elements` to attach, so that the container has exactly `elements`.

    The order of the elements does not matter for attachments that stay.
    """
    by_selection: dict[str, list[Attachment]] = {}
    unmarked: list[Attachment] = []
    for item in record.attachments:
        if wanted_by := item.attached_for:
            by_selection.setdefault(wanted_by, []).append(item)
        elif not (item.cluster_network or item.auxiliary):
            unmarked.append(item)
    missing = []
    for element in elements:
        if present := by_selection.get(element.canonical):
            present.pop(0)
        else:
            missing.append(element)
    # Those that name an interface choose first: the others take what is left.
    found = {
        id(element)
        for element in sorted(missing, key=lambda element: not element.interface)
        if _is_there(element, unmarked)
    }
    new = [element for element in missing if id(element) not in found]
    leaving = [item for items in by_selection.values() for item in items]
    gone = set(map(id, leaving))
    staying = tuple(item for item in record.attachments if id(item) not in gone)
    return Changes(staying, tuple(item for item in record.attachments if id(item) in gone), tuple(new))


def _is_there(element: NetworkSelection, unmarked: list[Attachment]) -> bool:
    """Remove the first attachment that may be made for the element from `unmarked`; return True if there is one."""
    for position, item in enumerate(unmarked):
        if item.name == str(element) and element.interface in ("", item.ifname):
            del unmarked[position]
            return True
    return False


def interface_names(changes: Changes, is_taken: Callable[[IfName], bool]) -> list[IfName]:
    """Name the interfaces of the new networks: as the element says, else the lowest free `net<N>`.

    `is_taken`: returns True if a link that belongs to no attachment has the name. Raises InvalidNetworkConfigError (7).
    """
    owners = {item.ifname: item.name for item in changes.staying if not item.auxiliary}
    used = {item.ifname for item in changes.staying} | {IfName(item.interface) for item in changes.new}
    free = (name for name in other_names(used) if not is_taken(name))
    names: list[IfName] = []
    for element in changes.new:
        name = IfName(element.interface) if element.interface else next(free, None)
        if name is None:
            problem = f"no interface name is free for network {element} up to net{NAMES_MAX}"
            raise InvalidAnnotationError(problem, remedy=ASK_INTERFACE)
        if owner := owners.get(name):
            raise InvalidAnnotationError(
                f"interface name {name!r} of network {element} is taken by network {owner}",
                remedy=ASK_INTERFACE,
            )
        if is_taken(name):
            problem = f"interface {name!r} of network {element} already exists in the pod"
            raise InvalidAnnotationError(problem, remedy=ASK_INTERFACE)
        owners[name] = str(element)
        names.append(name)
    return names


def refuse_second_gateway(changes: Changes) -> None:
    """Refuse a new network with `default-route` if one that stays has it too. Raises InvalidNetworkConfigError (7)."""
    asking = next((item for item in changes.new if item.default_route), None)
    holding = next((item for item in changes.staying if item.default_route), None)
    if asking and holding:
        raise InvalidAnnotationError(
            f"default-route is set twice: for network {holding.name} and for network {asking}",
            remedy="remove it from one of them",
        )


def other_names(used: Collection[IfName]) -> Iterator[IfName]:
    """Yield each `net<N>` that is not in `used`, from the lowest."""
    names = (IfName(f"net{number}") for number in range(1, NAMES_MAX + 1))
    return (name for name in names if name not in used)
