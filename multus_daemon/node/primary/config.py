"""Keep the node's CNI configuration in place: `00-multus.conf`, generated from that of the primary network.

The file is written when the daemon can serve, and only if its content differs. It is written whole or not at all, and
is never removed: while the daemon restarts, pods wait instead of getting the bare primary network. If the primary
network can't be read, the last good configuration remains. With `multusConfigFile` the operator's file replaces the
generated one.

A file that is not a configuration (`primary.PLACEHOLDER`) keeps the place on a new node. Otherwise the runtime would
use the primary network's own configuration until ours is written.

A file that comes before ours by name takes our place in the runtime: the gate `runtime` is closed while it is there.

Each look reads the directories; watching them (`conf_watch`) only triggers the next look earlier. Changes by other
programs are undone, each time after a longer pause, so that two agents do not overwrite each other in a loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from multus_daemon import deadlines
from multus_daemon.cluster import conf_files
from multus_daemon.cluster.conf_files import CONF_MAX_BYTES
from multus_daemon.metrics import PrimaryMetrics
from multus_daemon.node.primary.conf_watch import watch
from multus_daemon.node.primary.election import Election, NoPrimaryError
from multus_daemon.pod.engine import INDICATOR_GATE
from multus_daemon.runtime import fs
from multus_daemon.runtime.aio import in_thread
from multus_daemon.runtime.deadline import backoff
from multus_daemon.runtime.gates import Gates
from multus_daemon.settings import AUTO, Settings
from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.netconf import primary
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX, ConfFiles, Events

log = logging.getLogger(__name__)

GATE: Final = "primary"
RUNTIME_GATE: Final = "runtime"
"""While this gate is closed the runtime uses another configuration than ours, and new pods have its network only."""
UNUSABLE: Final = "runtime"
"""Name of the degradation while a file that is not a configuration comes before ours."""
POLL_SECONDS: Final = 2.0
"""Interval of looks at the directories, watched or not."""
_DIRECTORY_MODE: Final = 0o755


class PrimaryConfig:
    """A root task with three readiness gates: `primary`, `runtime`, and the indicator's, which ADD checks too."""

    def __init__(
        self,
        settings: Settings,
        files: ConfFiles,
        gates: Gates,
        events: Events,
        metrics: PrimaryMetrics,
        *,
        poll_seconds: float = POLL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        wanted = settings.primary
        self._given = settings.given
        self._gates = gates
        self._events = events
        self._plugin_type = wanted.plugin_type
        self._poll_seconds = poll_seconds
        self._directory = Path(wanted.config_dir)
        self._indicator = Path(wanted.indicator) if wanted.indicator else None
        self._is_auto = wanted.config_file == AUTO
        self._source = Path(os.path.normpath(wanted.autoconfig_dir if self._is_auto else wanted.config_file))
        self._election = Election(
            self._source,
            files,
            named=wanted.master,
            plugin_type=wanted.plugin_type,
            clock=clock,
            ours=primary.FILE_NAME if self._source == self._directory else "",
        )
        self._conf = _RuntimeConf(self._directory / primary.FILE_NAME, events, metrics, clock)
        self._wake = asyncio.Event()
        self._good: _Wanted | None = None
        """The last valid configuration."""
        self.problem = ""
        """Fault of the primary network or of the configuration; empty if there is none."""
        gates.close(GATE, "not looked at yet")
        if self._indicator is not None:
            gates.close(INDICATOR_GATE, "not looked at yet")

    @staticmethod
    def is_wanted(settings: Settings) -> bool:
        """Report whether the daemon manages the node's configuration; standalone daemons usually do not."""
        wanted = settings.primary
        return bool(wanted.config_dir and (wanted.config_file != AUTO or wanted.autoconfig_dir))

    @property
    def placed(self) -> bytes:
        """The configuration that the runtime has from us; empty if there is none. For any thread."""
        return self._conf.placed.data if self._conf.placed else b""

    def report(self) -> dict[str, Any]:
        """Return the part `primary` of `answers.status`. For any thread."""
        placed = self._conf.placed
        return {
            "wanted": True,
            "file": str(self._good.source) if self._good else "",
            "placed": str(placed.target) if placed else "",
            "problem": self.problem,
            "passedOver": [{"file": name, "reason": reason} for name, reason in self._election.passed_over],
        }

    @staticmethod
    def missing(settings: Settings) -> str:
        """Return why a node of a cluster gets no configuration although it needs one; empty if it gets one."""
        if PrimaryConfig.is_wanted(settings) or not settings.primary.config_dir:
            return ""
        return (
            "no CNI configuration is generated, so the runtime does not use Multus: set multusAutoconfigDir to the "
            'directory of the primary network\'s, or cniConfigDir to "" where another program makes it'
        )

    async def run(self) -> None:
        """Wait until every other gate is open, then keep the configuration in place forever."""
        await self._look_at_indicator()
        self._gates.close(GATE, "the configuration is written when the daemon can serve")
        if self._is_auto:
            # The first look reports any failure.
            with contextlib.suppress(OSError):
                await self._conf.keep_place()
        await self._gates.wait_open(but=(GATE, RUNTIME_GATE, INDICATOR_GATE))
        await self._prepare()
        directories = (self._directory, self._source if self._is_auto else self._source.parent)
        watching = watch(
            directories,
            self._indicator,
            self._wake.set,
            # Until ours is there, the runtime may use another configuration.
            in_haste=lambda: self._conf.placed is None,
            poll_seconds=self._poll_seconds,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(watching, name="primary-watch")
            group.create_task(self._keep(), name="primary-keep")

    async def _prepare(self) -> None:
        """Remove temporary files of an earlier daemon, and adopt its choice of the primary network."""
        try:
            await asyncio.to_thread(fs.sweep, self._directory, name=primary.FILE_NAME)
            if self._is_auto:
                data = await in_thread(_read, self._conf.generated)
                self._election.remember(gojson.get_str(gojson.loads_object(data or b"{}"), "clusterNetwork") or "")
        except (OSError, gojson.JsonError) as error:
            log.info("%s of an earlier daemon can't be used: %s", self._conf.generated, error)

    async def _keep(self) -> None:
        while True:
            self._wake.clear()
            await self.look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_seconds):
                    await self._wake.wait()

    async def look(self) -> None:
        """Look at everything once, and write the configuration if it differs."""
        ready = await self._look_at_indicator()
        source_problem = place_problem = ""
        try:
            self._good = await self._wanted()
        except (NoPrimaryError, CniError) as error:
            source_problem = str(error)
        try:
            if self._good is not None:
                place_problem = await self._conf.put_in_place(self._good, write=ready)
            elif self._is_auto:
                await self._conf.keep_place()
        except OSError as error:
            kept = f"the place of {self._conf.generated} can't be kept"
            what = f"{self._good.target} can't be written" if self._good else kept
            place_problem = f"{what}: {error.strerror or error}"
        await self._look_at_runtime(self._good.target if self._good else self._conf.generated)
        self._report(source_problem, place_problem)

    async def _look_at_runtime(self, ours: Path) -> None:
        """Set the gate of the runtime: it uses the first file of its directory."""
        directory, reason, unusable = ours.parent, "", ""
        try:
            first, others = await asyncio.to_thread(conf_files.before, ours, self._plugin_type)
        except OSError as error:
            reason = f"{directory} can't be listed, so the file that the runtime uses is unknown: {error.strerror}"
        else:
            remedy = "remove it, or give it a name that sorts later"
            if first:
                what = f"{directory / first} comes before {ours.name}, so the runtime uses it"
                reason = f"{what} and new pods have no networks of Multus; {remedy}"
            for name, problem in others.items():
                what = f"{directory / name} comes before {ours.name} and can't be used ({problem})"
                unusable = unusable or f"{what}: containerd starts no pod, CRI-O passes over it; {remedy}"
        for reasons, name, text in ((self._gates, RUNTIME_GATE, reason), (self._gates.degraded, UNUSABLE, unusable)):
            before = reasons.closed.get(name)
            if not text:
                reasons.open(name)
                if before:
                    log.info("%s: no such file comes before it", ours)
            elif text != before:
                reasons.close(name, text)
                log.warning("%s", text)
                self._events.node_event("Warning", "CNIConfigShadowed", text[:EVENT_MESSAGE_MAX])

    async def _wanted(self) -> _Wanted:
        """Return the configuration that belongs in place. Raises NoPrimaryError, CniError."""
        if self._is_auto:
            found = await self._election.primary()
            data = primary.generate(self._given, found.config, str(found.path))
            return _Wanted(self._conf.generated, data, found.path, generated=True)
        try:
            data = await asyncio.to_thread(fs.read_limited, self._source, limit=CONF_MAX_BYTES)
        except OSError as error:
            raise NoPrimaryError(
                f"{self._source} (multusConfigFile) can't be read: {error.strerror or error}"
            ) from error
        try:
            conf.parse(data)
        except CniError as error:
            raise error.with_context(f"{self._source}, multusConfigFile") from error
        return _Wanted(self._directory / self._source.name, data, self._source, generated=False)

    async def _look_at_indicator(self) -> bool:
        """Set the gate of the readiness indicator; return whether the primary network is ready."""
        if self._indicator is None:
            return True
        if await asyncio.to_thread(self._indicator.exists):
            if INDICATOR_GATE in self._gates.closed:
                log.info("%s (readinessindicatorfile) is there: the primary network is ready", self._indicator)
            self._gates.open(INDICATOR_GATE)
            return True
        reason = f"{self._indicator} (readinessindicatorfile) is not there: the primary network is not ready"
        if self._gates.closed.get(INDICATOR_GATE) != reason:
            log.warning("%s; no pod is attached until it is", reason)
            self._events.node_event("Warning", "PrimaryNetworkNotReady", reason)
        self._gates.close(INDICATOR_GATE, reason)
        return False

    def _report(self, source_problem: str, place_problem: str) -> None:
        """Set the gate; report a new problem by log, Event and metric."""
        placed = self._conf.placed
        problem = "; ".join(filter(None, (source_problem, place_problem)))
        # A faulty source closes the gate, except the operator's file once a copy is in place: that copy serves.
        if place_problem or (source_problem and (self._is_auto or placed is None)):
            self._gates.close(GATE, problem)
        else:
            self._gates.open(GATE)
        if problem == self.problem:
            return
        if problem:
            kept = f"; {placed.target} stays as it is" if placed and source_problem else ""
            log.warning("%s%s", problem, kept)
            self._events.node_event("Warning", "PrimaryNetworkProblem", (problem + kept)[:EVENT_MESSAGE_MAX])
        else:
            log.info("the primary network's configuration is valid and in place again")
        self.problem = problem


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A configuration that belongs in place."""

    target: Path
    data: bytes
    source: Path
    generated: bool
    """False for a file of the operator."""


class _RuntimeConf:
    """The CNI configuration that the daemon keeps for the runtime, in /etc/cni/net.d."""

    def __init__(self, generated: Path, events: Events, metrics: PrimaryMetrics, clock: Callable[[], float]) -> None:
        self.generated = generated
        self.placed: _Wanted | None = None
        """The configuration that this daemon has written or confirmed."""
        self._events = events
        self._metrics = metrics
        self._clock = clock
        self._pauses: Iterator[float] = backoff(*deadlines.RESTORE_SECONDS)
        self._restored_at = float("-inf")
        self._pause = 0.0

    async def keep_place(self) -> None:
        """Write the placeholder if the runtime has no configuration at all. Raises OSError."""
        directory = self.generated.parent
        await asyncio.to_thread(fs.ensure_directory, directory, mode=_DIRECTORY_MODE)
        if await asyncio.to_thread(conf_files.names, directory):
            return
        await in_thread(fs.write_atomic, self.generated, primary.PLACEHOLDER)
        log.info("the node has no network configuration yet; placeholder %s written", self.generated)

    async def put_in_place(self, wanted: _Wanted, *, write: bool) -> str:
        """Write the configuration if it differs; return why it is not written, empty if it is in place.

        `write`: False while the primary network is not ready. Raises OSError.
        """
        with contextlib.suppress(OSError):
            # The operator's file may be in the runtime's directory itself.
            if await asyncio.to_thread(wanted.target.samefile, wanted.source):
                self.placed = wanted
                return ""
        present = await asyncio.to_thread(_read, wanted.target)
        if present == wanted.data:
            self.placed = wanted
            return ""
        if not write:
            return f"{wanted.target} is written when the primary network is ready"
        if self.placed == wanted:
            return await self._restore(wanted, present)
        await self._write(wanted)
        # The content of the operator's file may be confidential.
        shown = f": {wanted.data.decode(errors='replace')}" if wanted.generated else ""
        log.info("%s written, from %s%s", wanted.target, wanted.source, shown)
        self._events.node_event("Normal", "CNIConfigWritten", f"{wanted.target} written, from {wanted.source}")
        return ""

    async def _write(self, wanted: _Wanted) -> None:
        await asyncio.to_thread(fs.ensure_directory, wanted.target.parent, mode=_DIRECTORY_MODE)
        # A daemon that stops waits for the write.
        await in_thread(fs.write_atomic, wanted.target, wanted.data)
        self.placed = wanted

    async def _restore(self, wanted: _Wanted, present: bytes | None) -> str:
        """Undo the change of another program, unless that was done a moment ago."""
        target = wanted.target
        what = f"{target} was {'removed' if present is None else 'changed'} by another program"
        similar = await asyncio.to_thread(sorted, target.parent.glob(f"{target.name}?*")) if present is None else []
        if moved := [path.name for path in similar]:
            what += f"; there is {', '.join(moved)}"
            if any(name.endswith(".cilium_bak") for name in moved):
                what += " (Cilium's: set cni.exclusive to false)"
        now = self._clock()
        if now - self._restored_at > deadlines.RESTORE_CALM_SECONDS:
            self._pauses, self._pause = backoff(*deadlines.RESTORE_SECONDS), 0.0
        if now - self._restored_at < self._pause:
            return f"{what}, again; it is put back after a pause"
        await self._write(wanted)
        self._restored_at, self._pause = now, next(self._pauses)
        log.warning("%s; it is put back", what)
        self._metrics.restored.inc()
        self._events.node_event("Warning", "CNIConfigRestored", f"{what}; it is put back")
        return ""


def _read(path: Path) -> bytes | None:
    """Return the content; None if there is no file, empty if it is too large to be ours. Raises OSError."""
    try:
        return fs.read_limited(path, limit=CONF_MAX_BYTES)
    except FileNotFoundError:
        return None
    except fs.FileTooLargeError:
        return b""
