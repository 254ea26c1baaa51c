"""Watch the directories of CNI configurations and the readiness indicator.

A watch ends with its directory, and the limits of inotify may prevent it. It only triggers a periodic look earlier, so
a failure causes a delay and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from multus_daemon.runtime import watching

log = logging.getLogger(__name__)

_STEP_SECONDS: Final = 0.1
"""Faster changes are combined: an agent writes several files."""
_HASTY_STEP_SECONDS: Final = 0.002


class ConfWatch:
    """Calls `changed` at least once after each change."""

    def __init__(
        self,
        directories: Collection[Path],
        indicator: Path | None,
        changed: Callable[[], None],
        *,
        in_haste: Callable[[], bool],
        poll_seconds: float,
    ) -> None:
        """`directories` may be missing. Of the directory of the file `indicator`, other files are ignored.

        `in_haste` returns whether changes must not be combined. `poll_seconds`: pause after a failure.
        """
        self._directories = frozenset(directories)
        self._indicator = indicator
        self._changed = changed
        self._in_haste = in_haste
        self._poll_seconds = poll_seconds

    async def run(self) -> None:
        """Watch forever."""
        complaint = ""
        while True:
            try:
                await self._watch_until_replaced()
                complaint = ""
            except OSError as error:
                if str(error) != complaint:
                    log.info("changes are found every %s s only: %s", self._poll_seconds, error)
                complaint = str(error)
                await asyncio.sleep(self._poll_seconds)

    async def _watch_until_replaced(self) -> None:
        """Watch until a directory is created or replaced, or `in_haste` changes. Raises OSError."""
        identities = await asyncio.to_thread(self._identities)
        if not identities:
            raise OSError("no directory to watch is there")
        in_haste = self._in_haste()
        step = _HASTY_STEP_SECONDS if in_haste else _STEP_SECONDS
        changes = watching.changes(identities, self._concerns_us, step=step)
        async with contextlib.aclosing(changes):
            async for _ in changes:
                self._changed()
                if self._in_haste() != in_haste or await asyncio.to_thread(self._identities) != identities:
                    return

    def _identities(self) -> dict[Path, tuple[int, int]]:
        """Return the existing directories with their device and inode."""
        wanted = self._directories if self._indicator is None else self._directories | {self._indicator.parent}
        found = {}
        for path in wanted:
            with contextlib.suppress(OSError):
                status = path.stat()
                found[path] = (status.st_dev, status.st_ino)
        return found

    def _concerns_us(self, directory: Path, name: str) -> bool:
        """Ignore temporary files, and all but the indicator in its directory, which may be busy like /run."""
        if directory / name == self._indicator:
            return True
        # Updates of a mounted ConfigMap change `..data`.
        return directory in self._directories and (not name.startswith(".") or name.startswith(".."))
