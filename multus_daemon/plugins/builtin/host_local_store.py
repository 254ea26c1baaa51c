"""The data directory of one network in the reference plugin's format: its lock, its address files, its marks.

`<dataDir>/<network>/`: one file for each address, named by it, with the content `<container id>\\r\\n<interface>`;
`last_reserved_ip.<set>` with the address that was given last; `lock` for flock(2), exclusive. Both implementations can
work on one directory at the same time. Here an address file appears together with its content (written beside, then
linked into place), so a crash never leaves a file without an owner, which nothing could release.
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
from pathlib import Path
from typing import Final

from multus_daemon.plugins.builtin.host_local_index import BESIDE, LAST_RESERVED_PREFIX, LOCK_NAME, Book, Index
from multus_daemon.runtime import deadline, fs
from multus_daemon.runtime.deadline import backoff
from multus_daemon.spec.cni.errors import TryAgainLaterError

_OWNER_MAX_BYTES: Final = 4096
# Where the kernel answers so, no ADD can have made a directory.
_NO_DIRECTORY: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of an address: an interface of a container."""

    container_id: str
    ifname: str

    @property
    def content(self) -> bytes:
        """The content of the address file."""
        return os.fsencode(f"{self.container_id.strip()}\r\n{self.ifname}")

    @property
    def old_content(self) -> bytes:
        """The content before version 0.8 of the reference plugin."""
        return os.fsencode(self.container_id.strip())


class LeaseDirectory:
    """The directory while its lock is held (`locked` makes one). All methods block and raise OSError."""

    def __init__(self, descriptor: int, owner: Owner, book: Book | None = None) -> None:
        self._descriptor = descriptor
        self._owner = owner
        self.book = Book() if book is None else book
        self._listed = False
        self._unreadable: dict[str, OSError] = {}
        if self.book.listed:
            # A changed name may be present or absent until it has been looked up.
            self._read_unread()
        else:
            self.refresh()

    @property
    def taken(self) -> Set[str]:
        """Every name in the directory: an address is taken if it is the name of a file."""
        return self.book.taken

    def refresh(self) -> bool:
        """List the directory; return False if this call has listed it already."""
        if self._listed:
            return False
        self.book.relist(os.listdir(self._descriptor))
        self._listed = True
        return True

    def owned(self) -> list[str]:
        """Return the addresses of the owner, those in the old form included."""
        names = [*self._holding(self._owner.content), *self._holding(self._owner.old_content)]
        return sorted(filter(_is_address, names))

    def holder(self, address: str) -> str:
        """Return the id of the container that has the address; empty if not known."""
        with contextlib.suppress(OSError):
            return self._read(address).decode("utf-8", "replace").partition("\r\n")[0]
        return ""

    def files(self) -> list[str]:
        """Return the files of the owner; those in the old form only if there are no others."""
        return sorted(self._holding(self._owner.content) or self._holding(self._owner.old_content))

    def require_readable(self, addresses: Collection[str]) -> None:
        """Raise OSError if the file of one of `addresses` could not be read; if there are none, of any address.

        A DEL calls it after it has released the owner's `files`: an unreadable one may be another of them.
        """
        wanted = {ipaddress.ip_address(text) for text in addresses}
        for name, error in self._unreadable.items():
            if not wanted or (_is_address(name) and ipaddress.ip_address(name) in wanted):
                raise OSError(error.errno, error.strerror, name) from error

    def _holding(self, content: bytes) -> list[str]:
        """Return the leases with this content. Each is read again: nothing is removed from memory alone."""
        self._read_unread()
        for name in self.book.holding(content):
            self._look_up(name)
        return self.book.holding(content)

    def _read_unread(self) -> None:
        """Look up the unread leases, except those that could not be read in this call."""
        for name in self.book.unread - self._unreadable.keys():
            self._look_up(name)
        # A copy, because a set never shrinks and iteration visits its whole table.
        self.book.unread = set(self.book.unread)

    def _look_up(self, name: str) -> None:
        """Enter the content of a lease, or its absence, into the book."""
        try:
            content = self._read(name).strip()
        except FileNotFoundError:
            self.book.drop(name)
            self._unreadable.pop(name, None)
        except OSError as error:
            # The address is taken; the next call tries to read it again.
            self.book.put(name, None)
            self.book.unread.add(name)
            # An IPAM plugin makes files: a directory or a link has no owner.
            if not isinstance(error, fs.NotRegularFileError) and error.errno != errno.ELOOP:
                self._unreadable[name] = error
        else:
            self.book.put(name, content)
            self.book.unread.discard(name)
            self._unreadable.pop(name, None)

    def last_reserved(self, index: int) -> str:
        """Return the address that was given last from the set `index`; empty if it can't be read."""
        try:
            return self._read(f"{LAST_RESERVED_PREFIX}{index}").decode("ascii")
        except (OSError, UnicodeDecodeError):
            # Only the order depends on it.
            return ""

    def reserve(self, address: str, index: int) -> bool:
        """Make the address file, then the mark of the set `index`; return False if the file exists.

        If it raises, no file is left.
        """
        content = self._owner.content
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(BESIDE, flags, 0o600, dir_fd=self._descriptor)
        try:
            os.write(descriptor, content)
        finally:
            os.close(descriptor)
        try:
            os.link(BESIDE, address, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor, follow_symlinks=False)
        except OSError as error:
            _sweep(self._descriptor)
            if not isinstance(error, FileExistsError):
                raise
            self._look_up(address)
            return False
        self.book.put(address, content)
        try:
            _sweep(self._descriptor)
            self._mark(f"{LAST_RESERVED_PREFIX}{index}", address.encode())
        except BaseException:
            self.release(address)
            raise
        return True

    def release(self, address: str) -> None:
        """Remove a file; an absent one is not an error."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address, dir_fd=self._descriptor)
        self.book.drop(address)

    def _read(self, name: str) -> bytes:
        descriptor = fs.open_regular(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._descriptor)
        try:
            return os.read(descriptor, _OWNER_MAX_BYTES)
        finally:
            os.close(descriptor)

    def _mark(self, name: str, data: bytes) -> None:
        """Write a mark in place. Only the order depends on it, so half a mark after a crash is harmless.

        With rename(2), or truncated first, ext4 would write it to the disk at once (ext4(5), auto_da_alloc), and this
        call would wait for that: 0.7 ms instead of 0.02, more on a busy disk.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        try:
            descriptor = fs.open_regular(name, flags, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno != errno.ELOOP and not isinstance(error, fs.NotRegularFileError):
                raise
            # A symbolic link or a pipe.
            os.unlink(name, dir_fd=self._descriptor)
            descriptor = fs.open_regular(name, flags, dir_fd=self._descriptor)
        try:
            os.write(descriptor, data)
            if os.fstat(descriptor).st_size > len(data):
                os.ftruncate(descriptor, len(data))
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def locked(path: str, owner: Owner, *, patience: float, index: Index | None = None) -> Iterator[LeaseDirectory]:
    """Hold the directory `path` exclusively for the block; make it if it is missing.

    `index` keeps the directory's content between calls; without it, everything is read. Raises TryAgainLaterError (11)
    if the lock is not free within `patience` seconds, Interrupted, OSError.
    """
    descriptor = _open_directory(path)
    try:
        lock = fs.open_regular(LOCK_NAME, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o750, dir_fd=descriptor)
        try:
            _acquire(lock, f"{path}/{LOCK_NAME}", patience)
            # Closing the file releases the lock.
            with contextlib.nullcontext(Book()) if index is None else index.book(descriptor) as book:
                _sweep(descriptor)
                yield LeaseDirectory(descriptor, owner, book)
        finally:
            os.close(lock)
    finally:
        os.close(descriptor)


def held(path: Path, owner: Owner) -> list[str]:
    """Return the owner's files in the directory `path`, without its lock; empty if there is or can be no directory.

    Raises OSError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_DIRECTORY:
            return []
        raise
    try:
        return LeaseDirectory(descriptor, owner).files()
    finally:
        os.close(descriptor)


def _sweep(directory: int) -> None:
    """Remove the temporary file of a crash. It may be a link to an address file, so it is never written to."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(BESIDE, dir_fd=directory)


def _acquire(lock: int, path: str, patience: float) -> None:
    """Poll the lock: a thread in a blocking flock(2) can't be stopped."""
    end = time.monotonic() + patience
    for delay in backoff(0.0005, 0.02, jitter=0.2):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > end:
                raise busy(path) from error
        deadline.pause(delay)


def busy(lock: str) -> TryAgainLaterError:
    """Return the error for a lock that another process or thread holds too long."""
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
                # Each with its mode: with an open umask others could put leases there.
                directory.mkdir(mode=0o755)
        return os.open(path, flags)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
