"""GC for the whole node: containers that the runtime no longer has are deleted, then every network's plugins are asked.

CNI SPEC, section 2 "GC". The runtime's list is authoritative, but it is not believed against what can be seen: a
container that it does not list, and in whose network namespace processes run, is left alone and told of.

Plugins get what is attached to their own network by what then is on record, so nothing that is left alone is freed by
them. Each network is asked once, by name: the name, with container and interface, is what CNI keys state by, and copies
of one network that differ are mostly one definition with what single pods asked for. The configuration is the one that
an ADD would get now, as libcni has it; for a network that only records tell of, that of the newest record.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from multus_daemon import deadlines
from multus_daemon.pod import quarantine, schedule
from multus_daemon.pod.delete import detach, held_if_free, is_elsewhere, joined
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.gather import Lookup
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import ContainerRecord
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import CniError, IoFailureError, TryAgainLaterError
from multus_daemon.spec.cni.names import ContainerId, IfName
from multus_daemon.spec.netconf.model import NetConf
from multus_daemon.spec.netconf.primary import OWN_TYPES

log = logging.getLogger(__name__)

_BATCH: Final = 200
# Each batch lists all that there is: some seconds where there are 300,000 files. In memory it is some 10 MB.
_LEFTOVERS_BATCH: Final = 1000
_NAMED_IN_LOG: Final = 5

Found = Mapping[ContainerId, ContainerRecord | None]


@dataclass
class _Run:
    """One GC, as far as it has come. Several threads delete at once: they only append, and take out their own."""

    listed: frozenset[ContainerId]
    """The containers that the runtime has."""
    began: float
    """On the monotonic clock."""
    networks: dict[str, tuple[float, NetworkConfig]] = field(default_factory=dict)
    """By name: when the record was made, and the configuration in it."""
    foreign: dict[ContainerId, ContainerRecord] = field(default_factory=dict)
    """What stays of another daemon's."""
    in_use: list[ContainerRecord] = field(default_factory=list)
    put_off: list[ContainerId] = field(default_factory=list)
    """Containers for which the time did not suffice."""
    unknown_because: str = ""
    """Why it is not known what is attached; empty where it is."""
    failures: list[CniError] = field(default_factory=list)

    def left(self, until: float) -> float:
        """Seconds until the point `until` of this run."""
        return self.began + until - time.monotonic()

    def note(self, record: ContainerRecord) -> None:
        """Remember the record's networks, and the record if it is another daemon's."""
        for attachment in record.attachments:
            known = self.networks.get(attachment.config.name)
            if known is None or known[0] <= record.created:
                self.networks[attachment.config.name] = (record.created, attachment.config)
        if record.foreign:
            self.foreign[record.sandbox.container_id] = record


def gc(engine: Engine, stdin: bytes) -> None:
    """Delete what is stale, then run GC of every network; without a list of the runtime's nothing.

    One at a time. One failure does not stop the others; what the time does not suffice for is left to the next GC.
    Raises CniError: the first failure with its code, the others in the details.
    """
    net_conf = engine.policy.net_conf(stdin)
    if net_conf.valid_attachments is None:
        log.info("GC without a list of valid attachments: cannot determine which attachments are stale")
        return
    listed = frozenset(ContainerId(container_id) for container_id, _ in net_conf.valid_attachments)
    run = _Run(listed, time.monotonic())
    try:
        with engine.gc.watched(engine.locks), engine.gc.lock.hold("GC"):
            _sweep(engine, run)
            _ask_networks(engine, run, net_conf)
    finally:
        _tell(run)
    if run.failures:
        raise joined(run.failures)


# --- containers --------------------------------------------------------------------------------------------------


def _sweep(engine: Engine, run: _Run) -> None:
    """Delete the stale containers: ours, then what another daemon left."""
    try:
        known = engine.records.store.containers(foreign=False)
        for start in range(0, len(known), _BATCH):
            _batch(engine, run, engine.records.read(known[start : start + _BATCH]))
        seen: set[ContainerId] = set()
        while found := engine.records.store.leftovers(seen, _LEFTOVERS_BATCH):
            if run.left(deadlines.GC_SWEEP_SECONDS) <= 0:
                run.unknown_because = "there was no time to look at everything that another daemon left"
                break
            _batch(engine, run, found)
            seen |= found.keys()
    except OSError as error:
        raise IoFailureError(f"records of containers can't be read: {error}", "no GC of plugins is run") from error


def _batch(engine: Engine, run: _Run, found: Found) -> None:
    """Delete the stale ones of `found`. Raises OSError."""
    unlisted: list[ContainerRecord] = []
    for container_id, record in found.items():
        if record is None:
            _unreadable(engine, run, container_id)
            continue
        if record.foreign and record.attachments:
            record = _without_ourselves(record)
            if not record.attachments:
                continue
        run.note(record)
        if container_id not in run.listed and not _in_flight(engine, container_id):
            # Whoever lives in another namespace at its path does not live in its own.
            unlisted.append(record.in_netns("") if is_elsewhere(engine.links, record, record.sandbox.netns) else record)
    in_use = engine.links.netns_in_use({record.sandbox.netns for record in unlisted})
    to_delete: list[ContainerRecord] = []
    for record in unlisted:
        if record.sandbox.netns in in_use:
            run.in_use.append(record)
            engine.metrics.collected("left", len(record.attachments))
        else:
            to_delete.append(record)
    schedule.side_by_side(to_delete, functools.partial(_delete_in_turn, engine, run))


def _unreadable(engine: Engine, run: _Run, container_id: ContainerId) -> None:
    """What it held, nobody knows. Where the runtime has it, no plugin may free anything for what it lacks."""
    if container_id in run.listed:
        run.unknown_because = f"the record of container {container_id}, which runs, can't be read"
    else:
        run.failures.append(
            IoFailureError(
                f"record of container {container_id} is damaged",
                f"free by hand what it held, then: multusctl attachments forget {container_id}",
            )
        )


def _in_flight(engine: Engine, container_id: ContainerId) -> bool:
    return engine.gc.may_be_added(container_id) or container_id in engine.locks.keys


def _delete_in_turn(engine: Engine, run: _Run, record: ContainerRecord) -> None:
    container_id = record.sandbox.container_id
    seconds = min(deadlines.GC_CONTAINER_SECONDS, run.left(deadlines.GC_SWEEP_SECONDS))
    if seconds <= 0:
        run.put_off.append(container_id)
        return
    with held_if_free(engine.locks, container_id) as is_ours:
        # An ADD may also have come and gone since the record was read.
        if not is_ours or engine.gc.may_be_added(container_id):
            return
        log.info("GC: container %s of pod %s is deleted: the runtime has it no more", container_id, record.pod)
        try:
            detach(engine, record, engine.links.open(record.sandbox.netns), seconds=seconds)
        except CniError as error:
            if not quarantine.quarantine_if_due(engine, container_id, error):
                run.failures.append(error)
            engine.metrics.collected("failed", len(record.attachments))
        else:
            run.foreign.pop(container_id, None)
            engine.metrics.collected("collected", len(record.attachments))


# --- networks ----------------------------------------------------------------------------------------------------


def _ask_networks(engine: Engine, run: _Run, net_conf: NetConf) -> None:
    """GC of every network that is declared for all pods, or that a record named before the sweep."""
    cluster_network, declared = _declared(engine, net_conf)
    if run.unknown_because:
        log.warning("GC: plugins are not asked to free anything: %s", run.unknown_because)
        return
    networks = {name: config for name, (_, config) in run.networks.items()}
    for config in (networks | declared).values():
        seconds = min(deadlines.GC_NETWORK_SECONDS, run.left(deadlines.GC_TOTAL_SECONDS))
        if seconds <= 0:
            log.warning("GC: network %s and those behind it are left to the next GC", config.name)
            return
        try:
            _ask(engine, run, net_conf, config, seconds, is_cluster_network=config.name == cluster_network)
        except CniError as error:
            run.failures.append(error)


def _declared(engine: Engine, net_conf: NetConf) -> tuple[str, dict[str, NetworkConfig]]:
    """The cluster network's name, and by name what can be resolved of what every pod gets."""
    networks = Lookup(engine.cluster, engine.files, net_conf)
    found: list[NetworkConfig] = []
    name = ""
    try:
        found = networks.of_every_pod()
        name = found[0].name
    except CniError as error:
        log.warning("GC: the cluster network is asked only as far as records know it: %s", error)
    found += networks.default_networks()
    return name, {config.name: config for config in found}


def _ask(
    engine: Engine, run: _Run, net_conf: NetConf, config: NetworkConfig, seconds: float, *, is_cluster_network: bool
) -> None:
    """GC of one network's plugins. An ADD that is not on record yet waits until they are done. Raises CniError."""
    try:
        with engine.gc.barriers.closed(config.name), deadline.within(seconds):
            records = _records(engine, run)
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
            engine.runner.gc(config, sorted(valid))
    except deadline.ExpiredError as error:
        raise TryAgainLaterError(f"network {config.name}: GC did not end within {seconds:.0f} s") from error


def _records(engine: Engine, run: _Run) -> dict[ContainerId, ContainerRecord]:
    """Every record as it is now, and what stays of another daemon's. Raises IoFailureError."""
    try:
        own = engine.records.read_all()
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
    if run.in_use:
        some = ", ".join(f"{record.pod} ({record.sandbox.container_id})" for record in run.in_use[:_NAMED_IN_LOG])
        log.warning(
            "GC: %d containers are not in the runtime's list, and processes run in them: left alone: %s%s",
            len(run.in_use), some, ", ..." if len(run.in_use) > _NAMED_IN_LOG else "",
        )  # fmt: skip
    if run.put_off:
        log.warning("GC: %d stale containers are left to the next GC: no time", len(run.put_off))
