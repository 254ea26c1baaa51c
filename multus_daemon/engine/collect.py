"""GC for the whole node: containers that the runtime no longer has are deleted, then every network's plugins are asked.

CNI SPEC, section 2 "GC". The runtime's list is authoritative, but it is not believed against what can be seen: a
container that it does not list, and in whose network namespace processes run, is left alone and told of.

Plugins get what is attached to their own network by what then is on record, so nothing that is left alone is freed by
them. Each network is asked once, by name: the name, with container and interface, is what CNI keys state by, and copies
of one network that differ are mostly one definition with what single pods asked for. The configuration is the one that
an ADD would get now, as libcni has it; for a network that only records tell of, that of the newest record.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from multus_daemon import deadlines
from multus_daemon.base.aio import Barriers, KeyedLock, in_thread
from multus_daemon.cni.conf import NetworkConfig
from multus_daemon.cni.errors import CniError, IoFailureError, TryAgainLaterError
from multus_daemon.cni.names import ContainerId, IfName
from multus_daemon.engine import stale
from multus_daemon.engine.detach import Detacher, joined
from multus_daemon.engine.resolve import Resolver
from multus_daemon.netconf.model import NetConf
from multus_daemon.netconf.primary import OWN_TYPES
from multus_daemon.ports import ContainerRecord, DelegateRunner, DelegateStore, LinkOps

log = logging.getLogger(__name__)

_BATCH: Final = 200
# Each batch lists all that there is: some seconds where there are 300,000 files. In memory it is some 10 MB.
_LEFTOVERS_BATCH: Final = 1000
_NAMED_IN_LOG: Final = 5

Found = Mapping[ContainerId, ContainerRecord | None]


def count_nothing(_outcome: str, _attachments: int) -> None:
    """For who does not count."""


@dataclass
class _Run:
    """One GC, as far as it has come."""

    listed: frozenset[ContainerId]
    """The containers that the runtime has."""
    began: float
    """On the event loop's clock."""
    networks: dict[str, tuple[float, NetworkConfig]] = field(default_factory=dict)
    """By name: when the record was made, and the configuration in it."""
    foreign: dict[ContainerId, ContainerRecord] = field(default_factory=dict)
    """What stays of another daemon's."""
    inhabited: list[ContainerRecord] = field(default_factory=list)
    put_off: int = 0
    """Containers for which the time did not suffice."""
    blind: str = ""
    """Why it is not known what is attached; empty where it is."""
    failures: list[CniError] = field(default_factory=list)

    def left(self, until: float) -> float:
        """Seconds until the point `until` of this run."""
        return self.began + until - asyncio.get_running_loop().time()

    def note(self, record: ContainerRecord) -> None:
        """Remember the record's networks, and the record if it is another daemon's."""
        for attachment in record.attachments:
            known = self.networks.get(attachment.config.name)
            if known is None or known[0] <= record.created:
                self.networks[attachment.config.name] = (record.created, attachment.config)
        if record.foreign:
            self.foreign[record.sandbox.container_id] = record


class Collector:
    """Serves GC. ADDs tell it that they begin, and pass `barriers` between their record and their first plugin."""

    def __init__(
        self,
        resolver: Resolver,
        detacher: Detacher,
        runner: DelegateRunner,
        store: DelegateStore,
        links: LinkOps,
        *,
        locks: KeyedLock,
        barriers: Barriers,
        count: Callable[[str, int], None] = count_nothing,
    ) -> None:
        """`locks`: of the containers; `barriers`: of the networks, by name.

        `count` is called with `collected`, `left` or `failed`, and a number of attachments.
        """
        self._resolver = resolver
        self._detacher = detacher
        self._runner = runner
        self._store = store
        self._links = links
        self._locks = locks
        self._barriers = barriers
        self._count = count
        self._one = asyncio.Lock()
        self._pending = 0
        self._begun: set[ContainerId] = set()

    def begins(self, container_id: ContainerId) -> None:
        """An ADD for the container begins: a GC that has been asked for already can't mean it."""
        if self._pending:
            self._begun.add(container_id)

    async def collect(self, net_conf: NetConf) -> None:
        """Delete what is stale, then run GC of every network; without a list of the runtime's nothing.

        One at a time. One failure does not stop the others; what the time does not suffice for is left to the next GC.
        Raises CniError: the first failure with its code, the others in the details.
        """
        if net_conf.valid_attachments is None:
            log.info("GC without a list of valid attachments: nothing can be told to be stale")
            return
        listed = frozenset(ContainerId(container_id) for container_id, _ in net_conf.valid_attachments)
        run = _Run(listed, asyncio.get_running_loop().time())
        self._pending += 1
        self._begun |= {ContainerId(key) for key in self._locks.keys}
        try:
            async with self._one:
                await self._sweep(run)
                await self._ask_networks(run, net_conf)
        finally:
            self._pending -= 1
            if not self._pending:
                self._begun.clear()
            _tell(run)
        if run.failures:
            raise joined(run.failures)

    # --- containers --------------------------------------------------------------------------------------------------

    async def _sweep(self, run: _Run) -> None:
        """Delete the stale containers: ours, then what another daemon left."""
        try:
            known = await in_thread(self._store.containers, foreign=False)
            for start in range(0, len(known), _BATCH):
                await self._batch(run, await in_thread(stale.read, self._store, known[start : start + _BATCH]))
            seen: set[ContainerId] = set()
            while found := await in_thread(self._store.leftovers, seen, _LEFTOVERS_BATCH):
                if run.left(deadlines.GC_SWEEP_SECONDS) <= 0:
                    run.blind = "there was no time to look at everything that another daemon left"
                    break
                await self._batch(run, found)
                seen |= found.keys()
        except OSError as error:
            raise IoFailureError(f"records of containers can't be read: {error}", "no GC of plugins is run") from error

    async def _batch(self, run: _Run, found: Found) -> None:
        """Delete the stale ones of `found`. Raises OSError."""
        unlisted: list[ContainerRecord] = []
        for container_id, record in found.items():
            if record is None:
                self._unreadable(run, container_id)
                continue
            if record.foreign and record.attachments:
                record = _without_ourselves(record)
                if not record.attachments:
                    continue
            run.note(record)
            if container_id not in run.listed and not self._in_flight(container_id):
                unlisted.append(record)
        inhabited = await self._links.inhabited({record.sandbox.netns for record in unlisted})
        to_delete: list[ContainerRecord] = []
        for record in unlisted:
            if record.sandbox.netns in inhabited:
                run.inhabited.append(record)
                self._count("left", len(record.attachments))
            else:
                to_delete.append(record)
        await stale.side_by_side(to_delete, functools.partial(self._delete_in_turn, run))

    def _unreadable(self, run: _Run, container_id: ContainerId) -> None:
        """What it held, nobody knows. Where the runtime has it, no plugin may free anything for what it lacks."""
        if container_id in run.listed:
            run.blind = f"the record of container {container_id}, which runs, can't be read"
        else:
            run.failures.append(
                IoFailureError(
                    f"record of container {container_id} is damaged",
                    "what it held must be freed by hand; remove the file then",
                )
            )

    def _in_flight(self, container_id: ContainerId) -> bool:
        return container_id in self._begun or container_id in self._locks.keys

    async def _delete_in_turn(self, run: _Run, record: ContainerRecord) -> None:
        container_id = record.sandbox.container_id
        seconds = min(deadlines.GC_CONTAINER_SECONDS, run.left(deadlines.GC_SWEEP_SECONDS))
        if seconds <= 0:
            run.put_off += 1
        elif not self._in_flight(container_id):
            async with self._locks.hold(container_id):
                log.info("GC: container %s of pod %s is deleted: the runtime has it no more", container_id, record.pod)
                try:
                    await self._detacher.detach(record, record.sandbox.netns, seconds=seconds)
                except CniError as error:
                    run.failures.append(error)
                    self._count("failed", len(record.attachments))
                else:
                    run.foreign.pop(container_id, None)
                    self._count("collected", len(record.attachments))

    # --- networks ----------------------------------------------------------------------------------------------------

    async def _ask_networks(self, run: _Run, net_conf: NetConf) -> None:
        """GC of every network that is declared for all pods, or that a record named before the sweep."""
        cluster_network, declared = await self._declared(net_conf)
        if run.blind:
            log.warning("GC: plugins are not asked to free anything: %s", run.blind)
            return
        networks = {name: config for name, (_, config) in run.networks.items()}
        for config in (networks | declared).values():
            seconds = min(deadlines.GC_NETWORK_SECONDS, run.left(deadlines.GC_TOTAL_SECONDS))
            if seconds <= 0:
                log.warning("GC: network %s and those behind it are left to the next GC", config.name)
                return
            try:
                await self._ask(run, net_conf, config, seconds, is_cluster_network=config.name == cluster_network)
            except CniError as error:
                run.failures.append(error)

    async def _declared(self, net_conf: NetConf) -> tuple[str, dict[str, NetworkConfig]]:
        """The cluster network's name, and by name what can be resolved of what every pod gets."""
        found: list[NetworkConfig] = []
        name = ""
        try:
            found = await self._resolver.networks_of_every_pod(net_conf)
            name = found[0].name
        except CniError as error:
            log.warning("GC: the cluster network is asked only as far as records know it: %s", error)
        found += await self._resolver.default_networks(net_conf)
        return name, {config.name: config for config in found}

    async def _ask(
        self, run: _Run, net_conf: NetConf, config: NetworkConfig, seconds: float, *, is_cluster_network: bool
    ) -> None:
        """GC of one network's plugins. An ADD that is not on record yet waits until they are done. Raises CniError."""
        limit = asyncio.timeout(seconds)
        try:
            async with self._barriers.closed(config.name), limit:
                records = await self._records(run)
                valid = {
                    (container_id, attachment.ifname)
                    for container_id, record in records.items()
                    for attachment in record.attachments
                    if attachment.config.name == config.name
                }
                if is_cluster_network:
                    # A pod of before our time: the runtime knows it, we have no record.
                    valid |= {
                        (ContainerId(container_id), IfName(ifname))
                        for container_id, ifname in net_conf.valid_attachments or ()
                        if container_id not in records
                    }
                await self._runner.gc(config, sorted(valid))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TryAgainLaterError(f"network {config.name}: GC did not end within {seconds:.0f} s") from error

    async def _records(self, run: _Run) -> dict[ContainerId, ContainerRecord]:
        """Every record as it is now, and what stays of another daemon's. Raises IoFailureError."""
        try:
            own = await in_thread(stale.read_all, self._store)
        except OSError as error:
            raise IoFailureError(f"records of containers can't be read: {error}") from error
        return run.foreign | {container_id: record for container_id, record in own.items() if record is not None}


def _without_ourselves(record: ContainerRecord) -> ContainerRecord:
    """Without the attachments to Multus: where the runtime's cache is in our cniDir, that has them too."""
    others = [
        attachment
        for attachment in record.attachments
        if not any(plugin.type in OWN_TYPES for plugin in attachment.config.plugins)
    ]
    return replace(record, attachments=tuple(others))


def _tell(run: _Run) -> None:
    if run.inhabited:
        some = ", ".join(f"{record.pod} ({record.sandbox.container_id})" for record in run.inhabited[:_NAMED_IN_LOG])
        log.warning(
            "GC: %d containers are not in the runtime's list, and processes run in them: left alone: %s%s",
            len(run.inhabited), some, ", ..." if len(run.inhabited) > _NAMED_IN_LOG else "",
        )  # fmt: skip
    if run.put_off:
        log.warning("GC: %d stale containers are left to the next GC: no time", run.put_off)
