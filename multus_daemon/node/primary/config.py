"""Keeps the node's CNI configuration in place: `00-multus.conf`, generated from that of the primary network.

It is written when the daemon can serve, and only where its content differs. Nothing removes it: while the daemon
restarts, pods wait instead of getting the bare primary network. A primary network that can't be read leaves the last
good configuration where it is. With `multusConfigFile` a file of the operator's takes the place of what is generated.

On a node that has no configuration yet the place is kept by a file that is none (`generate.PLACEHOLDER`), so that the
runtime does not take the primary network's own in the moment between its coming and ours.

The truth is what a look at the directories finds; watching them (`conf_watch`) only makes the next look come sooner.
What a look wants is put in place, and kept, by `runtime_conf`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from multus_daemon.cluster.conf_files import CONF_MAX_BYTES
from multus_daemon.metrics import PrimaryMetrics
from multus_daemon.node.primary import runtime_conf
from multus_daemon.node.primary.conf_watch import ConfWatch
from multus_daemon.node.primary.election import Election, NoPrimaryError
from multus_daemon.node.primary.runtime_conf import RuntimeConf, Wanted
from multus_daemon.pod.engine import INDICATOR_GATE
from multus_daemon.runtime import fs
from multus_daemon.runtime.aio import in_thread
from multus_daemon.runtime.gates import Gates
from multus_daemon.settings import AUTO, Settings
from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.netconf import generate
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX, ConfFiles, NodeEvents

log = logging.getLogger(__name__)

GATE: Final = "primary"
POLL_SECONDS: Final = 2.0
"""How often the directories are looked at, watched or not."""


class PrimaryConfig:
    """A root task. Gates: `primary`, and that of the readiness indicator, which ADD looks at."""

    def __init__(
        self,
        settings: Settings,
        files: ConfFiles,
        gates: Gates,
        events: NodeEvents,
        metrics: PrimaryMetrics,
        *,
        poll_seconds: float = POLL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings.primary
        self._given = settings.given
        self._gates = gates
        self._events = events
        self._metrics = metrics
        self._poll_seconds = poll_seconds
        self._directory = Path(self._settings.config_dir)
        self._indicator = Path(self._settings.indicator) if self._settings.indicator else None
        self._is_auto = self._settings.config_file == AUTO
        self._source = Path(
            os.path.normpath(self._settings.autoconfig_dir if self._is_auto else self._settings.config_file)
        )
        self._election = Election(
            self._source,
            files,
            named=self._settings.master,
            plugin_type=self._settings.plugin_type,
            clock=clock,
        )
        self._conf = RuntimeConf(self._directory, events, metrics, clock=clock)
        self._wake = asyncio.Event()
        self._watch = ConfWatch(
            (self._directory, self._source if self._is_auto else self._source.parent),
            self._indicator,
            self._wake.set,
            # Until there is a configuration of ours the runtime may take another.
            in_haste=lambda: self._conf.placed is None,
            poll_seconds=poll_seconds,
        )
        self._good: Wanted | None = None
        """The last that was fit to be in place."""
        self._complaint = ""
        gates.close(GATE, "not looked at yet")
        if self._indicator is not None:
            gates.close(INDICATOR_GATE, "not looked at yet")

    @staticmethod
    def is_wanted(settings: Settings) -> bool:
        """Whether there is something to do: standalone daemons and tests leave the node's configuration alone."""
        wanted = settings.primary
        return bool(wanted.config_dir and (wanted.config_file != AUTO or wanted.autoconfig_dir))

    @property
    def placed(self) -> bytes:
        """The configuration that the runtime has from us; empty while there is none. From any thread."""
        placed = self._conf.placed
        return placed.data if placed else b""

    @property
    def problem(self) -> str:
        """What is wrong with the primary network or the configuration; empty: nothing. From any thread."""
        return self._complaint

    def report(self) -> dict[str, Any]:
        """Which file is the primary network's and what was placed; for `diagnosis.status`. From any thread."""
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
        """Why a node of a cluster gets no configuration though nobody has said that it needs none; empty: it does."""
        if PrimaryConfig.is_wanted(settings) or not settings.primary.config_dir:
            return ""
        return (
            "no CNI configuration is generated, so the runtime does not use Multus: set multusAutoconfigDir to the "
            'directory of the primary network\'s, or cniConfigDir to "" where another program makes it'
        )

    async def run(self) -> None:
        """Keep the configuration in place, for ever; from when every other gate is open."""
        await self._look_at_indicator()
        self._gates.close(GATE, "the configuration is written when the daemon can serve")
        if self._is_auto:
            # The first look says so where it fails.
            with contextlib.suppress(OSError):
                await self._conf.keep_place()
        await self._gates.wait_open(but=(GATE, INDICATOR_GATE))
        await self._prepare()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch.run(), name="primary-watch")
            group.create_task(self._keep(), name="primary-keep")

    async def _prepare(self) -> None:
        """What an earlier daemon has left: half a temporary file, and its choice of the primary network."""
        try:
            await asyncio.to_thread(fs.sweep, self._directory, name=generate.FILE_NAME)
            if self._is_auto:
                data = await in_thread(runtime_conf.read, self._conf.generated)
                self._election.remember(gojson.get_str(gojson.loads_object(data or b"{}"), "clusterNetwork") or "")
        except (OSError, gojson.JsonError) as error:
            log.info("%s tells nothing: %s", self._conf.generated, error)

    async def _keep(self) -> None:
        while True:
            self._wake.clear()
            await self.look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_seconds):
                    await self._wake.wait()

    async def look(self) -> None:
        """Look at everything once, and put in place what is not."""
        ready = await self._look_at_indicator()
        source_problem = place_problem = ""
        try:
            self._good = await self._wanted()
        except (NoPrimaryError, CniError) as error:
            source_problem = str(error)
        if self._good is not None:
            try:
                place_problem = await self._conf.put_in_place(self._good, write=ready)
            except OSError as error:
                place_problem = f"{self._good.target} can't be written: {error.strerror or error}"
        elif self._is_auto:
            try:
                await self._conf.keep_place()
            except OSError as error:
                place_problem = f"the place of {self._conf.generated} can't be kept: {error.strerror or error}"
        self._tell(source_problem, place_problem)

    # --- what is wanted ---

    async def _wanted(self) -> Wanted:
        """Raises NoPrimaryError and CniError."""
        if self._is_auto:
            found = await self._election.primary()
            data = generate.generate(self._given, found.config, str(found.path))
            return Wanted(self._conf.generated, data, found.path, generated=True)
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
        return Wanted(self._directory / self._source.name, data, self._source, generated=False)

    async def _look_at_indicator(self) -> bool:
        """Whether the primary network is ready; its gate says so."""
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

    # --- what is said ---

    def _tell(self, source_problem: str, place_problem: str) -> None:
        """Gate, log, Event and metric."""
        placed = self._conf.placed
        problem = "; ".join(filter(None, (source_problem, place_problem)))
        # The operator's own file, once it is in place, serves as it is; a primary network is read with each ADD.
        hinders = place_problem or (source_problem if self._is_auto or placed is None else "")
        if hinders:
            self._gates.close(GATE, problem)
        else:
            self._gates.open(GATE)
        if problem == self._complaint:
            return
        if problem:
            kept = f"; {placed.target} stays as it is" if placed and source_problem else ""
            log.warning("%s%s", problem, kept)
            self._metrics.problems.inc()
            self._events.node_event("Warning", "PrimaryNetworkProblem", (problem + kept)[:EVENT_MESSAGE_MAX])
        else:
            log.info("the primary network's configuration is in order again")
        self._complaint = problem
