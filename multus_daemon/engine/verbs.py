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
from multus_daemon.engine.attach import Attacher
from multus_daemon.engine.check import Checker
from multus_daemon.engine.detach import Detacher
from multus_daemon.engine.report import Reporter
from multus_daemon.engine.request import CniRequest
from multus_daemon.engine.resolve import Resolver
from multus_daemon.netconf.load import load
from multus_daemon.ports import ClusterStore, ConfFiles, ContainerRecord, DelegateRunner, DelegateStore, LinkOps

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
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`overlay`: the daemon's own keys, which win over those of each request; `clock`: Unix time in seconds."""
        self._store = store
        self._links = links
        self._gates = gates
        self._overlay = overlay
        self._clock = clock
        self._locks = KeyedLock()
        self._resolver = Resolver(cluster, files)
        self._attacher = Attacher(runner, store, links)
        self._detacher = Detacher(runner, store)
        self._checker = Checker(runner, links)
        self._reporter = Reporter(cluster)

    async def add(self, request: CniRequest) -> Result:
        """Attach every network of the pod; the cluster network's result.

        A repeated ADD for a container that lives returns what the first one did and touches nothing.
        """
        async with self._locks.hold(request.container_id):
            record = self._detacher.load(request.container_id)
            if record is not None:
                if await self._lives(record, request):
                    log.info("ADD of container %s repeated: the stored result is returned", request.container_id)
                    return _cluster_result(record)
                await self._detacher.detach_leftover(record)
            net_conf = load(request.stdin, self._overlay)
            pod = await self._resolver.pod(request)
            attachments = await self._resolver.attachments(request, pod, net_conf)
            record = await self._attacher.attach(
                ContainerRecord(
                    sandbox=request.sandbox,
                    ifname=request.ifname,
                    pod_namespace=pod.namespace,
                    pod_name=pod.name,
                    pod_uid=request.args.uid or pod.uid,
                    attachments=attachments,
                    created=self._clock(),
                )
            )
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
        made = [
            attachment.ifname
            for attachment in record.attachments
            if attachment.result
            and any(item.name == attachment.ifname and item.sandbox for item in attachment.result.interfaces)
        ]
        return await self._links.existing_links(request.netns, made) == made

    async def delete(self, request: CniRequest) -> None:
        """Detach what the record of the container names; a container without one is done."""
        async with self._locks.hold(request.container_id):
            record = self._detacher.load(request.container_id)
            if record is None:
                log.info("DEL of container %s: nothing is known of it, so it is done", request.container_id)
                return
            await self._detacher.detach(record, request.netns)

    async def check(self, request: CniRequest) -> None:
        """Check every attachment of the container against its stored result."""
        async with self._locks.hold(request.container_id):
            record = self._detacher.load(request.container_id)
            if record is None:
                raise UnknownContainerError(
                    f"container {request.container_id} has no networks here",
                    f"pod {request.args.namespace}/{request.args.name}: no ADD is on record",
                )
            await self._checker.check(record, request.netns)

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
            record = self._detacher.load(container_id)
            # An ADD that began after the runtime made its list has a living namespace: it is never touched.
            if record is None or self._links.is_netns(record.sandbox.netns):
                return
            await self._detacher.detach(record, record.sandbox.netns)


def _cluster_result(record: ContainerRecord) -> Result:
    """The first network's result; it is the cluster network's."""
    return record.attachments[0].result or Result()
