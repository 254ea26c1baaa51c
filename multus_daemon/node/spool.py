"""Replay the DELs that a shim could not deliver: files in `<cniDir>/spool`, removed once they are served.

An entry is the body of the shim's POST, in a file `<nanoseconds>-<pid>.json` (docs/protocol.md). Entries of one
container are served in order, those of different containers in parallel, a few at once. A failed entry is retried with
backoff and delays only later entries of its container. Malformed entries are moved to `rejected/`. A crash may prevent
the removal of a served entry; that is harmless, because a DEL can be repeated.
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
from multus_daemon.runtime.deadline import backoff
from multus_daemon.runtime.gates import Reasons
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX, Events

log = logging.getLogger(__name__)

SUFFIX: Final = ".json"
REJECTED: Final = "rejected"
"""Folder of malformed entries, for inspection by a person."""
REJECTED_MAX: Final = 100
REJECTED_SECONDS: Final = 7 * 24 * 3600.0
ENTRY_MAX_BYTES: Final = 24 * 1024 * 1024
ENTRIES_MAX: Final = 10_000
"""Maximum number of entries in one pass; the oldest are taken."""
AT_ONCE: Final = 4
DEGRADED: Final = "spool"
"""Name of the degradation while the spool can't be read."""
_DIGITS_MAX: Final = 20


class UndecodableEntryError(Exception):
    """The entry is not a request; a retry can't help."""


class Requests(Protocol):
    """Serves the DELs that the shim has written to the spool."""

    def container_of(self, body: bytes) -> str:
        """Return the container of the DEL. Raises UndecodableEntryError."""

    async def serve(self, body: bytes, written: float) -> None:
        """Serve the DEL; `written`: when the shim wrote it, Unix time in seconds. Any exception causes a retry."""


@dataclass(slots=True)
class _Entry:
    """A file of the spool, and the tries to serve it."""

    container: str = ""
    due: float = 0.0
    """On the event loop's clock."""
    delays: Iterator[float] = field(default_factory=lambda: backoff(*deadlines.SPOOL_RETRY_SECONDS, jitter=0.1))
    is_served: bool = False
    """It only has to be removed."""
    problem: str = ""
    """The error of the last try."""


class SpoolReplay:
    """A root task: looks into the spool at start and every SPOOL_LOOK_SECONDS."""

    def __init__(
        self,
        directory: Path,
        requests: Requests,
        events: Events,
        metrics: DeleteMetrics,
        degraded: Reasons | None = None,
    ) -> None:
        self._directory = directory
        self._degraded = degraded or Reasons()
        self._requests = requests
        self._events = events
        self._metrics = metrics
        self._known: dict[str, _Entry] = {}
        self.looked = asyncio.Event()
        """Set when every DEL that was there at start has been tried."""

    @property
    def failed(self) -> dict[str, str]:
        """The errors of the entries that failed, by container, or by name if that is not known."""
        return {entry.container or name: entry.problem for name, entry in self._known.items() if entry.problem}

    async def run(self) -> None:
        """Replay forever."""
        while True:
            # One pass serves only the oldest entry of each container.
            while await self.replay():
                pass
            self.looked.set()
            await asyncio.sleep(deadlines.SPOOL_LOOK_SECONDS)

    async def replay(self) -> int:
        """Serve the oldest entry of each container if it is due; return the number of served entries."""
        names = await asyncio.to_thread(self._list)
        self._known = {name: self._known.get(name, _Entry()) for name in names}
        self._metrics.spooled.set(len(names))
        taken: set[str] = set()
        rest = iter(names)
        turn = asyncio.Lock()
        served: list[str] = []

        async def some() -> None:
            while True:
                # One at a time, so that the oldest entry of a container comes first.
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
        """Return the names of the oldest entries, in order, and remove files that a killed shim left half written."""
        try:
            # Other users with write access could remove any container's networks.
            fs.repair_private_directory(self._directory)
            with os.scandir(self._directory) as found:
                names = heapq.nsmallest(ENTRIES_MAX, self._names(found))
        except FileNotFoundError:
            names = []
        except OSError as error:
            text = f"DELs that came without a daemon are not served: {self._directory} can't be listed"
            log.error("%s: %s", text, error)
            remedy = "it must be a directory of the daemon's user"
            self._degraded.close(DEGRADED, f"{text}: {error.strerror or error}; {remedy}")
            return []
        self._degraded.open(DEGRADED)
        return names

    def _names(self, found: Iterator[os.DirEntry[str]]) -> Iterator[str]:
        for entry in found:
            if entry.name.startswith("."):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > deadlines.SPOOL_CUT_OFF_SECONDS:
                        os.unlink(entry.path)
            elif entry.name.endswith(SUFFIX) and not entry.is_dir(follow_symlinks=False):
                yield entry.name

    async def _next(self, names: Iterator[str], taken: set[str]) -> tuple[str, bytes] | None:
        """Return the next entry that is due, with its content; only the oldest of each container."""
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
        self._metrics.replays.labels("success").inc()
        log.info("spooled DEL %s of container %s served", name, entry.container)
        return True

    def _failed(self, name: str, entry: _Entry, error: Exception) -> None:
        delay = next(entry.delays)
        entry.due = _now() + delay
        entry.problem = str(error)
        self._metrics.replays.labels("error").inc()
        # The error of a request has its own line.
        level = logging.DEBUG if isinstance(error, CniError) else logging.WARNING
        log.log(
            level, "spooled DEL %s of container %s %s, tried again in %.0f s: %s",
            name, entry.container, "is served and can't be removed" if entry.is_served else "failed", delay, error,
        )  # fmt: skip

    async def _reject(self, path: Path, problem: str) -> None:
        """Move a malformed entry away, and report it."""
        try:
            await asyncio.to_thread(_set_aside, path)
        except OSError as error:
            self._failed(path.name, self._known[path.name], error)
            return
        text = f"{path} is no DEL that could be served, and is set aside in {REJECTED}/: {problem}"
        log.error("%s", text)
        self._metrics.replays.labels("refused").inc()
        self._events.node_event("Warning", "SpoolEntryRejected", text[:EVENT_MESSAGE_MAX])


def _read(path: Path) -> bytes:
    """Return the content of an entry. Raises UndecodableEntryError for a file that no shim wrote, OSError."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise UndecodableEntryError("it is not a regular file")
        if status.st_uid not in (0, os.geteuid()):
            raise UndecodableEntryError(f"it belongs to user {status.st_uid}, and shims run as root")
        return fs.read_limited(path, limit=ENTRY_MAX_BYTES, follow=False)
    except fs.FileTooLargeError as error:
        raise UndecodableEntryError(str(error)) from error


def _written(name: str, status: os.stat_result) -> float:
    """Return when the shim wrote the entry, Unix time in seconds: from its name, else the time of the file."""
    digits = name.partition("-")[0]
    return int(digits) / 1e9 if digits.isdecimal() and len(digits) <= _DIGITS_MAX else status.st_mtime


def _set_aside(path: Path) -> None:
    """Move a file into the folder of rejected entries, and limit that folder. Raises OSError."""
    folder = path.parent / REJECTED
    fs.ensure_directory(folder)
    path.rename(folder / path.name)
    # Its age counts from now, not from when it was written.
    os.utime(folder / path.name, follow_symlinks=False)
    with os.scandir(folder) as found:
        kept = sorted((entry.stat(follow_symlinks=False).st_mtime, entry.name) for entry in found)
    oldest = time.time() - REJECTED_SECONDS
    for number, (set_aside, name) in enumerate(kept):
        if set_aside < oldest or number < len(kept) - REJECTED_MAX:
            fs.remove(folder / name)


def _now() -> float:
    return asyncio.get_running_loop().time()
