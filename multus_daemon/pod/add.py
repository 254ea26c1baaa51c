"""ADD: attach all networks of a pod, or none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.pod import publish
from multus_daemon.pod.attach import attach, refuse
from multus_daemon.pod.detach import detach
from multus_daemon.pod.engine import INDICATOR_GATE, Engine
from multus_daemon.pod.gather import find_pod, gather
from multus_daemon.pod.plan import plan_pod
from multus_daemon.pod.request import CniRequest
from multus_daemon.runtime import timeline
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni.errors import InvalidEnvironmentError, InvalidNetnsError, TryAgainLaterError, parted
from multus_daemon.spec.cni.result import Result

log = logging.getLogger(__name__)


def add(engine: Engine, request: CniRequest) -> Result:
    """Attach every network of the pod, or none; return the cluster network's result. Raises CniError.

    A repeated ADD for a running container returns the stored result and changes nothing but an outdated network-status.
    """
    sandbox = Sandbox(request.container_id, request.netns)
    with engine.serving(request) as netns:
        # A GC that runs now may have read the records already: it spares this container.
        engine.gc.add_begins(sandbox.container_id)
        with timeline.stage("record"):
            record = engine.records.find(sandbox.container_id, search=False)
        staying: tuple[Attachment, ...] = ()
        if record is not None:
            if _lives(record, netns, request):
                log.info("ADD of container %s repeated: the stored result is returned", sandbox.container_id)
                publish.after_repeated_add(engine, record)
                return _cluster_result(record)
            staying = _detach_leftover(engine, record, netns)
        # The primary network is not ready, and the pod would be attached to nothing.
        if reason := engine.gates.closed.get(INDICATOR_GATE):
            cause, remedy = parted(reason)
            raise TryAgainLaterError(cause, remedy=remedy)
        with timeline.stage("gather"):
            net_conf = engine.net_conf(request.stdin)
            pod = find_pod(engine.cluster, request.args)
            inputs = gather(engine, pod, net_conf)
        with timeline.stage("plan"):
            plan = plan_pod(request, inputs, engine.runner, engine.device_files)
        refuse(engine, plan, sandbox)
        timeline.note(f"networks: {', '.join(item.name for item in plan.attachments)}")
        uid = request.args.uid or pod.uid
        base = ContainerRecord(sandbox, request.ifname, pod.namespace, pod.name, uid, staying, created=engine.clock())
        record, _ = attach(engine, base, plan, netns, completes=True)
        with timeline.stage("publish"):
            publish.attached(engine, pod, record)
        timeline.note("network-status handed over")
        return _cluster_result(record)


def _lives(record: ContainerRecord, netns: PodNetns, request: CniRequest) -> bool:
    """Return True if the record is of a finished ADD whose interfaces all still exist. Raises CniError."""
    if not record.complete or record.sandbox.netns != netns.path or not netns.exists:
        return False
    if netns.is_elsewhere(record.netns_id):
        return False
    if record.ifname != request.ifname:
        raise InvalidEnvironmentError(
            f"CNI_IFNAME is {request.ifname!r}, but container {request.container_id} was added with {record.ifname!r}",
            f"pod {record.pod}",
        )
    # A hot-plugged network comes and goes by itself, and one whose DEL has begun goes.
    return interfaces_live(netns, [item for item in record.attachments if item.is_attached and not item.hot_plugged])


def interfaces_live(netns: PodNetns, attachments: Sequence[Attachment]) -> bool:
    """Return True if the namespace has every interface of the attachments' results. Raises InvalidNetnsError."""
    made = [attachment.ifname for attachment in attachments if attachment.has_interface]
    try:
        return netns.existing(made) == made
    except OSError as error:
        raise InvalidNetnsError(f"{netns.path} can't be entered: {error}") from error


def _detach_leftover(engine: Engine, record: ContainerRecord, netns: PodNetns) -> tuple[Attachment, ...]:
    """Undo an ADD that never finished, or whose container is gone, in the namespace that it used.

    Returns the attachments that stay on record: the hot-plugged networks of the container that runs in `netns`, and
    those of which only a cached result could not be removed. Raises CniError.
    """
    log.warning(
        "container %s of pod %s has an unfinished or outdated record: undone first",
        record.sandbox.container_id,
        record.pod,
    )
    lives = record.sandbox.netns == netns.path and netns.exists and not netns.is_elsewhere(record.netns_id)
    leaving = [item for item in record.attachments if not (lives and item.hot_plugged and item.is_attached)]
    rest = detach(engine, replace(record, complete=False), netns.at(record.sandbox.netns), leaving)
    return rest.attachments if rest else ()


def _cluster_result(record: ContainerRecord) -> Result:
    """Return the cluster network's result; that of the first network if upstream's files do not say which one it is."""
    attachments = record.attachments
    cluster = next((item for item in attachments if item.cluster_network), attachments[0] if attachments else None)
    return (cluster and cluster.result) or Result()
