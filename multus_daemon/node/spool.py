"""Replays the DELs that a shim could not deliver: files in `<cniDir>/spool`, each removed when it has been served.

Format: the body of the POST that the shim would have sent, in a file `<nanoseconds>-<pid>.json` (docs/protocol.md).
Entries of one container go in their order, those of different containers side by side, a few at once. One that fails is
tried again after a pause that grows, and keeps only the later ones of its own container waiting. What no daemon can
serve is set aside in `rejected/`. A DEL can be repeated, so an entry that was served and whose removal a crash
prevented does no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from multus_daemon import deadlines
from multus_daemon.metrics import DeleteMetrics
from multus_daemon.runtime import fs
from multus_daemon.runtime.backoff import backoff
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX, NodeEvents

log = logging.getLogger(__name__)

SUFFIX: Final = ".json"
REJECTED: Final = "rejected"
"""Folder of entries that no daemon can serve, for a person to look at."""
REJECTED_MAX: Final = 100
REJECTED_SECONDS: Final = 7 * 24 * 3600.0
ENTRY_MAX_BYTES: Final = 24 * 1024 * 1024
ENTRIES_MAX: Final = 10_000
"""So many are looked at in one go, the oldest."""
AT_ONCE: Final = 4
_DIGITS_MAX: Final = 20


class UndecodableEntryError(Exception):
    """The entry is no request; trying again can't help."""


class Requests(Protocol):
    """What the entries are for."""

    def container_of(self, body: bytes) -> str:
        """The container that the DEL is of. Raises UndecodableEntryError."""
        ...

    async def serve(self, body: bytes, written: float) -> None:
        """Serve the DEL, which was written down at that Unix time in seconds. Raises anything to be asked again."""
        ...


@dataclass(slots=True)
class _Entry:
    """What is remembered of a file."""

    container: str = ""
    due: float = 0.0
    """On the event loop's clock."""
    delays: Iterator[float] = field(default_factory=lambda: backoff(*deadlines.SPOOL_RETRY_SECONDS, jitter=0.1))
    is_served: bool = False
    """Only its removal is still to be done."""


class SpoolReplay:
    """Looks into the spool at start and every `interval` seconds, for as long as it runs."""

    def __init__(
        self,
        directory: Path,
        requests: Requests,
        events: NodeEvents,
        metrics: DeleteMetrics,
        *,
        interval: float = deadlines.SPOOL_LOOK_SECONDS,
    ) -> None:
        self._directory = directory
        self._requests = requests
        self._events = events
        self._metrics = metrics
        self._interval = interval
        self._known: dict[str, _Entry] = {}

    async def run(self) -> None:
        """Replay for ever."""
        while True:
            # Of one container only the oldest is served in one go.
            while await self.replay():
                pass
            await asyncio.sleep(self._interval)

    async def replay(self) -> int:
        """Serve the oldest entry of each container that has one which is due; how many were served."""
        names = await asyncio.to_thread(self._list)
        self._known = {name: self._known.get(name, _Entry()) for name in names}
        self._metrics.spooled.set(len(names))
        taken: set[str] = set()
        rest = iter(names)
        turn = asyncio.Lock()
        served: list[str] = []

        async def some() -> None:
            while True:
                # One at a time, so that of one container the oldest comes first.
                async with turn:
                    found = await self._next(rest, taken)
                if found is None:
                    return
                if await self._serve(*found):
                    served.append(found[0])

        async with asyncio.TaskGroup() as group:
            for _ in range(min(AT_ONCE, len(names))):
                group.create_task(some())
        return len(served)

    def _list(self) -> list[str]:
        """The names of the oldest entries, in order. Removes what shims left that were ended as they wrote."""
        try:
            # Whoever else could write here could have any container's networks removed.
            fs.repair_private_directory(self._directory)
            with os.scandir(self._directory) as found:
                return heapq.nsmallest(ENTRIES_MAX, self._names(found))
        except FileNotFoundError:
            return []
        except OSError as error:
            log.error("spool %s can't be listed: %s", self._directory, error)
            return []

    def _names(self, found: Iterator[os.DirEntry[str]]) -> Iterator[str]:
        for entry in found:
            if entry.name.startswith("."):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > deadlines.SPOOL_CUT_OFF_SECONDS:
                        os.unlink(entry.path)
            elif entry.name.endswith(SUFFIX) and not entry.is_dir(follow_symlinks=False):
                yield entry.name

    async def _next(self, names: Iterator[str], taken: set[str]) -> tuple[str, bytes] | None:
        """The next entry that is due, with its content; of each container the oldest one only."""
        for name in names:
            entry, path = self._known[name], self._directory / name
            body = b""
            try:
                if not entry.container:
                    if entry.due > _now():
                        continue
                    body = await asyncio.to_thread(_read, path)
                    entry.container = self._requests.container_of(body)
            except FileNotFoundError:
                continue
            except UndecodableEntryError as error:
                await self._reject(path, str(error))
                continue
            except Exception as error:
                self._failed(name, entry, error)
                continue
            if entry.container not in taken:
                taken.add(entry.container)
                if entry.due <= _now():
                    return name, body
        return None

    async def _serve(self, name: str, body: bytes) -> bool:
        entry, path = self._known[name], self._directory / name
        try:
            if not entry.is_served:
                body = body or await asyncio.to_thread(_read, path)
                await self._requests.serve(body, _written(name, await asyncio.to_thread(path.lstat)))
                entry.is_served = True
            await asyncio.to_thread(fs.remove, path)
        except Exception as error:
            self._failed(name, entry, error)
            return False
        self._metrics.replays.labels("served").inc()
        log.info("spooled DEL %s of container %s served", name, entry.container)
        return True

    def _failed(self, name: str, entry: _Entry, error: Exception) -> None:
        delay = next(entry.delays)
        entry.due = _now() + delay
        self._metrics.replays.labels("failed").inc()
        log.warning(
            "spooled DEL %s of container %s %s, tried again in %.0f s: %s",
            name, entry.container, "is served and can't be removed" if entry.is_served else "failed", delay, error,
        )  # fmt: skip

    async def _reject(self, path: Path, problem: str) -> None:
        """Set an entry aside that can't be served, and say so."""
        try:
            await asyncio.to_thread(_set_aside, path)
        except OSError as error:
            self._failed(path.name, self._known[path.name], error)
            return
        text = f"{path} is no DEL that could be served, and is set aside in {REJECTED}/: {problem}"
        log.error("%s", text)
        self._metrics.replays.labels("rejected").inc()
        self._events.node_event("Warning", "SpoolEntryRejected", text[:EVENT_MESSAGE_MAX])


def _read(path: Path) -> bytes:
    """The content of an entry. Raises UndecodableEntryError for a file that no shim has written, OSError."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise UndecodableEntryError("it is no regular file")
        if status.st_uid not in (0, os.geteuid()):
            raise UndecodableEntryError(f"it belongs to user {status.st_uid}, and shims run as root")
        return fs.read_limited(path, limit=ENTRY_MAX_BYTES, follow=False)
    except fs.FileTooLargeError as error:
        raise UndecodableEntryError(str(error)) from error


def _written(name: str, status: os.stat_result) -> float:
    """When the shim wrote the entry, Unix time in seconds: by its name, else by the file's own time."""
    digits = name.partition("-")[0]
    return int(digits) / 1e9 if digits.isdecimal() and len(digits) <= _DIGITS_MAX else status.st_mtime


def _set_aside(path: Path) -> None:
    """Move a file into the folder of the rejected, and keep that one small. Raises OSError."""
    folder = path.parent / REJECTED
    fs.ensure_directory(folder)
    path.rename(folder / path.name)
    # From when it was set aside, not from when it was written.
    os.utime(folder / path.name, follow_symlinks=False)
    with os.scandir(folder) as found:
        kept = sorted((entry.stat(follow_symlinks=False).st_mtime, entry.name) for entry in found)
    oldest = time.time() - REJECTED_SECONDS
    for number, (set_aside, name) in enumerate(kept):
        if set_aside < oldest or number < len(kept) - REJECTED_MAX:
            fs.remove(folder / name)


def _now() -> float:
    return asyncio.get_running_loop().time()
