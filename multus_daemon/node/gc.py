"""Collect garbage on the node: delete containers that the runtime no longer has, then run GC of every network.

CNI SPEC, section 2 "GC". Containers that the runtime does not list are deleted, but not if processes run in their
network namespace: such a container is logged.

Plugins get the attachments of their network that are still on record, so they do not free resources of these. GC runs
once for each network name, as CNI state belongs to a network name, container and interface. It gets the configuration
that an ADD would get now, like libcni; for a network that only records mention, that of the newest record.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from multus_daemon import deadlines
from multus_daemon.node.orphans import left_by_others
from multus_daemon.pod import schedule
from multus_daemon.pod.delete import quarantine_if_due
from multus_daemon.pod.detach import detach, held_if_free, is_elsewhere, joined
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.networks import Lookup
from multus_daemon.pod.records import by_hand
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import ContainerRecord
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import CniError, IoFailureError, TryAgainLaterError
from multus_daemon.spec.cni.names import ContainerId, IfName
from multus_daemon.spec.netconf import OWN_TYPES, NetConf

log = logging.getLogger(__name__)

_BATCH: Final = 200
_NAMED_IN_LOG: Final = 5


@dataclass
class _Run:
    """Progress of one GC. Its threads delete concurrently; each only appends, and removes its own container."""

    listed: frozenset[ContainerId]
    """The containers of the runtime's list."""
    began: float
    """When the GC arrived, on the monotonic clock."""
    networks: dict[str, tuple[float, NetworkConfig]] = field(default_factory=dict)
    """By network name: creation time of the newest record that mentions it, and the configuration there."""
    foreign: dict[ContainerId, ContainerRecord] = field(default_factory=dict)
    """Records of upstream's daemon that were not deleted."""
    unknown_because: str = ""
    """Why the attachments are not known; empty if they are."""
    failures: list[CniError] = field(default_factory=list)

    def left(self, until: float) -> float:
        """Return the seconds that are left of the first `until` seconds of this run."""
        return self.began + until - time.monotonic()

    def note(self, record: ContainerRecord) -> None:
        """Add the record's networks to `networks`, and upstream's record to `foreign`."""
        for attachment in record.attachments:
            known = self.networks.get(attachment.config.name)
            if known is None or known[0] <= record.created:
                self.networks[attachment.config.name] = (record.created, attachment.config)
        if record.foreign:
            self.foreign[record.sandbox.container_id] = record


def gc(engine: Engine, stdin: bytes) -> None:
    """Delete stale containers, then run GC of every network; without the runtime's list do nothing.

    Only one GC runs at a time. It continues after failures, and leaves the rest to the next GC when its time is over.
    Raises the first failure as CniError with its code, the others in its details.
    """
    net_conf = engine.net_conf(stdin)
    if net_conf.valid_attachments is None:
        log.info(
            "GC without a list of valid attachments from the runtime: cannot determine which attachments are stale"
        )
        return
    listed = frozenset(ContainerId(container_id) for container_id, _ in net_conf.valid_attachments)
    run = _Run(listed, time.monotonic())
    with engine.gc.watched(lambda: engine.at_work), engine.gc.lock.hold("GC"):
        _sweep(engine, run)
        _collect_networks(engine, run, net_conf)
    if run.failures:
        raise joined(run.failures)


def _sweep(engine: Engine, run: _Run) -> None:
    """Delete stale containers: first those of our records, then those of upstream's."""
    try:
        known = engine.records.containers()
        for start in range(0, len(known), _BATCH):
            _batch(engine, run, engine.records.read(known[start : start + _BATCH]))
        for found in left_by_others(engine):
            if run.left(deadlines.GC_SWEEP_SECONDS) <= 0:
                run.unknown_because = "there was no time to look at everything that another daemon left"
                break
            _batch(engine, run, found)
    except OSError as error:
        raise IoFailureError(f"records of containers can't be read: {error}", "no GC of plugins is run") from error


def _batch(engine: Engine, run: _Run, found: Mapping[ContainerId, ContainerRecord | None]) -> None:
    """Delete the stale containers of `found`. Raises OSError."""
    unlisted: list[ContainerRecord] = []
    for container_id, record in found.items():
        if record is None:
            if container_id in run.listed:
                # It exists: plugins would free its resources, which are not known.
                run.unknown_because = f"the record of container {container_id}, which runs, can't be read"
                continue
            error = IoFailureError(f"record of container {container_id} is damaged", remedy=by_hand(container_id))
            run.failures.append(error)
            continue
        if record.foreign and record.attachments:
            # The runtime's cache, if it is in our cniDir, also has attachments to Multus itself.
            others = [item for item in record.attachments if OWN_TYPES.isdisjoint(p.type for p in item.config.plugins)]
            if not others:
                continue
            record = replace(record, attachments=tuple(others))
        run.note(record)
        is_in_flight = engine.gc.may_be_added(container_id) or container_id in engine.at_work
        if container_id not in run.listed and not is_in_flight:
            # Processes in another namespace at the same path do not keep this container.
            unlisted.append(
                record.in_netns("")
                if is_elsewhere(engine.namespaces, record.netns_id, record.sandbox.netns)
                else record
            )
    in_use = engine.namespaces.netns_in_use({record.sandbox.netns for record in unlisted})
    if kept := [record for record in unlisted if record.sandbox.netns in in_use]:
        some = ", ".join(f"{record.pod} ({record.sandbox.container_id})" for record in kept[:_NAMED_IN_LOG])
        text = "GC: %d containers are not in the runtime's list, and processes run in them: left alone, such as %s"
        log.warning(text, len(kept), some)
        engine.metrics.collected.labels("skipped").inc(sum(len(record.attachments) for record in kept))
    to_delete = [record for record in unlisted if record.sandbox.netns not in in_use]
    schedule.side_by_side(to_delete, functools.partial(_delete_in_turn, engine, run))


def _delete_in_turn(engine: Engine, run: _Run, record: ContainerRecord) -> None:
    container_id = record.sandbox.container_id
    seconds = min(deadlines.GC_CONTAINER_SECONDS, run.left(deadlines.GC_SWEEP_SECONDS))
    if seconds <= 0:
        log.warning("GC: container %s of pod %s is left to the next GC: no time", container_id, record.pod)
        return
    with held_if_free(engine, container_id) as is_ours:
        # An ADD may have begun or ended since the record was read.
        if not is_ours or engine.gc.may_be_added(container_id):
            return
        log.info("GC: container %s of pod %s is deleted: the runtime no longer has it", container_id, record.pod)
        try:
            detach(engine, record, engine.namespaces.open(record.sandbox.netns), seconds=seconds)
        except CniError as error:
            if not quarantine_if_due(engine, container_id, error):
                run.failures.append(error)
            engine.metrics.collected.labels("error").inc(len(record.attachments))
        else:
            run.foreign.pop(container_id, None)
            engine.metrics.collected.labels("success").inc(len(record.attachments))


def _collect_networks(engine: Engine, run: _Run, net_conf: NetConf) -> None:
    """Run GC of every network that is declared for all pods, or that a record mentioned before the sweep."""
    lookup = Lookup(engine.cluster, engine.files, net_conf)
    declared: list[NetworkConfig] = []
    cluster_network = ""
    try:
        declared = lookup.of_every_pod()
        cluster_network = declared[0].name
    except CniError as error:
        log.warning("GC: the cluster network is collected only if a record mentions it: %s", error)
    declared += lookup.default_networks()
    if run.unknown_because:
        log.warning("GC: the plugins' GC is not run: %s", run.unknown_because)
        return
    networks = {name: config for name, (_, config) in run.networks.items()}
    for config in (networks | {config.name: config for config in declared}).values():
        seconds = min(deadlines.GC_NETWORK_SECONDS, run.left(deadlines.GC_TOTAL_SECONDS))
        if seconds <= 0:
            log.warning("GC: network %s and the following ones are left to the next GC: no time", config.name)
            return
        try:
            _collect(engine, run, net_conf, config, seconds, is_cluster_network=config.name == cluster_network)
        except CniError as error:
            run.failures.append(error)


def _collect(
    engine: Engine, run: _Run, net_conf: NetConf, config: NetworkConfig, seconds: float, *, is_cluster_network: bool
) -> None:
    """Run GC of one network's plugins, during which ADDs of the network wait. Raises CniError."""
    try:
        with engine.gc.networks.hold(config.name), deadline.within(seconds):
            records = _records(engine, run)
            valid = {
                (container_id, attachment.ifname)
                for container_id, record in records.items()
                for attachment in record.attachments
                if attachment.config.name == config.name
            }
            if is_cluster_network:
                # Pods that are older than Multus on this node have no record.
                valid |= {
                    (ContainerId(container_id), IfName(ifname))
                    for container_id, ifname in net_conf.valid_attachments or ()
                    if container_id not in records
                }
            engine.runner.gc(config, sorted(valid))
    except deadline.ExpiredError as error:
        raise TryAgainLaterError(f"network {config.name}: GC did not end within {seconds:.0f} s") from error


def _records(engine: Engine, run: _Run) -> dict[ContainerId, ContainerRecord]:
    """Return all records as they are now, with upstream's that remain. Raises IoFailureError."""
    try:
        own = engine.records.read(engine.records.containers())
    except OSError as error:
        raise IoFailureError(f"records of containers can't be read: {error}") from error
    return run.foreign | {container_id: record for container_id, record in own.items() if record is not None}
