"""Remember the networks' directories between calls, so that a call does not open every lease.

The reference plugin, `multus-builtin` and people change a directory too. inotify(7) names each changed entry before the
system call that changes it returns, and plugins hold the directory's lock for their changes: under the lock all their
events are in the queue, and only changed leases are read. The directory's mtime does not suffice: it advances with the
kernel's tick, 1 to 10 ms, and not at all for a lease that is rewritten in place.

Everything is read again if

* the queue overflowed, or too many names have changed to keep them;
* the directory is another one (device and inode), or was removed: the kernel reports that before it reuses the inode;
* the mtime differs without an event: a change by another kernel (NFS, FUSE). Such a change is missed within one tick,
  so memory alone never decides about a lease: `store` reads a lease before it removes it, link(2) decides who gets an
  address, and `plugin` lists again before it refuses;
* inotify is refused (its limits), or two calls hold one directory at a time (`lock` was removed).

Bounded: the directories that were used last, and a maximum of leases in all of them together. A directory that exceeds
the maximum alone is read at each call.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from multus_daemon.plugins.builtin.host_local_config import text_of

if TYPE_CHECKING:
    from multus_daemon.plugins.builtin.host_local_config import RangeSet
    from multus_daemon.runtime.inotify import Watcher

log = logging.getLogger(__name__)

LOCK_NAME: Final = "lock"
LAST_RESERVED_PREFIX: Final = "last_reserved_ip."
BESIDE: Final = ".new"
"""Temporary name of a new lease. One is enough, because only the holder of the lock writes it."""
DIRECTORIES_MAX: Final = 64
NAMES_MAX: Final = 32_768
"""Maximum number of names in all books together. One takes about 0.4 KiB."""
NETWORKS_MAX: Final = 128
_CHANGES_MAX: Final = 4096


def is_lease(name: str) -> bool:
    """Report whether a file of the directory can name an owner."""
    return name not in (LOCK_NAME, BESIDE) and not name.startswith(LAST_RESERVED_PREFIX)


# --- one directory ---------------------------------------------------------------------------------------------------


class Book:
    """The names and the leases of one directory, for one thread at a time. `store` fills it."""

    def __init__(self) -> None:
        self.listed = False
        """True once it has the directory's names."""
        self.unread: set[str] = set()
        """Leases to be looked up before they count; they may not exist."""
        self._contents: dict[str, bytes | None] = {}
        self._names: dict[bytes, list[str]] = {}

    def __len__(self) -> int:
        return len(self._contents)

    @property
    def taken(self) -> KeysView[str]:
        """Every name: an address is taken if it is the name of a file."""
        return self._contents.keys()

    def relist(self, names: Iterable[str]) -> None:
        """Replace the names; the contents of names that stay are kept."""
        present = set(names)
        for name in self._contents.keys() - present:
            self.drop(name)
        for name in present - self._contents.keys():
            self.put(name, None)
            if is_lease(name):
                self.unread.add(name)
        self.listed = True

    def put(self, name: str, content: bytes | None) -> None:
        """Enter a name with its content, stripped of white space; None for unreadable content."""
        if name in self._contents:
            self._disown(name)
        self._contents[name] = content
        if content is not None:
            self._names.setdefault(content, []).append(name)

    def drop(self, name: str) -> None:
        """Remove a name; an absent one is ignored."""
        self.unread.discard(name)
        if name not in self._contents:
            return
        self._disown(name)
        del self._contents[name]

    def holding(self, content: bytes) -> list[str]:
        """Return the names of the leases with this content, in no order."""
        return list(self._names.get(content, ()))

    def _disown(self, name: str) -> None:
        content = self._contents[name]
        if content is None:
            return
        names = self._names[content]
        names.remove(name)
        if not names:
            del self._names[content]


def number_of(name: str) -> tuple[int, int] | None:
    """Return version and number of the address that `name` is; None for anything else.

    It must be in the form of `text_of`: a file `fd00::02` does not take `fd00::2`.
    """
    try:
        if ":" in name:
            version, value = 6, int(ipaddress.IPv6Address(name))
        else:
            version, value = 4, int.from_bytes(socket.inet_pton(socket.AF_INET, name), "big")
    except (OSError, ValueError):
        return None
    return (version, value) if text_of(value, version) == name else None


# --- all directories -------------------------------------------------------------------------------------------------


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
    """Changes are missing, so the book is useless."""
    notified: bool = False
    """An event has come since `mtime_ns` was read."""
    mtime_ns: int = 0
    lent: bool = False


class Index:
    """The books of the directories that were used last. Thread-safe; it never blocks."""

    def __init__(self, *, directories_max: int = DIRECTORIES_MAX, names_max: int = NAMES_MAX) -> None:
        """`names_max` counts the names of all directories together."""
        self._directories_max = directories_max
        self._names_max = names_max
        self._mutex = threading.Lock()
        self._watcher: Watcher | None = None
        # Least recently used first.
        self._entries: OrderedDict[tuple[int, int], _Entry] = OrderedDict()
        self._watches: dict[int, _Entry] = {}
        self._used = False
        self._refused = False

    def __len__(self) -> int:
        return len(self._entries)

    @contextlib.contextmanager
    def book(self, directory: int) -> Iterator[Book]:
        """Lend the book of an open directory for the block, in which the caller holds the directory's lock.

        The caller reads the names in `unread` first; a book that is not `listed` is empty. Raises OSError.
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
                # A program (`multus-builtin`) makes one call; a watch pays off with the second.
                self._used = True
                return None
            entry = self._watched((status.st_dev, status.st_ino), directory)
            if entry is None or entry.lent:
                return None
            unseen = entry.book.listed and not entry.notified and status.st_mtime_ns != entry.mtime_ns
            if entry.lost or unseen:
                entry.book = Book()
            else:
                entry.book.unread |= entry.changed
            entry.changed = set()
            entry.lost = False
            entry.lent = True
            return entry

    def _watched(self, key: tuple[int, int], directory: int) -> _Entry | None:
        """Return the directory's entry; a new one is watched before its book is filled."""
        try:
            if self._watcher is None:
                from multus_daemon.runtime.inotify import Watcher  # needs ctypes, which a program does not load

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
                    # Take our own events, so that later events are about a later mtime.
                    self._collect(self._watcher)
            except OSError:
                entry.lost = True
            entry.notified = False
            self._trim(entry)

    def _collect(self, watcher: Watcher) -> None:
        """Note the changes of each directory. If events can't be read, all books are lost; raises OSError."""
        try:
            for change in watcher.changes():
                if change.lost:
                    self._lose_all()
                entry = self._watches.get(change.watch)
                if entry is None:
                    continue
                entry.notified = True
                if change.gone:
                    entry.lost = True
                    del self._entries[entry.key], self._watches[entry.watch]
                elif change.name and is_lease(change.name):
                    entry.changed.add(change.name)
                    if len(entry.changed) > _CHANGES_MAX:
                        entry.changed.clear()
                        entry.lost = True
        except OSError:
            self._lose_all()
            raise

    def _lose_all(self) -> None:
        for entry in self._entries.values():
            entry.lost = True

    def _trim(self, latest: _Entry) -> None:
        """Forget a directory that is too large, then the least recently used ones that exceed the limits."""
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


# --- how much of each network's ranges is given ----------------------------------------------------------------------


@dataclass(slots=True)
class _Network:
    range_sets: Sequence[RangeSet]
    book: weakref.ref[Book]
    """Weak: the index decides how much is kept."""
    ratio: float | None = None
    """The last count; None before the first one."""


class Usage:
    """The networks that were used last, for the metrics. Thread-safe.

    A network is known from the daemon's second call of host-local on, when the index keeps its leases. Changes of other
    programs count with the next call.
    """

    def __init__(self, *, networks_max: int = NETWORKS_MAX) -> None:
        self._networks_max = networks_max
        self._guard = threading.Lock()
        self._networks: OrderedDict[str, _Network] = OrderedDict()

    def served(self, network: str, range_sets: Sequence[RangeSet], book: Book) -> None:
        """Note that a call of the network is over, with the leases in `book`. Takes a microsecond."""
        with self._guard:
            before = self._networks.pop(network, None)
            self._networks[network] = _Network(range_sets, weakref.ref(book), before.ratio if before else None)
            if len(self._networks) > self._networks_max:
                self._networks.popitem(last=False)

    def ratios(self) -> dict[str, float]:
        """Return the share of the fullest range set that is given, by network. Reads no file."""
        with self._guard:
            networks = tuple(self._networks.items())
        for _, network in networks:
            if (book := network.book()) is not None:
                # A copy, in one step: a call may change the book meanwhile.
                numbers = [number for name in list(book.taken) if (number := number_of(name))]
                network.ratio = max((_given(item, numbers) for item in network.range_sets), default=0.0)
        return {name: network.ratio for name, network in networks if network.ratio is not None}


def _given(range_set: RangeSet, numbers: Sequence[tuple[int, int]]) -> float:
    """Return the share of the set's addresses that are among `numbers`, pairs of version and number."""
    size = given = 0
    for one in range_set.ranges:
        size += one.last - one.first + 1 - (one.gateway in one)
        given += sum(version == one.version and one.first <= number <= one.last for version, number in numbers)
    return min(1.0, given / size) if size > 0 else 1.0


usage: Final = Usage()
"""Of this process, as the index is."""
