"""Tells of changes in the directories of CNI configurations, and of the readiness indicator.

A watch is lost with the directory that it is on, and may be refused (inotify's limits). So it only makes a look come
sooner that comes by itself: one that fails delays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import watchfiles

log = logging.getLogger(__name__)

_STEP_MS: Final = 100
"""Changes that follow each other faster are one: an agent writes several files."""
_HASTY_STEP_MS: Final = 2
"""The same in haste. 0.7 % of a core, and 4 ms until a change is seen instead of 170."""


class ConfWatch:
    """Calls `changed` after each change, and sometimes without one."""

    def __init__(
        self,
        directories: Collection[Path],
        indicator: Path | None,
        changed: Callable[[], None],
        *,
        in_haste: Callable[[], bool],
        poll_seconds: float,
    ) -> None:
        """`directories`: they need not be there; `indicator`: a file, of whose directory nothing else counts.

        `in_haste`: whether a change must be seen at once; asked after each one. `poll_seconds`: pause after a failure.
        """
        self._directories = frozenset(directories)
        self._indicator = indicator
        self._changed = changed
        self._in_haste = in_haste
        self._poll_seconds = poll_seconds

    async def run(self) -> None:
        """Watch, for ever."""
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
        """Watch the directories until one of them is another than it was, or has come, or the haste has changed."""
        identities = await asyncio.to_thread(self._identities)
        if not identities:
            raise OSError("no directory to watch is there")
        in_haste = self._in_haste()
        step = _HASTY_STEP_MS if in_haste else _STEP_MS
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
                self._changed()
                if self._in_haste() != in_haste or await asyncio.to_thread(self._identities) != identities:
                    return

    def _identities(self) -> dict[Path, tuple[int, int]]:
        """The directories that are there, each with what tells it from another of the same name."""
        wanted = self._directories if self._indicator is None else self._directories | {self._indicator.parent}
        found = {}
        for path in wanted:
            with contextlib.suppress(OSError):
                status = path.stat()
                found[path] = (status.st_dev, status.st_ino)
        return found

    def _concerns_us(self, _change: watchfiles.Change, path: str) -> bool:
        """Not temporary files, and of a busy directory like /run the indicator only."""
        if self._indicator is not None and Path(path) == self._indicator:
            return True
        directory, name = os.path.split(path)
        # `..data` is what changes in a mounted ConfigMap.
        return Path(directory) in self._directories and (not name.startswith(".") or name.startswith(".."))
