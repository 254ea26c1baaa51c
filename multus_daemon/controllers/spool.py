"""Replays the DELs that a shim could not deliver: files in `<cniDir>/spool`, oldest first, each removed when done.

Format: the body of the POST that the shim would have sent, in a file `<nanoseconds>-<pid>.json` (docs/protocol.md).
A DEL can be repeated, so an entry that was served and whose removal a crash prevented does no harm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from multus_daemon.base import fs

log = logging.getLogger(__name__)

SUFFIX = ".json"
REJECTED_SUFFIX = ".rejected"
"""Behind the name of an entry that no daemon can serve; it stays for a person to look at."""
ENTRY_MAX_BYTES = 24 * 1024 * 1024
RETRY_FIRST_SECONDS = 5.0
RETRY_LAST_SECONDS = 300.0


class UndecodableEntryError(Exception):
    """The entry is no request; trying again can't help."""


class SpoolReplay:
    """Looks into the spool at start and every `interval` seconds, for as long as it runs."""

    def __init__(
        self,
        directory: Path,
        serve: Callable[[bytes], Awaitable[None]],
        *,
        interval: float = 2.0,
    ) -> None:
        """`serve` takes the bytes of one entry; it raises UndecodableEntryError, or anything else to be asked again."""
        self._directory = directory
        self._serve = serve
        self._interval = interval
        # Entry -> when it is due again on the loop's clock, and the last delay; both in seconds.
        self._retries: dict[str, tuple[float, float]] = {}

    async def run(self) -> None:
        """Replay for ever."""
        while True:
            await self.replay()
            await asyncio.sleep(self._interval)

    async def replay(self) -> int:
        """Serve every entry that is due, in order; how many were served."""
        now = asyncio.get_running_loop().time()
        served = 0
        for path in await asyncio.to_thread(self._entries):
            due, _ = self._retries.get(path.name, (0.0, 0.0))
            if due <= now:
                served += await self._entry(path)
        return served

    def _entries(self) -> list[Path]:
        try:
            return sorted(path for path in self._directory.iterdir() if path.suffix == SUFFIX and path.name[0] != ".")
        except FileNotFoundError:
            return []
        except OSError as error:
            log.error("spool %s can't be listed: %s", self._directory, error)
            return []

    async def _entry(self, path: Path) -> bool:
        try:
            body = await asyncio.to_thread(fs.read_limited, path, limit=ENTRY_MAX_BYTES, follow=False)
            await self._serve(body)
            await asyncio.to_thread(fs.remove, path)
        except UndecodableEntryError as error:
            log.error("spooled request %s is set aside: %s", path, error)
            await asyncio.to_thread(path.rename, path.with_suffix(REJECTED_SUFFIX))
            return False
        except Exception as error:
            delay = min(self._retries.get(path.name, (0.0, RETRY_FIRST_SECONDS / 2))[1] * 2, RETRY_LAST_SECONDS)
            self._retries[path.name] = (asyncio.get_running_loop().time() + delay, delay)
            log.warning("spooled request %s failed, tried again in %.0f s: %s", path.name, delay, error)
            return False
        self._retries.pop(path.name, None)
        log.info("spooled request %s served", path.name)
        return True
