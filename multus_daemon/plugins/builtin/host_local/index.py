"""What is known of the networks' directories from one call to the next, so that a call does not open every lease.

Others change a directory as well: the reference plugin, `multus-builtin`, a person. Two ways to notice were compared:

* The directory's mtime advances with the kernel's tick, 1 to 10 ms; a change by somebody else in the tick of our own
  can't be told from it. To trust only an mtime that is older than a tick, as git does with its index, means to read
  everything after each own ADD: while many pods start, nothing is gained. And a lease that is rewritten in place does
  not change it at all.
* inotify(7) names each entry that was made, removed or written to, in order, without a clock. The event is queued
  before the system call of whoever made the change returns. So under the lock of the directory, which they have had to
  give back, all that other plugins did is in the queue; only what has changed is read, also in a directory that the
  reference plugin works on all the time.

So it is inotify. An entry of which an event comes is read anew, also after our own changes: there is one way into a
book, and nobody tells own events from those of others.

Where it does not suffice, everything is read as in the first call:

* the queue overflowed, or too many names have changed to keep them;
* the directory is another one (device and inode), or has gone in between: `rm -r` drops the watch, and says so before
  the inode's number can be used again;
* the mtime differs, and no event has come: a change that this kernel did not make (NFS, FUSE). Within one tick such a
  change is missed, wherefore an answer that costs somebody a lease is never given from here alone: `store` reads a
  lease before it removes it, link(2) decides who gets an address, and `allocator` lists once more before it refuses;
* inotify is refused (its limits), or two calls hold one directory at a time (somebody has removed `lock`).

Bounded: the directories that were used last, and so many leases in all of them together. A directory that is over the
limit by itself is read at each call. What happens meanwhile waits in the kernel's queue, 16,384 events by default.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from multus_daemon.plugins.builtin.host_local.book import Book, is_lease

if TYPE_CHECKING:
    from multus_daemon.runtime.inotify import Change, Watcher

log = logging.getLogger(__name__)

DIRECTORIES_MAX: Final = 64
NAMES_MAX: Final = 32_768
"""In all books together. One takes about 0.4 KiB."""
_CHANGES_MAX: Final = 4096


@dataclass(eq=False, slots=True)
class _Entry:
    """A directory that is watched."""

    key: tuple[int, int]
    """Device and inode."""
    watch: int
    book: Book = field(default_factory=Book)
    changed: set[str] = field(default_factory=set)
    """Names to be read before the book counts."""
    lost: bool = False
    """Changes are missing: the book is worth nothing."""
    told: bool = False
    """Some event has come since `mtime_ns` was read."""
    mtime_ns: int = 0
    lent: bool = False


class Index:
    """The books of the directories that were used last. Any thread may use it; it waits for nothing."""

    def __init__(self, *, directories_max: int = DIRECTORIES_MAX, names_max: int = NAMES_MAX) -> None:
        """`names_max` counts the names of all directories together."""
        self._directories_max = directories_max
        self._names_max = names_max
        self._mutex = threading.Lock()
        self._watcher: Watcher | None = None
        # The one that was used last comes last.
        self._entries: OrderedDict[tuple[int, int], _Entry] = OrderedDict()
        self._watches: dict[int, _Entry] = {}
        self._used = False
        self._refused = False

    def __len__(self) -> int:
        """How many directories are known now."""
        return len(self._entries)

    @contextlib.contextmanager
    def book(self, directory: int) -> Iterator[Book]:
        """What is known of an open directory, for the duration of the block, in which its lock is held.

        The names in `unread` are to be read before anything else counts; a book that is not `listed` is empty. Raises
        OSError.
        """
        entry = self._lend(directory)
        if entry is None:
            yield Book()
            return
        try:
            yield entry.book
        finally:
            self._take_back(entry, directory)

    def _lend(self, directory: int) -> _Entry | None:
        status = os.fstat(directory)
        with self._mutex:
            if not self._used:
                # A program (`multus-builtin`) makes one call; the price of a watch pays off with the second.
                self._used = True
                return None
            entry = self._watched((status.st_dev, status.st_ino), directory)
            if entry is None or entry.lent:
                return None
            untold = entry.book.listed and not entry.told and status.st_mtime_ns != entry.mtime_ns
            if entry.lost or untold:
                entry.book = Book()
            else:
                entry.book.unread |= entry.changed
            entry.changed = set()
            entry.lost = False
            entry.lent = True
            return entry

    def _watched(self, key: tuple[int, int], directory: int) -> _Entry | None:
        """The directory's entry, made where there is none: the watch is there before the book is filled."""
        try:
            if self._watcher is None:
                from multus_daemon.runtime.inotify import Watcher  # ctypes: a program does without

                self._watcher = Watcher()
            self._collect(self._watcher)
            if key not in self._entries:
                entry = _Entry(key, self._watcher.watch(directory))
                self._entries[key] = self._watches[entry.watch] = entry
        except OSError as error:
            if not self._refused:
                log.warning("host-local reads every lease of a network at each call: %s", error)
            self._refused = True
            return None
        self._refused = False
        self._entries.move_to_end(key)
        return self._entries[key]

    def _take_back(self, entry: _Entry, directory: int) -> None:
        with self._mutex:
            entry.lent = False
            try:
                entry.mtime_ns = os.fstat(directory).st_mtime_ns
                if self._watcher is not None:
                    # What we did ourselves: from here on an event is about a later mtime.
                    self._collect(self._watcher)
            except OSError:
                entry.lost = True
            entry.told = False
            self._trim(entry)

    def _collect(self, watcher: Watcher) -> None:
        """Note for each directory what has changed. What can't be read is lost, for all of them; raises OSError."""
        try:
            for change in watcher.changes():
                if change.lost:
                    self._lose_all()
                if entry := self._watches.get(change.watch):
                    self._note(entry, change)
        except OSError:
            self._lose_all()
            raise

    def _note(self, entry: _Entry, change: Change) -> None:
        entry.told = True
        if change.gone:
            entry.lost = True
            del self._entries[entry.key], self._watches[entry.watch]
        elif change.name and is_lease(change.name):
            entry.changed.add(change.name)
            if len(entry.changed) > _CHANGES_MAX:
                entry.changed.clear()
                entry.lost = True

    def _lose_all(self) -> None:
        for entry in self._entries.values():
            entry.lost = True

    def _trim(self, latest: _Entry) -> None:
        """Forget what is over the limits: a directory that is too large, then those that were not used for longest."""
        if len(latest.book) > self._names_max and self._entries.get(latest.key) is latest:
            self._forget(latest)
        names = sum(len(entry.book) for entry in self._entries.values())
        while names > self._names_max or len(self._entries) > self._directories_max:
            oldest = next(iter(self._entries.values()))
            names -= len(oldest.book)
            self._forget(oldest)

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.key], self._watches[entry.watch]
        if self._watcher is not None:
            self._watcher.forget(entry.watch)
