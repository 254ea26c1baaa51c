"""Keeps the node's CNI configuration in place: `00-multus.conf`, generated from that of the primary network.

It is written when the daemon can serve, whole or not at all, and only where its content differs. Nothing removes it:
while the daemon restarts, pods wait instead of getting the bare primary network. What another program does to it is
undone, each time after a longer pause, so that two agents do not chase each other. A primary network that can't be
read leaves the last good configuration where it is. With `multusConfigFile` a file of the operator's takes the place
of what is generated.

On a node that has no configuration yet the place is kept by a file that is none (`generate.PLACEHOLDER`), so that the
runtime does not take the primary network's own in the moment between its coming and ours.

The truth is what a look at the directories finds; watching them only makes the next look come sooner.
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
from typing import Final, Protocol

import watchfiles

from multus_daemon.base import fs
from multus_daemon.base.aio import backoff, in_thread
from multus_daemon.base.gates import Gates
from multus_daemon.cni import conf, gojson
from multus_daemon.cni.errors import CniError
from multus_daemon.controllers.election import Election, NoPrimaryError
from multus_daemon.engine.verbs import INDICATOR_GATE
from multus_daemon.netconf import generate, primary
from multus_daemon.ports import ConfFiles
from multus_daemon.settings import Settings

log = logging.getLogger(__name__)

GATE: Final = "primary"
AUTO: Final = "auto"
POLL_SECONDS: Final = 2.0
"""How often the directories are looked at, watched or not."""
RESTORE_SECONDS: Final = (1.0, 60.0)
"""Pause after putting the configuration back, the first one and the longest."""
CALM_SECONDS: Final = 300.0
"""After so long without a need to put it back the pauses begin anew."""
CONF_MAX_BYTES: Final = 1024 * 1024
_STEP_MS: Final = 100
"""Changes that follow each other faster are one: an agent writes several files."""
_FIRST_STEP_MS: Final = 2
"""The same until there is a configuration of ours. 0.7 % of a core, and 4 ms until a change is seen instead of 170."""
_DIRECTORY_MODE: Final = 0o755


class Observer(Protocol):
    """What is counted here. No method may block or raise."""

    def generated(self) -> None:
        """The configuration was written, new or with another content."""
        ...

    def restored(self) -> None:
        """The configuration was put back after another program had changed it."""
        ...

    def primary_problem(self) -> None:
        """A problem with the primary network or the configuration has come up."""
        ...


class NodeEvents(Protocol):
    """Where Events about the node go."""

    def node_event(self, kind: str, reason: str, message: str) -> None:
        """See `ports.ClusterStore`."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be in place."""

    target: Path
    data: bytes
    source: Path


class PrimaryConfig:
    """A root task. Gates: `primary`, and that of the readiness indicator, which ADD looks at."""

    def __init__(
        self,
        settings: Settings,
        files: ConfFiles,
        gates: Gates,
        events: NodeEvents,
        observer: Observer,
        *,
        poll_seconds: float = POLL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings.primary
        self._given = settings.given
        self._gates = gates
        self._events = events
        self._observer = observer
        self._poll_seconds = poll_seconds
        self._clock = clock
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
        self._wake = asyncio.Event()
        self._good: Wanted | None = None
        """The last that was fit to be in place."""
        self._placed: Wanted | None = None
        """What this daemon has put in place, or found there."""
        self._complaint = ""
        self._shadow = ""
        self._pauses: Iterator[float] = backoff(*RESTORE_SECONDS)
        self._restored_at = float("-inf")
        self._pause = 0.0
        gates.close(GATE, "not looked at yet")
        if self._indicator is not None:
            gates.close(INDICATOR_GATE, "not looked at yet")

    @staticmethod
    def is_wanted(settings: Settings) -> bool:
        """Whether there is something to do: standalone daemons and tests leave the node's configuration alone."""
        wanted = settings.primary
        return bool(wanted.config_dir and (wanted.config_file != AUTO or wanted.autoconfig_dir))

    async def run(self) -> None:
        """Keep the configuration in place, for ever; from when every other gate is open."""
        await self._look_at_indicator()
        self._gates.close(GATE, "the configuration is written when the daemon can serve")
        # The first look says so where it fails.
        with contextlib.suppress(OSError):
            await self._keep_place()
        await self._gates.wait_open(but=(GATE, INDICATOR_GATE))
        await self._prepare()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(), name="primary-watch")
            group.create_task(self._keep(), name="primary-keep")

    async def _prepare(self) -> None:
        """What an earlier daemon has left: half a temporary file, and its choice of the primary network."""
        try:
            await asyncio.to_thread(fs.sweep, self._directory, name=generate.FILE_NAME)
            if self._is_auto:
                data = await in_thread(_read, self._directory / generate.FILE_NAME)
                self._election.remember(gojson.get_str(gojson.loads_object(data or b"{}"), "clusterNetwork") or "")
        except (OSError, gojson.JsonError) as error:
            log.info("%s tells nothing: %s", self._directory / generate.FILE_NAME, error)

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
                place_problem = await self._put_in_place(self._good, write=ready)
            except OSError as error:
                place_problem = f"{self._good.target} can't be written: {error.strerror or error}"
        else:
            try:
                await self._keep_place()
            except OSError as error:
                target = self._directory / generate.FILE_NAME
                place_problem = f"the place of {target} can't be kept: {error.strerror or error}"
        self._tell(source_problem, place_problem)

    # --- what is wanted ---

    async def _wanted(self) -> Wanted:
        """Raises NoPrimaryError and CniError."""
        if self._is_auto:
            found = await self._election.primary()
            data = generate.generate(self._given, found.config, str(found.path))
            return Wanted(self._directory / generate.FILE_NAME, data, found.path)
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
        return Wanted(self._directory / self._source.name, data, self._source)

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

    # --- the file ---

    async def _keep_place(self) -> None:
        """Put the placeholder where the runtime has nothing, so that it takes nothing away. Raises OSError."""
        if not self._is_auto:
            return
        await asyncio.to_thread(fs.ensure_directory, self._directory, mode=_DIRECTORY_MODE)
        if await asyncio.to_thread(_first_conf, self._directory):
            return
        target = self._directory / generate.FILE_NAME
        await in_thread(fs.write_atomic, target, generate.PLACEHOLDER)
        log.info("the node has no network configuration yet; %s keeps the place of ours", target)

    async def _put_in_place(self, wanted: Wanted, *, write: bool) -> str:
        """Write the configuration where it is not as wanted; what keeps from it, empty if nothing. Raises OSError.

        `write`: False, the primary network is not ready: nothing new is promised to the runtime.
        """
        if await asyncio.to_thread(_is_same_file, wanted):
            self._placed = wanted
            return ""
        present = await asyncio.to_thread(_read, wanted.target)
        if present == wanted.data:
            self._placed = wanted
            await self._look_for_shadow(wanted.target)
            return ""
        if not write:
            return f"{wanted.target} is written when the primary network is ready"
        if self._placed == wanted:
            return await self._restore(wanted, present)
        await self._write(wanted)
        # What the operator has put into a file of their own is nobody's business.
        shown = f": {wanted.data.decode(errors='replace')}" if self._is_auto else ""
        log.info("%s written, from %s%s", wanted.target, wanted.source, shown)
        self._observer.generated()
        self._events.node_event("Normal", "CNIConfigWritten", f"{wanted.target} written, from {wanted.source}")
        await self._look_for_shadow(wanted.target)
        return ""

    async def _write(self, wanted: Wanted) -> None:
        await asyncio.to_thread(fs.ensure_directory, wanted.target.parent, mode=_DIRECTORY_MODE)
        # Not left half way by a daemon that stops.
        await in_thread(fs.write_atomic, wanted.target, wanted.data)
        self._placed = wanted

    async def _restore(self, wanted: Wanted, present: bytes | None) -> str:
        """Put back what another program has changed or taken away, unless it was put back a moment ago."""
        moved = await asyncio.to_thread(_moved_to, wanted.target) if present is None else []
        what = f"{wanted.target} was {'removed' if present is None else 'changed'} by another program"
        if moved:
            what += f"; there is {', '.join(moved)}"
            if any(name.endswith(".cilium_bak") for name in moved):
                what += " (Cilium's: set cni.exclusive to false)"
        now = self._clock()
        if now - self._restored_at > CALM_SECONDS:
            self._pauses, self._pause = backoff(*RESTORE_SECONDS), 0.0
        if now - self._restored_at < self._pause:
            return f"{what}, again; it is put back after a pause"
        await self._write(wanted)
        self._restored_at, self._pause = now, next(self._pauses)
        log.warning("%s; it is put back", what)
        self._observer.restored()
        self._events.node_event("Warning", "CNIConfigRestored", f"{what}; it is put back")
        return ""

    async def _look_for_shadow(self, target: Path) -> None:
        """Say so where the runtime takes another file than ours: it takes the lexically first."""
        name = await asyncio.to_thread(_first_conf, target.parent)
        shadow = name if name and name < target.name else ""
        if shadow and shadow != self._shadow:
            text = f"{target.parent / shadow} comes before {target.name}: the runtime uses it instead"
            log.warning("%s", text)
            self._events.node_event("Warning", "CNIConfigShadowed", text)
        self._shadow = shadow

    # --- what is said ---

    def _tell(self, source_problem: str, place_problem: str) -> None:
        """Gate, log, Event and metric."""
        problem = "; ".join(filter(None, (source_problem, place_problem)))
        # The operator's own file, once it is in place, serves as it is; a primary network is read with each ADD.
        hinders = place_problem or (source_problem if self._is_auto or self._placed is None else "")
        if hinders:
            self._gates.close(GATE, problem)
        else:
            self._gates.open(GATE)
        if problem == self._complaint:
            return
        if problem:
            kept = f"; {self._placed.target} stays as it is" if self._placed and source_problem else ""
            log.warning("%s%s", problem, kept)
            self._observer.primary_problem()
            self._events.node_event("Warning", "PrimaryNetworkProblem", problem + kept)
        else:
            log.info("the primary network's configuration is in order again")
        self._complaint = problem

    # --- watching ---

    async def _watch(self) -> None:
        """Wake the next look at each change; the looks come by themselves too, so a watch that fails only delays."""
        # It counts every change on INFO.
        logging.getLogger("watchfiles").setLevel(logging.WARNING)
        complaint = ""
        while True:
            problem = ""
            try:
                await self._watch_until_replaced()
            except (OSError, RuntimeError) as error:
                problem = str(error)
            if problem and problem != complaint:
                log.info("changes are found every %s s only: %s", self._poll_seconds, problem)
            complaint = problem
            if problem:
                await asyncio.sleep(self._poll_seconds)

    async def _watch_until_replaced(self) -> None:
        """Watch the directories until one of them is another than it was, or has come, or ours is in place."""
        identities = await asyncio.to_thread(self._identities)
        if not identities:
            raise OSError("no directory to watch is there")
        is_first = self._placed is None
        step = _FIRST_STEP_MS if is_first else _STEP_MS
        changes = watchfiles.awatch(
            *identities,
            watch_filter=self._concerns_us,
            debounce=10 * step,
            step=step,
            yield_on_timeout=True,
            recursive=False,
            ignore_permission_denied=True,
        )
        async with contextlib.aclosing(changes):
            async for _ in changes:
                self._wake.set()
                if (self._placed is None) != is_first or await asyncio.to_thread(self._identities) != identities:
                    return

    def _identities(self) -> dict[Path, tuple[int, int]]:
        """The directories that are there, each with what tells it from another of the same name."""
        wanted = {self._directory, self._source if self._is_auto else self._source.parent}
        if self._indicator is not None:
            wanted.add(self._indicator.parent)
        found = {}
        for path in wanted:
            with contextlib.suppress(OSError):
                status = path.stat()
                found[path] = (status.st_dev, status.st_ino)
        return found

    def _concerns_us(self, _change: watchfiles.Change, path: str) -> bool:
        """Not temporary files, and of a busy directory like /run the indicator only."""
        directory, name = os.path.split(path)
        if self._indicator is not None and Path(directory) == self._indicator.parent:
            return name == self._indicator.name or Path(directory) in (self._directory, self._source)
        # `..data` is what changes in a mounted ConfigMap.
        return not name.startswith(".") or name.startswith("..")


def _read(path: Path) -> bytes | None:
    """The content, None where there is no file. Raises OSError."""
    try:
        return fs.read_limited(path, limit=CONF_MAX_BYTES)
    except FileNotFoundError:
        return None
    except fs.FileTooLargeError:
        return b""


def _is_same_file(wanted: Wanted) -> bool:
    """True where the operator's file lies in the runtime's directory itself."""
    try:
        return wanted.target.samefile(wanted.source)
    except OSError:
        return False


def _moved_to(target: Path) -> list[str]:
    """Files that look like `target` renamed."""
    return sorted(path.name for path in target.parent.glob(f"{target.name}?*"))


def _first_conf(directory: Path) -> str:
    """The file that the runtime takes first; empty if there is none."""
    suffixes = (*primary.SUFFIXES, ".json")
    return min((path.name for path in directory.iterdir() if path.suffix in suffixes), default="")
