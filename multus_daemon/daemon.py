"""The composition root: create every object from the settings, run the root tasks, stop them in order."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import socket
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multus_daemon import __version__, deadlines, logs
from multus_daemon.answers.questions import ByMethod
from multus_daemon.api.admin import AdminApi
from multus_daemon.api.app import UnixServer
from multus_daemon.api.cni import CniApi
from multus_daemon.api.metrics_port import metrics_tasks
from multus_daemon.api.verbs import Verbs
from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.cluster.devices import Devices, NodeDeviceFiles, of_kubelet
from multus_daemon.kernel.pod_netns import NodeNamespaces
from multus_daemon.metrics import Metrics
from multus_daemon.node import allowances, at_start, keep
from multus_daemon.node.address_book import NodeAddressBook
from multus_daemon.node.addresses import Addresses
from multus_daemon.node.holders import Holders
from multus_daemon.node.keep import Keep
from multus_daemon.node.orphans import Orphans
from multus_daemon.node.primary import config
from multus_daemon.node.primary.config import PrimaryConfig
from multus_daemon.node.spool import SpoolReplay
from multus_daemon.node.traffic import Traffic
from multus_daemon.plugins import strays
from multus_daemon.plugins.builtin.host_local_store import usage
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.plugins.leases import Leases
from multus_daemon.plugins.limit import ProcessLimit
from multus_daemon.plugins.process import MINIMAL_ENVIRON, ProcessRunner, ToolRunner
from multus_daemon.plugins.run import ListRunner
from multus_daemon.plugins.select import Plugins
from multus_daemon.pod.engine import LOCKS, Engine
from multus_daemon.pod.records import Records
from multus_daemon.pod.store import FileStore
from multus_daemon.runtime import aio, fs, malloc, threads
from multus_daemon.runtime.aio import StartError, end, until_signal
from multus_daemon.runtime.gates import Gates
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.runtime.timeline import Timelines
from multus_daemon.settings import Settings
from multus_daemon.spec.cni.errors import CniError, explain_command
from multus_daemon.spec.ports import ClusterStore

if TYPE_CHECKING:
    from multus_daemon.answers import status
    from multus_daemon.cluster.kube.claims import Claims
    from multus_daemon.cluster.kube.store import KubeStore
    from multus_daemon.cluster.standalone.store import StandaloneStore

log = logging.getLogger(__name__)

_STDOUT = 1


def run(settings: Settings, *, standalone: Path | None) -> None:
    """Run until SIGTERM or SIGINT. Raises StartError, and the exception that ended a root task."""
    if standalone is not None and not standalone.is_dir():
        raise StartError(f"--standalone {standalone}: no such directory")
    asyncio.run(serve(settings, standalone))


def free(settings: Settings) -> dict[str, str]:
    """Detach the containers of deleted pods without serving requests; return the errors by container id.

    It needs no cluster: a DEL uses only the record. Raises StartError, OSError.
    """

    async def work() -> dict[str, str]:
        from multus_daemon.cluster.standalone.store import StandaloneStore

        gates = Gates()
        # No directory: which pods still exist is not known.
        cluster = StandaloneStore(Path(os.devnull), gates)
        return await Daemon(settings, cluster, gates, Metrics(version=__version__)).free()

    return asyncio.run(work())


async def serve(settings: Settings, standalone: Path | None) -> None:
    """Create the cluster store and the daemon, and serve until a signal. Raises StartError."""
    gates = Gates("socket") if standalone is not None else Gates("socket", "pods", "networks")
    log.info("multus-daemon %s starts, with up to %d descriptors", __version__, aio.raise_limit())
    for warning in settings.warnings:
        log.warning("configuration: %s", warning)
    log.debug("settings in force: %s", json.dumps(settings.effective()))
    metrics = Metrics(version=__version__)
    metrics.measure("multus_log_lines_dropped_total", logs.dropped)
    metrics.measure("multus_ready", lambda: gates.conditions)
    metrics.measure("multus_degraded", lambda: {name: not holds for name, holds in gates.degraded.conditions.items()})
    if standalone is None:
        await _serve_kubernetes(settings, gates, metrics)
        return
    # Import only the store that is used: this one needs yaml, the other kubernetes_asyncio.
    from multus_daemon.cluster.standalone.store import StandaloneStore

    store = StandaloneStore(standalone, gates)
    daemon = Daemon(settings, store, gates, metrics, store)
    await daemon.serve({"cluster": store.run(), **metrics_tasks(metrics, gates, settings.metrics, os.environ)})


async def _serve_kubernetes(settings: Settings, gates: Gates, metrics: Metrics) -> None:
    from multus_daemon.cluster.kube.access import TokenAccess
    from multus_daemon.cluster.kube.connect import Connection, resolve_node_name
    from multus_daemon.cluster.kube.store import Cluster, KubeStore

    if problem := PrimaryConfig.missing(settings):
        log.warning("not ready: %s", problem)
        gates.close(config.GATE, problem)
    connection = Connection(settings.kubernetes, gates, os.environ)
    async with connection.client:
        await connection.load()
        node = await resolve_node_name(connection.client, os.environ, socket.gethostname())
        namespace, taint = settings.kubernetes.addresses_namespace, settings.kubernetes.startup_taint
        store = KubeStore(connection.client, node, gates, metrics=metrics, namespace=namespace, startup_taint=taint)
        connection.client.count = metrics.api_request
        metrics.measure(
            "multus_informer_stale_seconds",
            lambda: {"pods": store.pods.stale_seconds, "networks": store.networks.stale_seconds},
        )
        metrics.measure_one("multus_network_statuses_pending", lambda: store.statuses.pending)
        name = "multus_client_certificate_expiration_timestamp_seconds"
        metrics.measure_one(name, lambda: connection.certificate_expires)
        try:
            daemon = Daemon(settings, Cluster(store, LoopPortal()), gates, metrics, store)
            port = metrics_tasks(metrics, gates, settings.metrics, os.environ, TokenAccess(connection.client))
            await daemon.serve({"cluster": store.run(), "credentials": connection.run(), **port})
        finally:
            await store.drain(deadlines.REPORT_SECONDS)


def _passed_on(names: Sequence[str]) -> dict[str, str]:
    """Return the variables `names` of the daemon's environment, for plugins; log missing ones."""
    if missing := [name for name in names if name not in os.environ]:
        log.warning(
            "pluginEnv: these variables are not set in the daemon's environment, so plugins do not get them: %s",
            ", ".join(missing),
        )
    return {name: os.environ[name] for name in names if name in os.environ}


def _plugins(
    settings: Settings,
    limit: ProcessLimit,
    way: LoopPortal,
    metrics: Metrics,
    leases: Leases,
    addresses: NodeAddressBook,
) -> Plugins:
    """Return the plugins of the node, built-in and binaries. Raises StartError."""
    paths, plugins = settings.paths, settings.plugins
    try:
        fs.ensure_directory(Path(paths.cni_dir))
        process = ProcessRunner(
            [paths.bin_dir],
            chroot_dir=paths.chroot_dir,
            timeout=plugins.delegate_timeout_seconds,
            environ={**MINIMAL_ENVIRON, **_passed_on(plugins.environment)},
            limit=limit,
            portal=way,
        )
        tools = ToolRunner(chroot_dir=paths.chroot_dir, at_once=limit.slots.size)
    except (OSError, ValueError) as error:
        raise StartError(str(error)) from error
    chosen = Plugins(
        process,
        plugins.builtin_plugins,
        excepted=plugins.builtin_plugins_except,
        host_root=Path(paths.chroot_dir or "/"),
        tools=tools,
        leases=leases,
        addresses=addresses,
        observe=metrics.plugin,
    )
    try:
        chosen.log_binaries(paths.bin_dir)
    except CniError as error:
        log.error("%s", error)
    return chosen


def _engine(
    settings: Settings,
    cluster: ClusterStore,
    gates: Gates,
    metrics: Metrics,
    limit: ProcessLimit,
    claims: Claims | None,
    leases: Leases,
    addresses: NodeAddressBook,
) -> Engine:
    """Return the engine, and register its gauges. Raises StartError."""
    paths, way = settings.paths, LoopPortal()
    plugins, cache = _plugins(settings, limit, way, metrics, leases, addresses), ResultCache(Path(paths.cni_dir))
    records = Records(FileStore(Path(paths.cni_dir), cache, upstream_too=paths.upstream_records))
    metrics.measure("multus_ipam_used_ratio", usage.ratios)
    if settings.metrics.attachment_traffic != "off":
        metrics.measure_traffic(Traffic(records.view).figures)
    metrics.measure("multus_attachments", lambda: records.view.counts)
    return Engine(
        cluster,
        NodeConfFiles(),
        ListRunner(plugins, cache, paths.bin_dir),
        records,
        NodeNamespaces(),
        Devices(functools.partial(of_kubelet, Path(paths.kubelet_dir), way), way, claims),
        NodeDeviceFiles(Path(paths.chroot_dir or "/")),
        gates,
        settings,
        settings.overlay,
        metrics,
        locks=threads.SharedKeyedLock(Path(settings.socket.directory) / LOCKS),
        explain=explain_command(os.environ),
    )


class Daemon:
    """Creates and connects all objects of the daemon; `serve` runs them."""

    def __init__(
        self,
        settings: Settings,
        cluster: ClusterStore,
        gates: Gates,
        metrics: Metrics,
        store: KubeStore | StandaloneStore | None = None,
    ) -> None:
        """`store`: the store on the event loop behind `cluster`; None if pods do not change. Raises StartError."""
        self._settings = settings
        self._gates = gates
        self._metrics = metrics
        self._store = store
        self._spool_dir = Path(settings.paths.cni_dir) / "spool"
        self._started = time.time()
        of_processes, of_requests, connections = allowances.of(settings)
        self._limit = ProcessLimit(of_processes, metrics=metrics)
        claims = store.claims if store else None
        self._leases = Leases(Path(settings.paths.cni_dir) / "dhcp")
        shared, opened = Path(settings.paths.cni_dir) / "addresses", store.reservations if store else None
        named = store.shares_addresses if store else None
        self._addresses = Addresses(shared, store.node if store else "", opened, named=named)
        book = NodeAddressBook(self._addresses, LoopPortal())
        metrics.measure_one("multus_addresses_taken", book.shared)
        metrics.measure("multus_address_range_used_ratio", book.ratios)
        parts = self._limit, claims, self._leases, book
        self._engine = engine = _engine(settings, cluster, gates, metrics, *parts)
        # With little memory requests come first.
        at_once = max(1, min(keep.AT_ONCE, of_requests.number // 16))
        self._keep = Keep(engine, self._runtime_configuration, at_once=at_once)
        metrics.measure("multus_attachments_broken", self._keep.broken)
        self._addresses.holders = Holders(engine, self._keep.look)
        engine.records.view.followers.append(self._addresses.follow)
        self._outdated = at_start.OutdatedStatuses(engine)
        self._timelines = Timelines(at_once=of_requests.number)
        self._api = CniApi(
            Verbs(engine),
            metrics,
            at_once=of_requests.number,
            at_once_reason=of_requests.reason,
            hurry=self._limit.slots.hurried,
            timelines=self._timelines,
            asked_networks=store.asked_networks if store else lambda _: "",
            explain=engine.explain,
        )
        admin, directory = AdminApi(self._answers), Path(settings.socket.directory)
        self._server = UnixServer(self._api, gates, metrics, directory, admin=admin, connections=connections)
        self._spool = SpoolReplay(
            self._spool_dir, self._api.container_of, self._api.serve, cluster, metrics, gates.degraded
        )
        self._orphans = Orphans(engine) if settings.deletes.reconcile_seconds else None
        is_wanted = PrimaryConfig.is_wanted(settings)
        self._primary = PrimaryConfig(settings, NodeConfFiles(), gates, cluster, metrics) if is_wanted else None
        if not is_wanted:
            log.info("no CNI configuration is generated: multusAutoconfigDir or cniConfigDir is empty")

    def _answers(self) -> ByMethod:
        # Imported with the first question: they take 0.5 MiB.
        from multus_daemon.answers.questions import Answers

        return Answers(
            self._engine,
            self._timelines,
            self._parts,
            functools.partial(self._runtime_configuration, in_place=True),
            self._spool_dir,
            self._metrics.render,
            self._keep.look,
            self._keep.lacking.of,
        ).by_method

    def _parts(self) -> status.Parts:
        """Return the state of the daemon for `multusctl status`. Thread-safe."""
        from multus_daemon.answers import status

        return status.Parts(
            __version__,
            self._started,
            self._gates.closed,
            self._primary.report() if self._primary else {"wanted": False},
            self._store.report() if self._store else {},
            self._api.slots.load,
            self._limit.slots.load,
            sum(self._keep.broken().values()),
            self._keep.differences(),
            degraded=self._gates.degraded.closed,
        )

    def _runtime_configuration(self, *, in_place: bool = False) -> bytes:
        """Return the configuration that the runtime passes to the shim: the generated one, or else a minimal one.

        The minimal one suffices, as the settings override it. `in_place` and errors: see `PrimaryConfig.configuration`.
        """
        found = self._primary.configuration(in_place=in_place) if self._primary else b""
        return found or json.dumps({"cniVersion": "1.0.0", "name": "multus-cni-network"}).encode()

    async def serve(self, tasks: Mapping[str, Coroutine[Any, Any, Any]]) -> None:
        """Start, run the root tasks until a signal or until one of them ends, stop in order. Raises StartError.

        `tasks` are additional root tasks.
        """
        try:
            await asyncio.to_thread(strays.end)
            await asyncio.to_thread(self._engine.records.store.sweep)
            await asyncio.to_thread(self._leases.begin)
            await asyncio.to_thread(self._addresses.load)
            await self._server.start()
        except (OSError, StartError) as error:
            for work in tasks.values():
                work.close()
            raise StartError(str(error)) from error
        self._gates.open("socket")
        if self._store:
            self._store.watch_pods(self._keep.pod_changed)
        running: list[asyncio.Task[Any]] = []
        try:
            running = await until_signal(self._root_tasks() | dict(tasks))
        finally:
            await self._stop(running)

    async def free(self) -> dict[str, str]:
        """Serve the spool once, then delete the orphans. See `free` of the module."""
        await asyncio.to_thread(fs.ensure_directory, Path(self._settings.socket.directory))
        await asyncio.to_thread(strays.end)
        await asyncio.to_thread(self._engine.records.store.sweep)
        await asyncio.to_thread(self._addresses.load)
        while await self._spool.replay():
            pass
        if self._orphans is None:
            return self._spool.failed
        await self._orphans.delete_orphans()
        return self._spool.failed | self._orphans.failed

    def _root_tasks(self) -> dict[str, Coroutine[Any, Any, Any]]:
        """Return the root tasks. The daemon stops when one of them ends."""
        tasks: dict[str, Coroutine[Any, Any, Any]] = {
            "socket": self._server.keep_published(),
            "spool": self._spool.run(),
            "records": at_start.load(self._engine.records),
            "network-statuses": self._outdated.run(),
            "keep": self._keep.run(),
            "addresses": self._addresses.run(),
            "memory": malloc.keep_trimmed(),
            "ready": self._say_when_ready(),
        }
        if self._orphans is not None:
            tasks["orphans"] = self._orphans.run(self._spool.looked)
        if self._primary is not None:
            tasks["primary"] = self._primary.run()
        return tasks

    async def _say_when_ready(self) -> None:
        """Print a line to standard output when all gates are open; the log goes to standard error."""
        await self._gates.wait_open()
        log.info("ready")
        line = f"multus-daemon: ready, {self._server.path}\n".encode()
        # A full pipe that has no reader blocks the write, so a thread writes and the daemon does not wait for it.
        # sys.stdout would block the exit, which takes its lock. The thread drops the error of a closed pipe.
        threads.start(functools.partial(os.write, _STDOUT, line), name="ready")
        await asyncio.Event().wait()

    async def _stop(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Stop the socket first, so that no new request arrives, then the tasks. Raises the failure of a task."""
        log.info("multus-daemon stops")
        self._gates.close("socket", "shutting down")
        await self._server.stop(deadlines.DRAIN_SECONDS)
        await end(tasks)
