"""The composition root: create every object from the settings, run the root tasks, stop them in order."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multus_daemon import __version__, deadlines, logs
from multus_daemon.answers.asked import ByMethod
from multus_daemon.api.admin import AdminApi
from multus_daemon.api.app import ListenError, UnixServer
from multus_daemon.api.cni import CniApi
from multus_daemon.api.metrics_port import metrics_tasks
from multus_daemon.api.verbs import Verbs
from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.cluster.devices import Devices, NodeDeviceFiles
from multus_daemon.cluster.kubelet.source import KubeletDevices
from multus_daemon.kernel.pod_netns import NodeNamespaces
from multus_daemon.metrics import Metrics
from multus_daemon.node import allowances, at_start, keep
from multus_daemon.node.keep import Keep
from multus_daemon.node.orphans import Orphans
from multus_daemon.node.primary import config
from multus_daemon.node.primary.config import PrimaryConfig
from multus_daemon.node.spool import SpoolReplay
from multus_daemon.node.traffic import Traffic
from multus_daemon.plugins import strays
from multus_daemon.plugins.builtin.host_local_index import usage
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.plugins.limit import ProcessLimit
from multus_daemon.plugins.process import MINIMAL_ENVIRON, ProcessRunner
from multus_daemon.plugins.run import ListRunner
from multus_daemon.plugins.select import Plugins
from multus_daemon.plugins.tools import ToolRunner
from multus_daemon.pod.engine import LOCKS, Engine, Policy
from multus_daemon.pod.records import Records
from multus_daemon.pod.store import FileStore
from multus_daemon.runtime import aio, fs, malloc, threads
from multus_daemon.runtime.aio import StartError, end, until_signal
from multus_daemon.runtime.gates import Gates
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.runtime.timeline import Timelines
from multus_daemon.settings import Settings
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni import remedies
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError
from multus_daemon.spec.cni.names import KubernetesArgs
from multus_daemon.spec.ports import ClusterStore

if TYPE_CHECKING:
    from multus_daemon.answers import status
    from multus_daemon.cluster.kube.claims import Claims

log = logging.getLogger(__name__)

_STDOUT = 1


def run(settings: Settings, *, standalone: Path | None) -> None:
    """Run until SIGTERM or SIGINT. Raises StartError, and the exception that ended a root task."""
    if standalone is not None and not standalone.is_dir():
        raise StartError(f"--standalone {standalone}: no such directory")
    asyncio.run(serve(settings, standalone))


def free(settings: Settings) -> dict[str, str]:
    """Detach deleted containers without serving, and return the errors of those that failed, by container.

    That needs no cluster: what a DEL needs is on record. Raises StartError, OSError.
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

    manifests = StandaloneStore(standalone, gates)
    daemon = Daemon(settings, manifests, gates, metrics, report=manifests.report, watch_pods=manifests.watch_pods)
    port = metrics_tasks(metrics, gates, settings.metrics, os.environ)
    await daemon.serve({"cluster": manifests.run(), **port})


async def _serve_kubernetes(settings: Settings, gates: Gates, metrics: Metrics) -> None:
    from multus_daemon.cluster.kube.access import TokenAccess
    from multus_daemon.cluster.kube.connect import Connection
    from multus_daemon.cluster.kube.store import Cluster, KubeStore

    if problem := PrimaryConfig.missing(settings):
        log.warning("not ready: %s", problem)
        gates.close(config.GATE, problem)
    connection = Connection(settings.kubernetes, gates, os.environ)
    async with connection.client:
        await connection.load()
        store = KubeStore(connection.client, await connection.node_name(), gates, metrics=metrics.cluster)
        connection.client.count = metrics.cluster.request
        metrics.measure(
            "multus_informer_stale_seconds",
            lambda: {"pods": store.pods.stale_seconds, "networks": store.networks.stale_seconds},
        )
        metrics.measure_one("multus_network_statuses_pending", lambda: store.statuses.pending)
        name = "multus_client_certificate_expiration_timestamp_seconds"
        metrics.measure_one(name, lambda: connection.certificate_expires)
        try:
            cluster = Cluster(store, LoopPortal())
            asked = store.asked_networks
            daemon = Daemon(
                settings,
                cluster,
                gates,
                metrics,
                report=store.report,
                asked_networks=asked,
                watch_pods=store.watch_pods,
                claims=store.claims,
            )
            access = TokenAccess(connection.client)
            port = metrics_tasks(metrics, gates, settings.metrics, os.environ, access)
            await daemon.serve({"cluster": store.run(), "credentials": connection.run(), **port})
        finally:
            await store.drain(deadlines.REPORT_SECONDS)


def _passed_on(names: Sequence[str]) -> dict[str, str]:
    """Return the named variables of the daemon's environment, for the plugins; log the missing ones."""
    if missing := [name for name in names if name not in os.environ]:
        log.warning("pluginEnv: not in the daemon's environment, so plugins do not have them: %s", ", ".join(missing))
    return {name: os.environ[name] for name in names if name in os.environ}


class Daemon:
    """Wires up every object of the daemon; `serve` runs them."""

    def __init__(
        self,
        settings: Settings,
        cluster: ClusterStore,
        gates: Gates,
        metrics: Metrics,
        *,
        report: Callable[[], Mapping[str, Any]] = dict,
        asked_networks: Callable[[KubernetesArgs], str] = lambda _: "",
        watch_pods: Callable[[Callable[[Pod], None]], None] = lambda _: None,
        claims: Claims | None = None,
    ) -> None:
        """`report` returns the state of the cluster store for `answers.status`, `watch_pods` has it report changed
        pods; `claims` has the devices of ResourceClaims. The others: see `CniApi`.

        Raises StartError.
        """
        self._settings = settings
        self._gates = gates
        self._metrics = metrics
        self._cluster = cluster
        of_processes, of_requests, connections = allowances.of(settings)
        limit = ProcessLimit(of_processes, metrics=metrics.processes)
        engine = self._engine(limit, claims)
        # With little memory requests come first.
        at_once = max(1, min(keep.AT_ONCE, of_requests.number // 16))
        seconds = settings.deletes.reconcile_seconds
        self._keep = Keep(engine, cluster, self._runtime_configuration, at_once=at_once, lacking_seconds=seconds)
        self._outdated = at_start.OutdatedStatuses(engine)
        metrics.measure("multus_attachments_broken", self._keep.broken)
        timelines = Timelines(at_once=of_requests.number)
        self._api = CniApi(
            Verbs(engine),
            self._metrics,
            at_once=of_requests.number,
            at_once_reason=of_requests.reason,
            hurry=limit.hurried,
            timelines=timelines,
            asked_networks=asked_networks,
            explain=engine.policy.explain,
        )
        self._watch_pods = watch_pods
        self._report = report
        self._limit = limit
        self._started = time.time()
        spool = Path(settings.paths.cni_dir) / "spool"

        def answers() -> ByMethod:
            # Imported with the first question: they take 0.5 MiB.
            from multus_daemon.answers.questions import Answers

            return Answers(
                engine,
                timelines,
                self._parts,
                self._runtime_configuration,
                spool,
                metrics.render,
                self._keep.look,
            ).by_method

        self._server = UnixServer(
            self._api,
            self._gates,
            self._metrics,
            Path(settings.socket.directory),
            admin=AdminApi(answers),
            connections=connections,
        )
        self._spool = SpoolReplay(spool, self._api, cluster, metrics.deletes, gates.degraded)
        self._orphans: Orphans | None = None
        if seconds:
            self._orphans = Orphans(engine, cluster, metrics.deletes, seconds=seconds, tidy=self._store.tidy)
        self._primary: PrimaryConfig | None = None
        if PrimaryConfig.is_wanted(settings):
            self._primary = PrimaryConfig(settings, NodeConfFiles(), gates, cluster, metrics.primary)
        else:
            log.info("no CNI configuration is generated: multusAutoconfigDir or cniConfigDir is empty")

    def _parts(self) -> status.Parts:
        """Return the state of the daemon for `multusctl status`. Thread-safe."""
        from multus_daemon.answers import status

        return status.Parts(
            __version__,
            self._started,
            self._gates.closed,
            self._primary.report() if self._primary else {"wanted": False},
            self._report(),
            self._api.load,
            self._limit.load,
            self._orphans.left if self._orphans else 0,
            sum(self._keep.broken().values()),
            self._keep.differences(),
            degraded=self._gates.degraded.closed,
        )

    def _runtime_configuration(self) -> bytes:
        """Return the configuration that the runtime passes to the shim: the generated one, or else a minimal one.

        The minimal one suffices because the settings are laid over it. Raises InvalidNetworkConfigError if the
        configuration could not be generated: the runtime does not run Multus then.
        """
        placed = self._primary.placed if self._primary else b""
        if self._primary and not placed and (problem := self._primary.problem):
            raise InvalidNetworkConfigError(
                problem, "correct or remove the file: the runtime has no configuration of Multus until then"
            )
        return placed or json.dumps({"cniVersion": "1.0.0", "name": "multus-cni-network"}).encode()

    def _engine(self, limit: ProcessLimit, claims: Claims | None) -> Engine:
        paths, plugins = self._settings.paths, self._settings.plugins
        cni_dir = Path(paths.cni_dir)
        way = LoopPortal()
        try:
            fs.ensure_directory(cni_dir)
            process = ProcessRunner(
                [paths.bin_dir],
                chroot_dir=paths.chroot_dir,
                timeout=plugins.delegate_timeout_seconds,
                environ={**MINIMAL_ENVIRON, **_passed_on(plugins.environment)},
                limit=limit,
                portal=way,
            )
            tools = ToolRunner(chroot_dir=paths.chroot_dir, at_once=limit.load["limit"], portal=way)
        except (OSError, ValueError) as error:
            raise StartError(str(error)) from error
        chosen = Plugins(
            process,
            plugins.builtin_plugins,
            excepted=plugins.builtin_plugins_except,
            host_root=Path(paths.chroot_dir or "/"),
            tools=tools,
            observe=self._metrics.plugin,
        )
        try:
            chosen.log_binaries(paths.bin_dir)
        except CniError as error:
            log.error("%s", error)
        self._metrics.measure("multus_ipam_used_ratio", usage.ratios)
        cache = ResultCache(cni_dir)
        self._store = FileStore(cni_dir, cache, upstream_too=paths.upstream_records)
        self._records = Records(self._store)
        view = self._records.view
        if self._settings.metrics.attachment_traffic != "off":
            self._metrics.measure_traffic(Traffic(view).figures)
        self._metrics.measure("multus_attachments", lambda: view.counts)
        return Engine(
            self._cluster,
            NodeConfFiles(),
            ListRunner(chosen, cache, paths.bin_dir),
            self._records,
            NodeNamespaces(),
            Devices(KubeletDevices(Path(paths.kubelet_dir)), way, claims),
            NodeDeviceFiles(Path(paths.chroot_dir or "/")),
            self._gates,
            Policy(
                self._settings.overlay,
                self._settings.kubernetes.status_write,
                self._settings.deletes.tries,
                hotplug=self._settings.attachments.hotplug,
                keep=self._settings.attachments.keep,
                ready_condition=self._settings.attachments.ready_condition,
                explain=remedies.explain_command(os.environ),
            ),
            self._metrics,
            locks=threads.SharedKeyedLock(Path(self._settings.socket.directory) / LOCKS),
        )

    async def serve(self, tasks: Mapping[str, Coroutine[Any, Any, Any]]) -> None:
        """Start, run the root tasks until a signal or until one of them ends, stop in order. Raises StartError.

        `tasks` are additional root tasks.
        """
        try:
            await asyncio.to_thread(strays.end)
            await asyncio.to_thread(self._store.sweep)
            await self._server.start()
        except (OSError, ListenError) as error:
            for work in tasks.values():
                work.close()
            raise StartError(str(error)) from error
        self._gates.open("socket")
        self._watch_pods(self._keep.pod_changed)
        running: list[asyncio.Task[Any]] = []
        try:
            running = await until_signal(self._root_tasks() | dict(tasks))
        finally:
            await self._stop(running)

    async def free(self) -> dict[str, str]:
        """Serve the spool once, then delete the orphans. See `free` of the module."""
        await asyncio.to_thread(fs.ensure_directory, Path(self._settings.socket.directory))
        await asyncio.to_thread(strays.end)
        await asyncio.to_thread(self._store.sweep)
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
            "records": at_start.load(self._records),
            "network-statuses": self._outdated.run(),
            "keep": self._keep.run(),
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
