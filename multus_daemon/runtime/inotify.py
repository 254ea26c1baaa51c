"""Changes in directories by inotify(7), which the standard library lacks; `follow` waits in the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import logging
import os
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from multus_daemon.runtime import portal
from multus_daemon.runtime.aio import readable
from multus_daemon.runtime.deadline import Deadline

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 5.0
POLL_SECONDS: Final = 2.0  # for directories that can't be watched
STEP_SECONDS: Final = 0.05
"""Changes within this time are reported together: a program may write several files."""

_MODIFY: Final = 0x2
_ATTRIB: Final = 0x4
_MOVED_FROM: Final = 0x40
_MOVED_TO: Final = 0x80
_CREATE: Final = 0x100
_DELETE: Final = 0x200
_DELETE_SELF: Final = 0x400
_UNMOUNT: Final = 0x2000
_OVERFLOW: Final = 0x4000
_IGNORED: Final = 0x8000
_ONLYDIR: Final = 0x1000000
_MASK: Final = _MODIFY | _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _ONLYDIR
_LOST: Final = _DELETE_SELF | _UNMOUNT | _OVERFLOW | _IGNORED
"""The directory and its watch are gone, or the kernel dropped changes of any directory."""

_HEADER: Final = struct.Struct("iIII")
_BUFFER_BYTES: Final = 64 * 1024

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(returned: int, call: str) -> int:
    if returned < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return returned


async def follow(
    find: Callable[[], Mapping[Path, object]],
    concerns: Callable[[Path, str], bool],
    changed: Callable[[set[Path]], Awaitable[None]],
    *,
    name: str,
) -> None:
    """Call `changed` once at first, then after each change, for ever, with the sets of paths that `changes` yields.

    `find` blocks; it returns the directories that exist, each with a value that changes if another directory is at its
    path. After a failure, also an OSError of `changed`, it starts again in POLL_SECONDS; it is logged once, with
    `name`.
    """
    complaint = ""
    while True:
        try:
            await changed(set())
            while True:
                if not (directories := await asyncio.to_thread(find)):
                    raise OSError("the directory does not exist")
                async with contextlib.aclosing(changes(directories, concerns)) as found:
                    async for paths in found:
                        await changed(paths)
                        if await asyncio.to_thread(find) != directories:
                            break
                complaint = ""
        except OSError as error:
            if str(error) != complaint:
                complaint = str(error)
                log.warning("%s can't be watched, and is read every %s s: %s", name, POLL_SECONDS, error)
        await asyncio.sleep(POLL_SECONDS)


async def changes(
    directories: Collection[Path], concerns: Callable[[Path, str], bool]
) -> AsyncGenerator[set[Path], None]:
    """Yield sets of changed paths in the directories, not below them, for ever. Use with `contextlib.aclosing`.

    `concerns` selects changes by directory and name. Changes within STEP_SECONDS are one set. An empty set means that
    anything may have changed: at first, every LOOK_SECONDS, and after a lost directory or dropped changes. Raises
    OSError if the directories can't be watched.
    """
    instance = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify_init1")
    try:
        watched = await portal.run(Deadline(), functools.partial(_watch, instance, directories), name="inotify")
        yield set()
        while True:
            found: set[Path] = set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await _until_changed(instance, watched, concerns, found)
            yield found
    finally:
        os.close(instance)


def _watch(instance: int, directories: Collection[Path]) -> dict[int, Path]:
    add = functools.partial(_libc.inotify_add_watch, instance)
    return {_checked(add(os.fsencode(path), _MASK), "inotify_add_watch"): path for path in directories}


async def _until_changed(
    instance: int, watched: Mapping[int, Path], concerns: Callable[[Path, str], bool], found: set[Path]
) -> None:
    is_lost = False
    while not (found or is_lost):
        await readable(instance)
        await asyncio.sleep(STEP_SECONDS)
        for watch, mask, name in _read(instance):
            directory = watched.get(watch)
            is_lost |= bool(mask & _LOST)
            if directory is not None and name and concerns(directory, name):
                found.add(directory / name)


def _read(instance: int) -> Iterator[tuple[int, int, str]]:
    """Yield for each change its watch, its mask, and the name of the file; empty for the directory itself."""
    data, position = os.read(instance, _BUFFER_BYTES), 0
    while position < len(data):
        watch, mask, _cookie, length = _HEADER.unpack_from(data, position)
        position += _HEADER.size + length
        yield watch, mask, os.fsdecode(data[position - length : position].rstrip(b"\0"))
