"""Keep `00-multus.conf`, which is generated from the primary configuration, in the runtime's directory.

The file is written when the daemon can serve, and only if its content differs. It is written whole or not at all, and
is never removed: while the daemon restarts, pods wait instead of getting the bare primary network. If the primary
network can't be read, the last good configuration remains. With `multusConfigFile` the operator's file replaces the
generated one.

On a new node a placeholder (`netconf.PLACEHOLDER`) is written, which is not a configuration. Otherwise the runtime
would use the primary configuration itself until ours is written.

If another file comes before ours by name, the runtime uses that: the gate `runtime` is then closed.

The directories are read at intervals; a reported change only makes the next read earlier. Changes of our file by other
programs are undone, each time after a longer pause, so that two programs do not overwrite each other in a loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from multus_daemon import deadlines
from multus_daemon.cluster import conf_files
from multus_daemon.cluster.conf_files import CONF_MAX_BYTES, NodeConfFiles
from multus_daemon.metrics import Metrics
from multus_daemon.node.primary.election import Election, NoPrimaryError
from multus_daemon.pod.engine import INDICATOR_GATE
from multus_daemon.runtime import fs, inotify, portal
from multus_daemon.runtime.aio import at_most
from multus_daemon.runtime.deadline import Deadline, backoff
from multus_daemon.runtime.gates import Gates, Reasons
from multus_daemon.settings.keys import AUTO, Settings
from multus_daemon.spec import netconf
from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError, Origin, as_on_host, parted
from multus_daemon.spec.ports import Events

log = logging.getLogger(__name__)

GATE: Final = "primary"
RUNTIME_GATE: Final = "runtime"
"""Gate, closed while the runtime uses another file than ours: new pods then get only the network in that file."""
UNUSABLE: Final = "runtime"
"""Key in `degraded` of `/readyz` while a file before ours is not a configuration."""
POLL_SECONDS: Final = 2.0
"""Interval for reading the directories, watched or not."""
_DIRECTORY_MODE: Final = 0o755


class PrimaryConfig:
    """Keeps the configuration in place: a root task, with the gates `primary`, `runtime` and `readiness-indicator`."""

    def __init__(
        self,
        settings: Settings,
        files: NodeConfFiles,
        gates: Gates,
        events: Events,
        metrics: Metrics,
        *,
        poll_seconds: float = POLL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        wanted = settings.primary
        self._settings = settings
        self._gates = gates
        self._events = events
        self._poll_seconds = poll_seconds
        self._directory = Path(wanted.config_dir)
        self._indicator = Path(wanted.indicator) if wanted.indicator else None
        self._is_auto = wanted.config_file == AUTO
        self._source = Path(os.path.normpath(wanted.autoconfig_dir if self._is_auto else wanted.config_file))
        ours = netconf.FILE_NAME if self._source == self._directory else ""
        self._election = Election(self._source, files, wanted.master, wanted.plugin_type, clock, ours)
        self._conf = _RuntimeConf(self._directory / netconf.FILE_NAME, events, metrics, clock)
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
        """Return True if the daemon manages the node's CNI configuration; standalone daemons usually do not."""
        wanted = settings.primary
        return bool(wanted.config_dir and (wanted.config_file != AUTO or wanted.autoconfig_dir))

    def configuration(self, *, in_place: bool = False) -> bytes:
        """Return the configuration that this or an earlier daemon wrote for the runtime. Thread-safe; blocks.

        Raises InvalidNetworkConfigError if there is none; with `in_place` also if its file can't be restored.
        """
        placed, found = self._conf.placed, b""
        if placed and not (in_place and self.problem and not placed.target.exists()):
            return placed.data
        if not placed:
            with contextlib.suppress(OSError):
                found = _read(self._directory / (netconf.FILE_NAME if self._is_auto else self._source.name)) or b""
        if found in (b"", netconf.PLACEHOLDER):
            others = [reason for name, reason in self._gates.closed.items() if name != GATE]
            cause, remedy = parted(self.problem or next(iter(others), "it is not written yet"))
            raise InvalidNetworkConfigError(
                f"the runtime has no configuration of Multus: {cause}",
                remedy=remedy or "correct or remove the file",
                origin=Origin.SETTINGS,
            )
        return found

    def report(self) -> dict[str, Any]:
        """Return the part `primary` of the answer of `multusctl status`. Thread-safe."""
        placed = self._conf.placed
        return {
            "wanted": True,
            "file": as_on_host(str(self._good.source)) if self._good else "",
            "placed": as_on_host(str(placed.target)) if placed else "",
            "problem": self.problem,
            "passedOver": [{"file": name, "reason": reason} for name, reason in self._election.passed_over],
        }

    @staticmethod
    def missing(settings: Settings) -> str:
        """Return why a cluster's node gets no configuration, which it needs; empty if it gets one."""
        if PrimaryConfig.is_wanted(settings) or not settings.primary.config_dir:
            return ""
        return (
            "no CNI configuration is generated, so the runtime does not use Multus: set multusAutoconfigDir to the "
            'directory of the primary network\'s, or cniConfigDir to "" where another program makes it'
        )

    async def run(self) -> None:
        """Wait until every other gate is open, then keep the configuration in place forever."""
        await asyncio.to_thread(self._look_at_indicator)
        self._gates.close(GATE, "the configuration is written when the daemon can serve")
        if self._is_auto:
            # The first look reports any failure.
            with contextlib.suppress(OSError):
                await _in_thread(self._conf.keep_place)
        await self._gates.wait_open(but=(GATE, RUNTIME_GATE, INDICATOR_GATE))
        await asyncio.to_thread(self._prepare)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(), name="primary-watch")
            group.create_task(self._keep(), name="primary-keep")

    def _prepare(self) -> None:
        """Remove temporary files of an earlier daemon, and use its elected primary configuration."""
        try:
            fs.sweep(self._directory, name=netconf.FILE_NAME)
            if self._is_auto:
                data = _read(self._conf.generated)
                self._election.remember(gojson.get_str(gojson.loads_object(data or b"{}"), "clusterNetwork") or "")
        except (OSError, gojson.JsonError) as error:
            log.info("%s, which an earlier daemon wrote, can't be used: %s", self._conf.generated, error)

    async def _watch(self) -> None:
        """Watch the directories, and wake `run` at each change."""
        configurations = {self._directory, self._source if self._is_auto else self._source.parent}
        watched = {*configurations, self._indicator.parent} if self._indicator else configurations

        def is_relevant(directory: Path, name: str) -> bool:
            if directory / name == self._indicator:
                return True
            # Temporary files are ignored, but updates of a mounted ConfigMap change `..data`.
            return directory in configurations and (not name.startswith(".") or name.startswith(".."))

        async def changed(_: set[Path]) -> None:
            self._wake.set()

        await inotify.follow(lambda: _identities(watched), is_relevant, changed, name=str(self._directory))

    async def _keep(self) -> None:
        while True:
            self._wake.clear()
            await self.look()
            await at_most(self._poll_seconds, self._wake.wait())

    async def look(self) -> None:
        """Check the primary configuration, our file and the runtime's directory once; write our file if it differs."""
        await _in_thread(self._look)

    def _look(self) -> None:
        ready = self._look_at_indicator()
        source_problem = place_problem = ""
        try:
            self._good = self._wanted()
        except (NoPrimaryError, CniError) as error:
            source_problem = str(error)
        try:
            if self._good is not None:
                place_problem = self._conf.put_in_place(self._good, write=ready)
            elif self._is_auto:
                self._conf.keep_place()
        except OSError as error:
            kept = f"the place of {self._conf.generated} can't be kept"
            what = f"{self._good.target} can't be written" if self._good else kept
            place_problem = f"{what}: {error.strerror or error}"
            if isinstance(error, FileNotFoundError) and conf_files.is_missing(self._directory):
                place_problem, source_problem = f"{self._directory} {conf_files.MISSING}", ""
        self._look_at_runtime(self._good.target if self._good else self._conf.generated)
        self._report(source_problem, place_problem)

    def _look_at_runtime(self, ours: Path) -> None:
        """Open or close the gate `runtime`: the runtime uses the first file of its directory."""
        directory, reason, unusable = ours.parent, "", ""
        try:
            first, others = conf_files.before(ours, self._settings.primary.plugin_type)
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
        resolved = f"{ours}: no such file comes before it"
        self._set(self._gates, RUNTIME_GATE, reason, "CNIConfigShadowed", resolved)
        self._set(self._gates.degraded, UNUSABLE, unusable, "CNIConfigShadowed", resolved)

    def _set(self, reasons: Reasons, name: str, reason: str, event: str, resolved: str) -> None:
        """Open the gate `name`, or close it for `reason`; log a change, and send the Event `event` for a new reason."""
        before, reason = reasons.closed.get(name), as_on_host(reason)
        if not reason:
            reasons.open(name)
            if before:
                log.info("%s", resolved)
        elif reason != before:
            reasons.close(name, reason)
            log.warning("%s", reason)
            self._events.node_event("Warning", event, reason)

    def _wanted(self) -> _Wanted:
        """Return the configuration that the runtime's directory should have. Raises NoPrimaryError, CniError."""
        if self._is_auto:
            found = self._election.primary()
            data = netconf.generate(self._settings.given, found.config, str(found.path))
            return _Wanted(self._conf.generated, data, found.path, generated=True)
        try:
            data = fs.read_limited(self._source, limit=CONF_MAX_BYTES)
        except OSError as error:
            raise NoPrimaryError(
                f"{self._source} (multusConfigFile) can't be read: {error.strerror or error}"
            ) from error
        try:
            conf.parse(data)
        except CniError as error:
            raise error.with_context(f"{self._source}, multusConfigFile") from error
        return _Wanted(self._directory / self._source.name, data, self._source, generated=False)

    def _look_at_indicator(self) -> bool:
        """Open or close the gate `readiness-indicator`; return True if the primary network is ready."""
        if self._indicator is None:
            return True
        is_there = self._indicator.exists()
        what = f"{self._indicator} (readinessindicatorfile) is"
        remedy = "look at the primary network's agent on this node: it makes that file"
        reason = "" if is_there else f"{what} not there: the primary network is not ready; {remedy}"
        resolved = f"{what} there: the primary network is ready"
        self._set(self._gates, INDICATOR_GATE, reason, "PrimaryNetworkNotReady", resolved)
        return is_there

    def _report(self, source_problem: str, place_problem: str) -> None:
        """Open or close the gate `primary`; report a new problem by log, Event and metric."""
        placed = self._conf.placed
        problem = as_on_host("; ".join(filter(None, (source_problem, place_problem))))
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
            self._events.node_event("Warning", "PrimaryNetworkProblem", problem + kept)
        else:
            log.info("the primary configuration is valid, and 00-multus.conf in place again")
        self.problem = problem


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A configuration that the runtime's directory should have."""

    target: Path
    data: bytes
    source: Path
    generated: bool
    """True for a generated configuration, False for the operator's own file."""


@dataclass(eq=False, slots=True)
class _RuntimeConf:
    """The CNI configuration that the daemon keeps for the runtime, in /etc/cni/net.d."""

    generated: Path
    events: Events
    metrics: Metrics
    clock: Callable[[], float]
    placed: _Wanted | None = None
    """The configuration that this daemon has written or confirmed."""
    _pauses: Iterator[float] = field(default_factory=lambda: backoff(*deadlines.RESTORE_SECONDS))
    _restored_at: float = float("-inf")
    _pause: float = 0.0

    def keep_place(self) -> None:
        """Write `netconf.PLACEHOLDER`, with which no pod starts, if the runtime has none yet. Raises OSError."""
        directory = self.generated.parent
        fs.ensure_directory(directory, mode=_DIRECTORY_MODE)
        if not conf_files.names(directory):
            fs.write_atomic(self.generated, netconf.PLACEHOLDER)
            log.info("the node has no network configuration yet; placeholder %s written", self.generated)

    def put_in_place(self, wanted: _Wanted, *, write: bool) -> str:
        """Write the configuration if the file differs; return why it was not written, empty if the file is right.

        `write`: False while the primary network is not ready. Raises OSError.
        """
        is_source = False
        with contextlib.suppress(OSError):
            # The operator's file may be in the runtime's directory itself.
            is_source = wanted.target.samefile(wanted.source)
        present = None if is_source else _read(wanted.target)
        if is_source or present == wanted.data:
            self.placed = wanted
            return ""
        if not write:
            return f"{wanted.target} is written when the primary network is ready"
        if self.placed == wanted:
            return self._restore(wanted, present)
        self._write(wanted)
        text = f"{wanted.target} written, from {wanted.source}"
        # The content of the operator's file may be confidential.
        log.info("%s%s", text, f": {wanted.data.decode(errors='replace')}" if wanted.generated else "")
        self.events.node_event("Normal", "CNIConfigWritten", text)
        return ""

    def _write(self, wanted: _Wanted) -> None:
        fs.ensure_directory(wanted.target.parent, mode=_DIRECTORY_MODE)
        fs.write_atomic(wanted.target, wanted.data)
        self.placed = wanted

    def _restore(self, wanted: _Wanted, present: bytes | None) -> str:
        """Undo the change of another program, unless the pause after the last one runs; return why not, or empty."""
        target = wanted.target
        what = f"{target} was {'removed' if present is None else 'changed'} by another program"
        similar = sorted(target.parent.glob(f"{target.name}?*")) if present is None else []
        if moved := [path.name for path in similar]:
            what += f"; there is {', '.join(moved)}"
            if any(name.endswith(".cilium_bak") for name in moved):
                what += " (Cilium's: set cni.exclusive to false)"
        now = self.clock()
        if now - self._restored_at > deadlines.RESTORE_CALM_SECONDS:
            self._pauses, self._pause = backoff(*deadlines.RESTORE_SECONDS), 0.0
        if now - self._restored_at < self._pause:
            return f"{what}, again; it is put back after a pause"
        self._write(wanted)
        self._restored_at, self._pause = now, next(self._pauses)
        log.warning("%s; the daemon restores it", what)
        self.metrics.configurations_restored.inc()
        self.events.node_event("Warning", "CNIConfigRestored", f"{what}; it is put back")
        return ""


async def _in_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread; a stopping daemon waits for its end, as it may write a file."""
    await portal.run(Deadline(), work, name="primary")


def _identities(directories: Collection[Path]) -> dict[Path, tuple[int, int]]:
    """Return the existing directories with their device and inode."""
    found = {}
    for path in directories:
        with contextlib.suppress(OSError):
            status = path.stat()
            found[path] = (status.st_dev, status.st_ino)
    return found


def _read(path: Path) -> bytes | None:
    """Return the file's content; None without a file, empty if it is too large to be ours. Raises OSError."""
    try:
        return fs.read_limited(path, limit=CONF_MAX_BYTES)
    except FileNotFoundError:
        return None
    except fs.FileTooLargeError:
        return b""
