"""ADD, DEL and CHECK of one network of a running container (hot-plug), as clients of `/delegate` ask for them.

The network is added to the container's record, so that the pod's DEL, CHECK and GC cover it. The daemon's own
configuration does not change the network's, nor its CNI version.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.pod import check, publish
from multus_daemon.pod.add import interfaces_live
from multus_daemon.pod.annotation import NAMES_MAX, other_names
from multus_daemon.pod.attach import attach, refuse
from multus_daemon.pod.detach import detach
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.gather import Inputs, find_pod
from multus_daemon.pod.networks import refuse_too_many
from multus_daemon.pod.plan import PodPlan, plan_network
from multus_daemon.pod.request import DelegateRequest
from multus_daemon.pod.upstream import DEFAULT_IFNAME
from multus_daemon.runtime import timeline
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Pod, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import InvalidNetnsError, InvalidNetworkConfigError, Origin, UnknownContainerError
from multus_daemon.spec.cni.names import IfName
from multus_daemon.spec.cni.result import Result

log = logging.getLogger(__name__)


def add_network(engine: Engine, request: DelegateRequest) -> Result:
    """Attach the network; return its result, the stored one if it is attached already. Raises CniError.

    A request without an interface name gets the next free `net<N>`, but not for a network that the container already
    has: a client that repeats such a request would get one more interface each time.
    """
    container_id = request.container_id
    with engine.serving(request) as netns:
        engine.gc.add_begins(container_id)
        if problem := netns.problem:
            raise InvalidNetnsError(f"{netns.path} {problem}", _of(request))
        record = _record(engine, request)
        if record and netns.is_elsewhere(record.netns_id):
            raise InvalidNetnsError(
                f"{netns.path} is not the network namespace that container {container_id} had at its ADD",
                _of(request),
            )
        leftovers = []
        for present in record.attachments if record else ():
            wanted = present.config.name == request.network and request.ifname in ("", present.ifname)
            if wanted and present.is_attached and interfaces_live(netns, [present]):
                if not request.ifname:
                    raise InvalidNetworkConfigError(
                        f"network {request.network} is attached as {present.ifname!r} already, and the request names "
                        f"no interface ({_of(request)})",
                        remedy="to attach the network once more, name another interface (ifname)",
                        origin=Origin.CALL,
                    )
                log.info("network %s is attached as %s: the stored result is returned", present.name, present.ifname)
                return present.result or Result()
            if wanted:
                _refuse_own(present, request, "it comes with the pod")
            cut_off = present.hot_plugged and not present.is_attached and present.ifname == request.ifname
            if wanted or cut_off:
                leftovers.append(present)
        with timeline.stage("gather"):
            pod = find_pod(engine.cluster, request.args)
        sandbox = Sandbox(container_id, netns.path)
        with publish.failures(engine, pod, sandbox):
            base, plan = _planned(engine, request, pod, netns, record, leftovers)
        refuse(engine, plan, sandbox)
        _, (done,) = attach(engine, base, plan, netns)
        with timeline.stage("publish"):
            publish.added(engine.cluster, pod, done)
        return done.result or Result()


def _planned(
    engine: Engine,
    request: DelegateRequest,
    pod: Pod,
    netns: PodNetns,
    record: ContainerRecord | None,
    leftovers: list[Attachment],
) -> tuple[ContainerRecord, PodPlan]:
    """Detach leftovers of the network; return the record without them, and the plan. Raises CniError."""
    config = conf.parse_written(request.stdin)
    # The request's configuration is the network's own: our keys are in the daemon's.
    net_conf = engine.net_conf(b"{}")
    # Before the leftovers are undone: a request that is refused changes nothing.
    refuse_too_many(request.network, request.ips, request.cni_args, net_conf)
    if record and leftovers:
        log.warning("network %s of %s is only partly attached: it is detached first", leftovers[0].name, _of(request))
        record = detach(engine, record, netns, leftovers)
    # A new record is never complete, so no ADD or CHECK takes it for the pod's own.
    sandbox, uid = Sandbox(request.container_id, request.netns), request.args.uid or pod.uid
    base = record or ContainerRecord(sandbox, DEFAULT_IFNAME, pod.namespace, pod.name, uid, (), created=engine.clock())
    with timeline.stage("gather"):
        ifname = request.ifname or _free_name(request, base, netns)
        inputs = Inputs(pod, net_conf, programs=engine.runner.programs((config,)))
    with timeline.stage("plan"):
        return base, plan_network(request, config, ifname, inputs, engine.runner)


def _free_name(request: DelegateRequest, record: ContainerRecord, netns: PodNetns) -> IfName:
    """Return the first name `net<N>` that neither the record nor the namespace has. Raises CniError."""
    used = {record.ifname, *(item.ifname for item in record.attachments)}
    try:
        if name := next((name for name in other_names(used) if not netns.existing([name])), None):
            return name
    except OSError as error:
        raise InvalidNetnsError(f"{request.netns} can't be entered: {error}", _of(request)) from error
    raise InvalidNetworkConfigError(f"no interface name is free up to net{NAMES_MAX}", _of(request), origin=Origin.CALL)


def remove_network(engine: Engine, request: DelegateRequest) -> None:
    """Detach the network if the container's record has it. Raises CniError.

    Otherwise no plugin runs, and the DEL succeeds: clients also send a DEL for an ADD that was refused, and may name
    another pod's namespace by mistake.
    """
    with engine.serving(request) as netns:
        if not request.ifname:
            log.warning("DEL of network %s of %s names no interface: nothing to delete", request.network, _of(request))
            return
        record = _record(engine, request)
        if record and (present := _present(record, request)):
            _refuse_own(present, request, "it goes with the pod")
            detach(engine, record, netns, [present])
        else:
            # A plugin would remove any interface of that name from any namespace that the request names.
            log.warning(
                "DEL of network %s of %s: container %s has no such network on %s: nothing to delete",
                request.network, _of(request), request.container_id, request.ifname,
            )  # fmt: skip


def check_network(engine: Engine, request: DelegateRequest) -> None:
    """CHECK the network against its stored result. Raises CniError, UnknownContainerError (3) if not attached."""
    with engine.serving(request) as netns:
        record = _record(engine, request)
        present = _present(record, request) if record else None
        if record is None or present is None or not present.is_attached:
            raise UnknownContainerError(
                f"network {request.network} is not attached as {request.ifname!r}",
                f"{_of(request)}: no ADD has succeeded",
            )
        strict = engine.net_conf(b"{}").strict_check
        check.check_some(engine, record, [present], netns, strict=strict)


def _refuse_own(attachment: Attachment, request: DelegateRequest, advice: str) -> None:
    """Refuse to change a network of the pod's own ADD by hot-plug. Raises InvalidNetworkConfigError (7)."""
    if attachment.cluster_network or attachment.auxiliary:
        kind = "auxiliary chain" if attachment.auxiliary else "cluster network"
        raise InvalidNetworkConfigError(
            f"network {attachment.name} is the {kind} of {_of(request)} and can't be changed",
            remedy=advice,
            origin=Origin.CALL,
        )


def _present(record: ContainerRecord, request: DelegateRequest) -> Attachment | None:
    wanted = (request.ifname, request.network)
    return next((item for item in record.attachments if (item.ifname, item.config.name) == wanted), None)


def _record(engine: Engine, request: DelegateRequest) -> ContainerRecord | None:
    """Return the container's record; upstream's as if it were complete: the container runs, or no client would ask.

    Without a cluster network in it, its networks do not count as part of the runtime's ADD. Raises IoFailureError (5).
    """
    with timeline.stage("record"):
        record = engine.records.find(request.container_id, search=True)
    if record is None or not record.foreign:
        return record
    attachments = record.attachments
    cluster = next((item for item in attachments if item.cluster_network), None)
    if cluster is None:
        attachments = tuple(replace(item, hot_plugged=True) for item in attachments)
    complete = cluster is not None and cluster.result is not None
    return replace(record, attachments=attachments, complete=complete, foreign=False)


def _of(request: DelegateRequest) -> str:
    """Return the pod as a text for messages; the container if the request names no pod."""
    args = request.args
    return f"pod {args.namespace}/{args.name}" if args.has_pod else f"container {request.container_id}"
