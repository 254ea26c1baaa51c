"""Replay the DELs that a shim could not deliver: files in `<cniDir>/spool`, removed once they are served.

An entry is the body of the shim's POST, in a file `<nanoseconds>-<pid>.json` (docs/protocol.md). Entries of one
container are served in order, those of different containers in parallel, a few at once. A failed entry is retried with
backoff and delays only later entries of its container. Malformed entries are moved to `rejected/`. After a crash an
entry may be served twice; that is harmless, because a DEL can be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

from multus_daemon import deadlines
from multus_daemon.metrics import Metrics
from multus_daemon.runtime import fs
from multus_daemon.runtime.gates import Reasons
from multus_daemon.runtime.workqueue import WorkQueue
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.ports import Events

log = logging.getLogger(__name__)

SUFFIX: Final = ".json"
REJECTED: Final = "rejected"
"""Folder of malformed entries, for inspection by a person."""
REJECTED_MAX: Final = 100
REJECTED_SECONDS: Final = 7 * 24 * 3600.0
ENTRY_MAX_BYTES: Final = 24 * 1024 * 1024
ENTRIES_MAX: Final = 10_000
"""Maximum number of entries that are listed at once, the oldest."""
AT_ONCE: Final = 4
DEGRADED: Final = "spool"
"""Key in `degraded` of `/readyz` while the spool can't be read."""
_DIGITS_MAX: Final = 20


class UndecodableEntryError(Exception):
    """The entry is not a request; a retry can't help."""


class SpoolReplay:
    """Serves the DELs in the spool at start and every SPOOL_LOOK_SECONDS; `run` is a root task."""

    def __init__(
        self,
        directory: Path,
        container_of: Callable[[bytes], str],
        serve: Callable[[bytes, float], Awaitable[None]],
        events: Events,
        metrics: Metrics,
        degraded: Reasons | None = None,
    ) -> None:
        """`container_of` returns the container id in a body, or raises UndecodableEntryError.

        `serve` serves a DEL: its body, and when the shim wrote it, Unix time in seconds. Any exception causes a retry.
        """
        self._directory = directory
        self._degraded = degraded or Reasons()
        self._container_of, self._serve_body = container_of, serve
        self._events = events
        self._metrics = metrics
        self._containers: dict[str, str] = {}
        """The container of each entry, by name, the oldest first; empty if the entry could not be read."""
        self._served: set[str] = set()
        """Entries that only have to be removed."""
        self._count = 0
        self._queue = WorkQueue[str](
            self._serve, retry=deadlines.SPOOL_RETRY_SECONDS, failed=self._failed, at_once=AT_ONCE, name="spool"
        )
        """Keys are containers; for an entry that could not be read, `/` and its name."""
        self.looked = asyncio.Event()
        """Set when every DEL that was there at start has been tried."""

    @property
    def failed(self) -> dict[str, str]:
        """The errors of failed entries, by container id, or by the entry's name if that is not known."""
        return {key.removeprefix("/"): problem for key, problem in self._queue.problems.items()}

    async def run(self) -> None:
        """Replay forever."""
        while True:
            # One pass serves only the oldest entry of each container.
            while await self.replay():
                pass
            self.looked.set()
            await asyncio.sleep(deadlines.SPOOL_LOOK_SECONDS)

    async def replay(self) -> int:
        """Serve the oldest entry of each container that is due; return the number of served entries."""
        names = await asyncio.to_thread(self._list)
        self._metrics.spooled.set(len(names))
        self._served.intersection_update(names)
        known, self._containers, self._count = self._containers, {}, 0
        for name in names:
            self._containers[name] = known.get(name, "")
            if name not in known:
                # One after the other, in the order of their age. The queue reports what fails.
                with contextlib.suppress(Exception):
                    await self._find_container(name)
        keys = {container or f"/{name}" for name, container in self._containers.items()}
        for key in self._queue.problems.keys() - keys:
            self._queue.forget(key)
        for key in keys:
            self._queue.add_after(key, 0)
        await self._queue.drain_once()
        return self._count

    def _list(self) -> list[str]:
        """Return the names of the oldest entries, in order; remove half-written files of killed shims."""
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

    async def _find_container(self, name: str) -> None:
        """Read an entry to find its container; drop it if it is gone or malformed. Raises OSError."""
        path = self._directory / name
        try:
            self._containers[name] = self._container_of(await asyncio.to_thread(_read, path))
        except FileNotFoundError:
            del self._containers[name]
        except UndecodableEntryError as error:
            await self._reject(path, str(error))
            del self._containers[name]

    async def _serve(self, key: str) -> None:
        """Serve the oldest entry of a container. Any exception causes a retry."""
        if key.startswith("/"):
            name = key.removeprefix("/")
            await self._find_container(name)
            if name in self._containers:
                self._queue.add_after(self._containers[name], 0)
            return
        name = next((name for name, container in self._containers.items() if container == key), "")
        if not name:
            return
        path = self._directory / name
        if name not in self._served:
            body = await asyncio.to_thread(_read, path)
            await self._serve_body(body, _written(name, await asyncio.to_thread(path.lstat)))
            self._served.add(name)
        await asyncio.to_thread(fs.remove, path)
        del self._containers[name]
        self._count += 1
        self._metrics.replays.labels("success").inc()
        log.info("spooled DEL %s of container %s served", name, key)

    def _failed(self, key: str, error: Exception, seconds: float) -> None:
        self._metrics.replays.labels("error").inc()
        # The error of a request has its own line.
        level = logging.DEBUG if isinstance(error, CniError) else logging.WARNING
        log.log(level, "spooled DEL of %s failed, tried again in %.0f s: %s", key, seconds, error)

    async def _reject(self, path: Path, problem: str) -> None:
        """Move a malformed entry away, and report it. Raises OSError."""
        await asyncio.to_thread(_set_aside, path)
        text = f"{path} is not a DEL that can be served, and is moved to {REJECTED}/: {problem}"
        log.error("%s", text)
        self._metrics.replays.labels("refused").inc()
        self._events.node_event("Warning", "SpoolEntryRejected", text)


def _read(path: Path) -> bytes:
    """Return the content of an entry. Raises UndecodableEntryError for a file that no shim wrote, OSError."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise UndecodableEntryError("the entry is not a regular file")
        if status.st_uid not in (0, os.geteuid()):
            raise UndecodableEntryError(f"the entry belongs to user {status.st_uid}, and shims run as root")
        return fs.read_limited(path, limit=ENTRY_MAX_BYTES, follow=False)
    except fs.FileTooLargeError as error:
        raise UndecodableEntryError(str(error)) from error


def _written(name: str, status: os.stat_result) -> float:
    """Return when the shim wrote the entry, in Unix seconds: from its name, else the file's time."""
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
