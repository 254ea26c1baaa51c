"""inotify(7): which names in which directories have changed. The standard library does not have it."""

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
# With _ATTRIB also a directory whose times are set by hand is told of, or that would look like an unreported change.
_MASK: Final = _MODIFY | _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _ONLYDIR

_HEADER: Final = struct.Struct("iIII")
_BUFFER_BYTES: Final = 64 * 1024
_LONGEST_EVENT: Final = _HEADER.size + 256

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Change:
    """Something that happened in a watched directory, or to it."""

    watch: int
    """As `Watcher.watch` has returned it; -1 where `lost`."""
    name: str
    """Empty: of the directory itself."""
    gone: bool
    """The directory is gone, and its watch with it."""
    lost: bool
    """The kernel has dropped changes, of any directory."""


class Watcher:
    """An inotify instance, closed when it is collected. For one thread at a time."""

    def __init__(self) -> None:
        """Raises OSError: EMFILE where the user's instances are used up (`fs.inotify.max_user_instances`)."""
        self._descriptor = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify_init1")
        weakref.finalize(self, os.close, self._descriptor)

    def fileno(self) -> int:
        """Readable where there are changes, which `changes` then returns."""
        return self._descriptor

    def watch(self, directory: int) -> int:
        """Begin to watch an open directory, whatever its path leads to by now.

        Raises OSError: ENOSPC where the user's watches are used up (`fs.inotify.max_user_watches`).
        """
        path = b"/proc/self/fd/%d" % directory
        return _checked(_libc.inotify_add_watch(self._descriptor, path, _MASK), "inotify_add_watch")

    def forget(self, watch: int) -> None:
        """End a watch; absent is done. Its last changes may still come."""
        _libc.inotify_rm_watch(self._descriptor, watch)

    def changes(self) -> Iterator[Change]:
        """What has happened since the last call, in order. Returns at once.

        Complete: a system call that changes a directory of this machine returns after its event is in the queue.
        """
        while True:
            try:
                data = os.read(self._descriptor, _BUFFER_BYTES)
            except BlockingIOError:
                return
            yield from _changes(data)
            if len(data) + _LONGEST_EVENT <= _BUFFER_BYTES:
                # There was room for one more, so there was none.
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
