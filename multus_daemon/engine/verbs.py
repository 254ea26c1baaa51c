"""The verbs of CNI for a whole pod, one at a time for each container."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from multus_daemon import deadlines
from multus_daemon.base.aio import Barriers, KeyedLock, SharedCalls
from multus_daemon.base.gates import Gates
from multus_daemon.cni.errors import (
    CniError,
    InvalidEnvironmentError,
    PluginNotAvailableError,
    TryAgainLaterError,
    UnknownContainerError,
)
from multus_daemon.cni.result import Result
from multus_daemon.engine import collect, delete, report, unmet
from multus_daemon.engine.attach import Attacher, interfaces_live
from multus_daemon.engine.check import Checker
from multus_daemon.engine.detach import Detacher
from multus_daemon.engine.devices import Devices
from multus_daemon.engine.hotplug import HotPlug
from multus_daemon.engine.orphans import Orphans
from multus_daemon.engine.report import Reporter, StatusWrite
from multus_daemon.engine.request import CniRequest, DelegateRequest
from multus_daemon.engine.resolve import Resolver
from multus_daemon.netconf.load import load
from multus_daemon.netconf.model import NetConf
from multus_daemon.ports import (
    Attachment,
    ClusterStore,
    ConfFiles,
    ContainerRecord,
    DelegateRunner,
    DelegateStore,
    DeviceFiles,
    DeviceSource,
    LinkOps,
)

log = logging.getLogger(__name__)

INDICATOR_GATE = "readiness-indicator"
"""While this gate is closed the primary network is not ready, and no pod is attached to it."""


class Verbs:
    """ADD, DEL, CHECK, STATUS and GC. Every method raises CniError and nothing else that is expected."""

    def __init__(
        self,
        cluster: ClusterStore,
        files: ConfFiles,
        runner: DelegateRunner,
        store: DelegateStore,
        links: LinkOps,
        *,
        devices: DeviceSource,
        device_files: DeviceFiles,
        gates: Gates,
        overlay: Mapping[str, Any],
        status_write: StatusWrite = "best-effort",
        clock: Callable[[], float] = time.time,
        count_unmet: Callable[[str], None] = unmet.count_nothing,
        count_collected: Callable[[str, int], None] = collect.count_nothing,
        attach_concurrency: int,
        delete_tries: int = 0,
        count_given_up: Callable[[], None] = delete.count_nothing,
    ) -> None:
        """`overlay`: the daemon's own keys, which win over those of each request; `clock`: Unix time in seconds;
        `count_unmet`: called with the name of each request of a pod that is not met; `count_collected`: see
        `engine.collect`; `attach_concurrency`: how many networks of one container are worked on side by side, from 1;
        `delete_tries`, `count_given_up`: see `engine.delete`, called once for each container.

        `status_write`: whether an ADD fails where the network-status can't be written (`required`) or not.
        """
        self._runner = runner
        self._links = links
        self._gates = gates
        self._overlay = overlay
        self._clock = clock
        self._locks = KeyedLock()
        dealer = Devices(devices, device_files)
        self._resolver = Resolver(cluster, files, dealer)
        barriers = Barriers()
        self._attacher = Attacher(runner, store, links, dealer, barriers, at_once=attach_concurrency)
        self._detacher = Detacher(runner, store, links, dealer, at_once=attach_concurrency)
        self._deleter = delete.Deleter(
            cluster, self._detacher, store, links, clock, tries=delete_tries, count_given_up=count_given_up
        )
        self.orphans = Orphans(cluster, self._detacher, store, links, self._locks)
        """Containers that nobody will delete any more."""
        self._checker = Checker(runner, links)
        self._reporter = Reporter(cluster, status_write)
        self._collector = collect.Collector(
            self._resolver,
            self._detacher,
            runner,
            store,
            links,
            locks=self._locks,
            barriers=barriers,
            count=count_collected,
        )
        self._status = SharedCalls()
        self._requests = unmet.Requests(cluster, count_unmet)
        self._hotplug = HotPlug(
            self._resolver, self._attacher, self._detacher, self._checker, self._reporter, self._requests, links, clock
        )

    async def add(self, request: CniRequest) -> Result:
        """Attach every network of the pod; the cluster network's result.

        A repeated ADD for a container that lives returns what the first one did and touches nothing.
        """
        self._collector.begins(request.container_id)
        async with self._locks.hold(request.container_id):
            record = await self._detacher.find(request.container_id, search=False)
            plugged: tuple[Attachment, ...] = ()
            if record is not None:
                if await self._lives(record, request):
                    log.info("ADD of container %s repeated: the stored result is returned", request.container_id)
                    return _cluster_result(record)
                plugged = await self._detacher.detach_leftover(record, request.netns)
            return await self._add(request, plugged)

    async def _add(self, request: CniRequest, plugged: tuple[Attachment, ...]) -> Result:
        """Attach every network of the pod; `plugged` is in the container already and stays."""
        if reason := self._gates.closed.get(INDICATOR_GATE):
            raise TryAgainLaterError(reason)
        net_conf = load(request.stdin, self._overlay)
        pod = await self._resolver.pod(request)
        with self._reporter.telling_of_failure(pod, report.INVALID):
            attachments = await self._resolver.attachments(request, pod, net_conf)
        base = ContainerRecord(
            sandbox=request.sandbox,
            ifname=request.ifname,
            pod_namespace=pod.namespace,
            pod_name=pod.name,
            pod_uid=request.args.uid or pod.uid,
            attachments=plugged,
            created=self._clock(),
        )
        with self._reporter.telling_of_failure(pod, report.FAILED):
            self._requests.before_add(pod, attachments, strict=net_conf.strict_requests)
            async with self._attacher.attached(base, attachments, request.netns, completes=True) as record:
                self._requests.after_add(pod, record.attachments, strict=net_conf.strict_requests)
                await self._reporter.attached(pod, record)
        return _cluster_result(record)

    async def _lives(self, record: ContainerRecord, request: CniRequest) -> bool:
        """True where the record is that of a finished ADD whose interfaces are all still there."""
        if not record.complete or record.sandbox.netns != request.netns or not self._links.is_netns(request.netns):
            return False
        if record.ifname != request.ifname:
            raise InvalidEnvironmentError(
                f"CNI_IFNAME is {request.ifname!r}, and container {request.container_id} has its cluster network on "
                f"{record.ifname!r}",
                f"pod {record.pod}",
            )
        # What was plugged in later comes and goes by itself.
        own = [attachment for attachment in record.attachments if not attachment.hot_plugged]
        return await interfaces_live(self._links, request.netns, own)

    async def delete(self, request: CniRequest) -> None:
        """Detach what the record of the container names; a container without one is done. See `engine.delete`."""
        async with self._locks.hold(request.container_id):
            await self._deleter.delete(request)

    async def check(self, request: CniRequest) -> None:
        """Check every attachment of the container against its stored result."""
        async with self._locks.hold(request.container_id):
            record = await self._detacher.find(request.container_id, search=True)
            if record is None:
                raise UnknownContainerError(
                    f"container {request.container_id} has no networks here",
                    f"pod {request.args.namespace}/{request.args.name}: no ADD is on record",
                )
            await self._checker.check(record, request.netns)

    async def plug(self, request: DelegateRequest) -> Result:
        """Attach one network to a running container; its result."""
        self._collector.begins(request.container_id)
        async with self._locks.hold(request.container_id):
            # The request's configuration is the network's own: what is ours can only be the daemon's.
            strict = load(b"{}", self._overlay).strict_requests
            return await self._hotplug.add(request, strict=strict)

    async def unplug(self, request: DelegateRequest) -> None:
        """Detach one network from a container; what is not attached is done."""
        async with self._locks.hold(request.container_id):
            await self._hotplug.delete(request)

    async def check_plugged(self, request: DelegateRequest) -> None:
        """Check one network of a container against its stored result."""
        async with self._locks.hold(request.container_id):
            await self._hotplug.check(request)

    async def status(self, stdin: bytes) -> None:
        """Whether an ADD could be served now: by the daemon, and by each plugin of the cluster network.

        Raises CniError: 50 (PluginNotAvailableError), or what a plugin said. Runtimes ask every 5 s, CRI-O at its start
        every 0.5 s, so calls for the same configuration share one run: a plugin that hangs does so once.
        """
        net_conf = load(stdin, self._overlay)
        if closed := self._gates.closed:
            raise PluginNotAvailableError(
                "the daemon is not ready: " + ", ".join(f"{name}: {reason}" for name, reason in closed.items())
            )
        await self._status.of(stdin, lambda: self._ask_cluster_network(net_conf))

    async def _ask_cluster_network(self, net_conf: NetConf) -> None:
        deadline = asyncio.timeout(deadlines.STATUS_PLUGINS_SECONDS)
        try:
            async with deadline:
                try:
                    config = (await self._resolver.networks_of_every_pod(net_conf))[0]
                except CniError as error:
                    raise PluginNotAvailableError(f"{error.msg} (STATUS)", error.details) from error
                await self._runner.status(config)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise PluginNotAvailableError(
                f"STATUS of the cluster network did not end within {deadlines.STATUS_PLUGINS_SECONDS:g} s",
                "which of its plugins hangs, the metric multus_delegate_duration_seconds tells",
            ) from error

    async def gc(self, stdin: bytes) -> None:
        """Remove what belongs to no container of the runtime's list, on every network; see `engine.collect`."""
        await self._collector.collect(load(stdin, self._overlay))


def _cluster_result(record: ContainerRecord) -> Result:
    """The cluster network's result; where none is known as that (upstream's files), the first network's."""
    attachments = sorted(record.attachments, key=lambda attachment: not attachment.cluster_network)
    return (attachments[0].result if attachments else None) or Result()
