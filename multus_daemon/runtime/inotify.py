"""Changes in directories by inotify(7), which the standard library lacks."""

from __future__ import annotations

import ctypes
import os
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

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
            yield from _changes(data)
            if len(data) + _LONGEST_EVENT <= _BUFFER_BYTES:
                # The buffer had room for another event.
                return


def _changes(data: bytes) -> Iterator[Change]:
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
