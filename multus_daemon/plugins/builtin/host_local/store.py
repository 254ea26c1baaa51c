"""The data directory of one network, as the reference plugin writes it: its lock, its address files, its marks.

`<dataDir>/<network>/`: one file for each address, named by it, `<container id>\\r\\n<interface>` inside;
`last_reserved_ip.<set>` with the address given away last; `lock` for flock(2), exclusive. Both implementations can
work on one directory at the same time.

What is better here: an address file appears with its content at once (written beside, then linked into place), so a
crash never leaves a file without an owner, which nothing could ever release. One that the reference plugin left
counts as taken.

What is in the directory comes from a book (`book`), which an `index` may have kept since an earlier call.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import time
from collections.abc import Collection, Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from multus_daemon.plugins.builtin.host_local.book import BESIDE, LAST_RESERVED_PREFIX, LOCK_NAME, Book
from multus_daemon.plugins.builtin.host_local.index import Index
from multus_daemon.runtime import deadline, fs
from multus_daemon.runtime.backoff import backoff
from multus_daemon.spec.cni.errors import TryAgainLaterError

_OWNER_MAX_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose an address is: an interface of a container."""

    container_id: str
    ifname: str

    @property
    def content(self) -> bytes:
        """What the address file holds."""
        return os.fsencode(f"{self.container_id.strip()}\r\n{self.ifname}")

    @property
    def old_content(self) -> bytes:
        """What versions before 0.8 of the reference plugin wrote."""
        return os.fsencode(self.container_id.strip())


class LeaseDirectory:
    """The directory while its lock is held (`locked` makes one). Everything here blocks and raises OSError."""

    def __init__(self, descriptor: int, owner: Owner, book: Book | None = None) -> None:
        """`book`: what is known of the directory already."""
        self._descriptor = descriptor
        self._owner = owner
        self._kept = Book() if book is None else book
        self._listed = False
        self._unreadable: dict[str, OSError] = {}

    @cached_property
    def _book(self) -> Book:
        """The book, as the directory is now."""
        if self._kept.listed:
            # Until it has been looked up, a name that has changed may be one that is there or one that is not.
            self._read_unread()
        else:
            self._list()
        return self._kept

    @property
    def taken(self) -> Set[str]:
        """Every name in the directory: an address that is a file is taken, whatever is in the file."""
        return self._book.taken

    def next_free(self, value: int, version: int) -> int:
        """The first address from `value` on that is not taken, whether or not it is in a range."""
        return self._book.next_free(value, version)

    def refresh(self) -> bool:
        """List the directory, where what is known of it is from an earlier call; else return False."""
        if self._listed:
            return False
        self._list()
        return True

    def owned(self) -> list[str]:
        """The addresses of the owner, those in the old form too."""
        mine = (self._owner.content, self._owner.old_content)
        return sorted(name for content in mine for name in self._holding(content) if _is_address(name))

    def files(self) -> list[str]:
        """The files of the owner; those of the old form only where there are no others."""
        for mine in (self._owner.content, self._owner.old_content):
            if found := self._holding(mine):
                return sorted(found)
        return []

    def require_readable(self, addresses: Collection[str]) -> None:
        """Raise OSError where one of `addresses`, or any where there are none, is a file that could not be read.

        For a DEL, once the `files` of the owner are released: it may be another one of them.
        """
        wanted = {ipaddress.ip_address(text) for text in addresses}
        for name, error in self._unreadable.items():
            if not wanted or (_is_address(name) and ipaddress.ip_address(name) in wanted):
                raise OSError(error.errno, error.strerror, name) from error

    def _holding(self, content: bytes) -> list[str]:
        """The leases with this content, each looked up again: nothing is removed from memory alone."""
        book = self._book
        self._read_unread()
        for name in book.holding(content):
            self._look_up(name)
        return book.holding(content)

    def _list(self) -> None:
        self._kept.relist(os.listdir(self._descriptor))
        self._listed = True

    def _read_unread(self) -> None:
        """Look up what has to be, but not twice what could not be read: for this call nobody knows whose it is."""
        if self._kept.unread:
            for name in self._kept.unread - self._unreadable.keys():
                self._look_up(name)
            # A set stays as large as it ever was, and is walked through from end to end.
            self._kept.unread = set(self._kept.unread)

    def _look_up(self, name: str) -> None:
        """Enter what a lease holds, without white space around it, or that there is none."""
        try:
            content = self._read(name).strip()
        except FileNotFoundError:
            self._kept.drop(name)
            self._unreadable.pop(name, None)
        except OSError as error:
            # It is taken, and tried again next time.
            self._kept.put(name, None)
            self._kept.unread.add(name)
            # Who gives out addresses makes files: a directory or a link is nobody's.
            if not isinstance(error, fs.NotRegularFileError) and error.errno != errno.ELOOP:
                self._unreadable[name] = error
        else:
            self._kept.put(name, content)
            self._kept.unread.discard(name)
            self._unreadable.pop(name, None)

    def last_reserved(self, index: int) -> str:
        """The mark of the set `index`; empty if there is none that can be read."""
        try:
            return self._read(f"{LAST_RESERVED_PREFIX}{index}").decode("ascii")
        except (OSError, UnicodeDecodeError):
            # Only the order depends on it.
            return ""

    def reserve(self, address: str, index: int) -> bool:
        """Make the address file, then the mark; False if the file is there already. No file is left where it raises."""
        self._write_beside(self._owner.content)
        try:
            os.link(BESIDE, address, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor, follow_symlinks=False)
        except OSError as error:
            self.sweep()
            if not isinstance(error, FileExistsError):
                raise
            self._look_up(address)
            return False
        self._kept.put(address, self._owner.content)
        try:
            self.sweep()
            self._mark(f"{LAST_RESERVED_PREFIX}{index}", address.encode())
        except BaseException:
            self.release(address)
            raise
        return True

    def release(self, address: str) -> None:
        """Remove a file; absent is done."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address, dir_fd=self._descriptor)
        self._kept.drop(address)

    def _read(self, name: str) -> bytes:
        descriptor = fs.open_regular(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._descriptor)
        try:
            return os.read(descriptor, _OWNER_MAX_BYTES)
        finally:
            os.close(descriptor)

    def sweep(self) -> None:
        """Remove what a crash left beside: under the lock nobody else writes there.

        It may be a second name of an address file, so it is never written to.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(BESIDE, dir_fd=self._descriptor)

    def _mark(self, name: str, data: bytes) -> None:
        """Written in place. Only the order depends on it, so what a crash leaves of it does no harm.

        Put in place by rename(2), or emptied first, it would be on its way to the disk at once (ext4(5),
        auto_da_alloc), for which this would wait: 0.7 ms instead of 0.02, more on a busy disk.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        try:
            descriptor = fs.open_regular(name, flags, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno != errno.ELOOP and not isinstance(error, fs.NotRegularFileError):
                raise
            # A link, to wherever, or a pipe.
            os.unlink(name, dir_fd=self._descriptor)
            descriptor = fs.open_regular(name, flags, dir_fd=self._descriptor)
        try:
            os.write(descriptor, data)
            if os.fstat(descriptor).st_size > len(data):
                os.ftruncate(descriptor, len(data))
        finally:
            os.close(descriptor)

    def _write_beside(self, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(BESIDE, flags, 0o600, dir_fd=self._descriptor)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def locked(path: str, owner: Owner, *, patience: float, index: Index | None = None) -> Iterator[LeaseDirectory]:
    """The directory `path`, made where it is missing, held exclusively for the duration of the block.

    `index` remembers what is in the directory from one call to the next; without it, everything is read.
    Raises TryAgainLaterError (11) where the lock is not to be had in `patience` seconds, Interrupted, OSError.
    """
    descriptor = _open_directory(path)
    try:
        lock = fs.open_regular(LOCK_NAME, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o750, dir_fd=descriptor)
        try:
            _acquire(lock, f"{path}/{LOCK_NAME}", patience)
            # Closing the file gives the lock back.
            with contextlib.nullcontext(Book()) if index is None else index.book(descriptor) as book:
                leases = LeaseDirectory(descriptor, owner, book)
                leases.sweep()
                yield leases
        finally:
            os.close(lock)
    finally:
        os.close(descriptor)


def held(path: Path, owner: Owner) -> list[str]:
    """The owner's files in the directory `path`, without its lock; none where it is no directory. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        return LeaseDirectory(descriptor, owner).files()
    finally:
        os.close(descriptor)


def _acquire(lock: int, path: str, patience: float) -> None:
    """Polls: a thread in a blocking flock(2) can't be told to stop."""
    end = time.monotonic() + patience
    for delay in backoff(0.0005, 0.02, jitter=0.2):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            return
        if time.monotonic() > end:
            raise busy(path)
        deadline.pause(delay)


def busy(lock: str) -> TryAgainLaterError:
    """The error for a lock that somebody else keeps too long."""
    return TryAgainLaterError(
        f"host-local: the addresses of the network are busy: {lock} is locked",
        "gave up waiting; `lslocks` shows who holds it",
    )


def _open_directory(path: str) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        for directory in (*reversed(Path(path).parents), Path(path)):
            with contextlib.suppress(FileExistsError):
                # Each with its mode: an open umask must not let others put leases there.
                directory.mkdir(mode=0o755)
        return os.open(path, flags)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
