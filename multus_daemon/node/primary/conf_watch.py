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

from multus_daemon.runtime import inotify

log = logging.getLogger(__name__)

_STEP_SECONDS: Final = 0.1
"""Faster changes are combined: an agent writes several files."""
_HASTY_STEP_SECONDS: Final = 0.002


async def watch(
    directories: Collection[Path],
    indicator: Path | None,
    changed: Callable[[], None],
    *,
    in_haste: Callable[[], bool],
    poll_seconds: float,
) -> None:
    """Call `changed` at least once after each change, forever. `poll_seconds`: pause after a failure.

    `directories` may be missing. Of the directory of the file `indicator`, other files are ignored. `in_haste` returns
    whether changes must not be combined.
    """

    def is_relevant(directory: Path, name: str) -> bool:
        if directory / name == indicator:
            return True
        # Temporary files are ignored, but updates of a mounted ConfigMap change `..data`.
        return directory in directories and (not name.startswith(".") or name.startswith(".."))

    watched = {*directories, indicator.parent} if indicator else {*directories}
    complaint = ""
    while True:
        try:
            await _watch_until_replaced(watched, is_relevant, changed, in_haste)
            complaint = ""
        except OSError as error:
            if str(error) != complaint:
                log.info("directories are not watched but read every %s s: %s", poll_seconds, error)
            complaint = str(error)
            await asyncio.sleep(poll_seconds)


async def _watch_until_replaced(
    watched: Collection[Path],
    is_relevant: Callable[[Path, str], bool],
    changed: Callable[[], None],
    in_haste: Callable[[], bool],
) -> None:
    """Watch until a directory is created or replaced, or `in_haste` changes. Raises OSError."""
    identities = await asyncio.to_thread(_identities, watched)
    if not identities:
        raise OSError("there is no directory to watch")
    is_hasty = in_haste()
    changes = inotify.changes(identities, is_relevant, step=_HASTY_STEP_SECONDS if is_hasty else _STEP_SECONDS)
    async with contextlib.aclosing(changes):
        async for _ in changes:
            changed()
            if in_haste() != is_hasty or await asyncio.to_thread(_identities, watched) != identities:
                return


def _identities(directories: Collection[Path]) -> dict[Path, tuple[int, int]]:
    """Return the existing directories with their device and inode."""
    found = {}
    for path in directories:
        with contextlib.suppress(OSError):
            status = path.stat()
            found[path] = (status.st_dev, status.st_ino)
    return found
