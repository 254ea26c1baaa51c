"""Directories that are watched from the event loop, by inotify(7)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from pathlib import Path
from typing import Final

from multus_daemon.runtime.inotify import Watcher

LOOK_SECONDS: Final = 5.0


async def changes(
    directories: Collection[Path], concerns: Callable[[Path, str], bool], *, step: float
) -> AsyncGenerator[set[Path], None]:
    """What has changed in the directories themselves, not below them; without end. Use with `contextlib.aclosing`.

    `concerns`: whether a name in one of them counts. Changes that follow each other within `step` seconds are one. The
    set is empty every LOOK_SECONDS, for what changed before the watch stood, and where a directory has gone or the
    kernel has dropped changes. Raises OSError where they can't be watched.
    """
    watcher = Watcher()
    watched = await asyncio.to_thread(_begin, watcher, directories)
    while True:
        found: set[Path] = set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await _until_changed(watcher, watched, concerns, step, found)
        yield found


def _begin(watcher: Watcher, directories: Collection[Path]) -> dict[int, Path]:
    """The directories by their watches. Raises OSError."""
    watched = {}
    for path in directories:
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            watched[watcher.watch(descriptor)] = path
        finally:
            os.close(descriptor)
    return watched


async def _until_changed(
    watcher: Watcher,
    watched: Mapping[int, Path],
    concerns: Callable[[Path, str], bool],
    step: float,
    found: set[Path],
) -> None:
    """Wait for something to be in `found`, or for what the kernel does not name: directories gone, changes dropped."""
    is_unnamed = False
    while not (found or is_unnamed):
        await _readable(watcher)
        await asyncio.sleep(step)
        for change in watcher.changes():
            directory = watched.get(change.watch)
            is_unnamed |= change.gone or change.lost
            if directory is not None and change.name and concerns(directory, change.name):
                found.add(directory / change.name)


async def _readable(watcher: Watcher) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(watcher, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(watcher)
