"""Watch directories from the event loop, by inotify(7)."""

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
    """Yield sets of changed paths in the directories, not below them, for ever. Use with `contextlib.aclosing`.

    `concerns` selects directory and name. Changes within `step` seconds are one set. An empty set asks for a look at
    everything: every LOOK_SECONDS, for changes before the watch, and after a lost directory or dropped changes. Raises
    OSError if the directories can't be watched.
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
    watched = {}
    for path in directories:
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            watched[watcher.watch(descriptor)] = path
        finally:
            os.close(descriptor)
    return watched


async def _until_changed(
    watcher: Watcher, watched: Mapping[int, Path], concerns: Callable[[Path, str], bool], step: float, found: set[Path]
) -> None:
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
