"""The file in the runtime's CNI configuration directory: written where it is not as wanted, and kept.

It is written whole or not at all, and nothing here removes it. What another program does to it is undone, each time
after a longer pause, so that two agents do not chase each other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from multus_daemon import deadlines
from multus_daemon.cluster.conf_files import CONF_MAX_BYTES, SUFFIXES
from multus_daemon.metrics import PrimaryMetrics
from multus_daemon.runtime import fs
from multus_daemon.runtime.aio import in_thread
from multus_daemon.runtime.backoff import backoff
from multus_daemon.spec.netconf import generate
from multus_daemon.spec.ports import NodeEvents

log = logging.getLogger(__name__)

_DIRECTORY_MODE: Final = 0o755


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be in place."""

    target: Path
    data: bytes
    source: Path
    generated: bool
    """False for a file of the operator's."""


class RuntimeConf:
    """Remembers what it has put in place; told again and again what is to be there."""

    def __init__(
        self, directory: Path, events: NodeEvents, metrics: PrimaryMetrics, *, clock: Callable[[], float]
    ) -> None:
        """`directory`: the runtime's; `clock`: seconds."""
        self._directory = directory
        self._events = events
        self._metrics = metrics
        self._clock = clock
        self.placed: Wanted | None = None
        """What this daemon has put in place, or found there."""
        self._shadow = ""
        self._pauses: Iterator[float] = backoff(*deadlines.RESTORE_SECONDS)
        self._restored_at = float("-inf")
        self._pause = 0.0

    @property
    def generated(self) -> Path:
        """The file that is generated."""
        return self._directory / generate.FILE_NAME

    async def keep_place(self) -> None:
        """Put the placeholder where the runtime has nothing, so that it takes nothing away. Raises OSError."""
        await asyncio.to_thread(fs.ensure_directory, self._directory, mode=_DIRECTORY_MODE)
        if await asyncio.to_thread(_first_conf, self._directory):
            return
        await in_thread(fs.write_atomic, self.generated, generate.PLACEHOLDER)
        log.info("the node has no network configuration yet; %s keeps the place of ours", self.generated)

    async def put_in_place(self, wanted: Wanted, *, write: bool) -> str:
        """Write the configuration where it is not as wanted; what keeps from it, empty if nothing. Raises OSError.

        `write`: False, the primary network is not ready: nothing new is promised to the runtime.
        """
        if await asyncio.to_thread(_is_same_file, wanted):
            self.placed = wanted
            return ""
        present = await asyncio.to_thread(read, wanted.target)
        if present == wanted.data:
            self.placed = wanted
            await self._look_for_shadow(wanted.target)
            return ""
        if not write:
            return f"{wanted.target} is written when the primary network is ready"
        if self.placed == wanted:
            return await self._restore(wanted, present)
        await self._write(wanted)
        # What the operator has put into a file of their own is nobody's business.
        shown = f": {wanted.data.decode(errors='replace')}" if wanted.generated else ""
        log.info("%s written, from %s%s", wanted.target, wanted.source, shown)
        self._metrics.generated.inc()
        self._events.node_event("Normal", "CNIConfigWritten", f"{wanted.target} written, from {wanted.source}")
        await self._look_for_shadow(wanted.target)
        return ""

    async def _write(self, wanted: Wanted) -> None:
        await asyncio.to_thread(fs.ensure_directory, wanted.target.parent, mode=_DIRECTORY_MODE)
        # Not left half way by a daemon that stops.
        await in_thread(fs.write_atomic, wanted.target, wanted.data)
        self.placed = wanted

    async def _restore(self, wanted: Wanted, present: bytes | None) -> str:
        """Put back what another program has changed or taken away, unless it was put back a moment ago."""
        moved = await asyncio.to_thread(_moved_to, wanted.target) if present is None else []
        what = f"{wanted.target} was {'removed' if present is None else 'changed'} by another program"
        if moved:
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

    async def _look_for_shadow(self, target: Path) -> None:
        """Say so where the runtime takes another file than ours: it takes the lexically first."""
        name = await asyncio.to_thread(_first_conf, target.parent)
        shadow = name if name and name < target.name else ""
        if shadow and shadow != self._shadow:
            text = f"{target.parent / shadow} comes before {target.name}: the runtime uses it instead"
            log.warning("%s", text)
            self._events.node_event("Warning", "CNIConfigShadowed", text)
        self._shadow = shadow


def read(path: Path) -> bytes | None:
    """The content, None where there is no file, empty where it is too large to be ours. Raises OSError."""
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
    return min((path.name for path in directory.iterdir() if path.suffix in SUFFIXES), default="")
