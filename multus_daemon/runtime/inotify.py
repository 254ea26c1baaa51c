"""Changes in directories by inotify(7), which the standard library lacks; `changes` waits in the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import struct
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOOK_SECONDS: Final = 5.0

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
# _ATTRIB reports a directory whose times were set, which would look like an unreported change otherwise.
_MASK: Final = _MODIFY | _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _ONLYDIR

_HEADER: Final = struct.Struct("iIII")
_BUFFER_BYTES: Final = 64 * 1024
_LONGEST_EVENT: Final = _HEADER.size + 256

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a watched directory."""

    watch: int
    """Result of `Watcher.watch`; -1 if `lost`."""
    name: str
    """Name in the directory; empty: the directory itself."""
    gone: bool
    """True: the directory and its watch are gone."""
    lost: bool
    """True: the kernel dropped changes of any directory."""


class Watcher:
    """An inotify instance, closed when it is garbage-collected. Not thread-safe."""

    def __init__(self) -> None:
        """Raises OSError, EMFILE at the limit `fs.inotify.max_user_instances`."""
        self._descriptor = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify_init1")
        weakref.finalize(self, os.close, self._descriptor)

    def fileno(self) -> int:
        """Return the descriptor, which is readable when there are changes."""
        return self._descriptor

    def watch(self, directory: int) -> int:
        """Watch an open directory. Raises OSError, ENOSPC at the limit `fs.inotify.max_user_watches`."""
        path = b"/proc/self/fd/%d" % directory
        return _checked(_libc.inotify_add_watch(self._descriptor, path, _MASK), "inotify_add_watch")

    def forget(self, watch: int) -> None:
        """End a watch if it exists. Its last changes may still arrive."""
        _libc.inotify_rm_watch(self._descriptor, watch)

    def changes(self) -> Iterator[Change]:
        """Yield the changes since the last call, in order, without blocking.

        Complete: a system call that changes a local directory returns after its event is queued.
        """
        while True:
            try:
                data = os.read(self._descriptor, _BUFFER_BYTES)
            except BlockingIOError:
                return
            yield from _decoded(data)
            if len(data) + _LONGEST_EVENT <= _BUFFER_BYTES:
                # The buffer had room for another event.
                return


def _decoded(data: bytes) -> Iterator[Change]:
    position = 0
    while position < len(data):
        watch, mask, _cookie, length = _HEADER.unpack_from(data, position)
        position += _HEADER.size
        name = data[position : position + length].rstrip(b"\0")
        position += length
        gone = bool(mask & (_DELETE_SELF | _UNMOUNT | _IGNORED))
        yield Change(watch, os.fsdecode(name), gone, bool(mask & _OVERFLOW))


def _checked(returned: int, call: str) -> int:
    if returned < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return returned


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
