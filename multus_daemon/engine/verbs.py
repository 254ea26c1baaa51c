"""The verbs of CNI for a whole pod, one at a time for each container."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from multus_daemon.base.aio import KeyedLock
from multus_daemon.base.gates import Gates
from multus_daemon.cni.errors import (
    CniError,
    InvalidEnvironmentError,
    PluginNotAvailableError,
    UnknownContainerError,
)
from multus_daemon.cni.names import ContainerId
from multus_daemon.cni.result import Result
from multus_daemon.engine import report
from multus_daemon.engine.attach import Attacher, interfaces_live
from multus_daemon.engine.check import Checker
from multus_daemon.engine.detach import Detacher
from multus_daemon.engine.hotplug import HotPlug
from multus_daemon.engine.report import Reporter, StatusWrite
from multus_daemon.engine.request import CniRequest, DelegateRequest
from multus_daemon.engine.resolve import Resolver
from multus_daemon.netconf.load import load
from multus_daemon.ports import (
    Attachment,
    ClusterStore,
    ConfFiles,
    ContainerRecord,
    DelegateRunner,
    DelegateStore,
    LinkOps,
)

log = logging.getLogger(__name__)


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
        gates: Gates,
        overlay: Mapping[str, Any],
        status_write: StatusWrite = "best-effort",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`overlay`: the daemon's own keys, which win over those of each request; `clock`: Unix time in seconds.

        `status_write`: whether an ADD fails where the network-status can't be written (`required`) or not.
        """
        self._store = store
        self._links = links
        self._gates = gates
        self._overlay = overlay
        self._clock = clock
        self._locks = KeyedLock()
        self._resolver = Resolver(cluster, files)
        self._attacher = Attacher(runner, store, links)
        self._detacher = Detacher(runner, store, links)
        self._checker = Checker(runner, links)
        self._reporter = Reporter(cluster, status_write)
        self._hotplug = HotPlug(
            self._resolver, self._attacher, self._detacher, self._checker, self._reporter, links, clock
        )

    async def add(self, request: CniRequest) -> Result:
        """Attach every network of the pod; the cluster network's result.

        A repeated ADD for a container that lives returns what the first one did and touches nothing.
        """
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
            async with self._attacher.attached(base, attachments, request.netns, completes=True) as record:
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
        """Detach what the record of the container names; a container without one is done."""
        async with self._locks.hold(request.container_id):
            record = await self._detacher.find(request.container_id, search=True)
            if record is None:
                log.info("DEL of container %s: nothing is known of it, so it is done", request.container_id)
                return
            await self._detacher.detach(record, request.netns)

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
        async with self._locks.hold(request.container_id):
            return await self._hotplug.add(request)

    async def unplug(self, request: DelegateRequest) -> None:
        """Detach one network from a container; what is not attached is done."""
        async with self._locks.hold(request.container_id):
            await self._hotplug.delete(request)

    async def check_plugged(self, request: DelegateRequest) -> None:
        """Check one network of a container against its stored result."""
        async with self._locks.hold(request.container_id):
            await self._hotplug.check(request)

    async def status(self, stdin: bytes) -> None:
        """Whether an ADD could be served now. Raises PluginNotAvailableError (50)."""
        load(stdin, self._overlay)
        if closed := self._gates.closed:
            raise PluginNotAvailableError(
                "the daemon is not ready: " + ", ".join(f"{name}: {reason}" for name, reason in closed.items())
            )

    async def gc(self, stdin: bytes) -> None:
        """Detach the containers that the runtime no longer lists and whose namespace is gone.

        Without a list nothing is known to be stale. One failure does not stop the others.
        """
        valid = load(stdin, self._overlay).valid_attachments
        if valid is None:
            return
        known = {container_id for container_id, _ in valid}
        failures = []
        for container_id in await asyncio.to_thread(self._store.containers):
            if container_id not in known:
                try:
                    await self._collect(container_id)
                except CniError as error:
                    failures.append(error)
        if failures:
            raise failures[0].with_context(f"and {len(failures) - 1} more") if len(failures) > 1 else failures[0]

    async def _collect(self, container_id: ContainerId) -> None:
        async with self._locks.hold(container_id):
            record = await self._detacher.find(container_id, search=False)
            # An ADD that began after the runtime made its list has a living namespace: it is never touched.
            if record is None or self._links.is_netns(record.sandbox.netns):
                return
            await self._detacher.detach(record, record.sandbox.netns)


def _cluster_result(record: ContainerRecord) -> Result:
    """The cluster network's result; where none is known as that (upstream's files), the first network's."""
    attachments = sorted(record.attachments, key=lambda attachment: not attachment.cluster_network)
    return (attachments[0].result if attachments else None) or Result()
