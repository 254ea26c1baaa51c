"""The data directory of one network in the reference plugin's format: its lock, address files, last addresses.

`<dataDir>/<network>/`: one file for each address, named by it, with the content `<container id>\\r\\n<interface>`;
`last_reserved_ip.<set>` with the address that was reserved last; `lock` for flock(2), exclusive. Both implementations
can use one directory concurrently. Here an address file appears together with its content (a temporary file is written,
then linked), so that a crash never leaves a file without an owner, which nothing could release.

A call need not read every address file: `Index` remembers the directories that were used last, each with the
directory's mtime, which is set at the end of a call. A change by another program sets the mtime to the kernel's clock,
which is coarser, so it always differs, and the directory is read again. As a file that a person rewrites in place is
not noticed, memory alone never decides: a file is read before it is removed, link(2) decides who gets an address, and
the directory is listed again before an ADD is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from multus_daemon.plugins.builtin.host_local_config import Address, RangeSet
from multus_daemon.runtime import deadline, fs
from multus_daemon.runtime.deadline import backoff
from multus_daemon.spec.cni.errors import Origin, TryAgainLaterError

LOCK_NAME: Final = "lock"
LAST_RESERVED_PREFIX: Final = "last_reserved_ip."
BESIDE: Final = ".new"
"""Temporary name of a new address file. One name suffices, as only the holder of the lock writes it."""
_OWNER_MAX_BYTES: Final = 4096
# Where the kernel answers so, no ADD can have made a directory.
_NO_DIRECTORY: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})


class Book(dict[str, bytes | None]):
    """The content of a directory: by name, the stripped content of each address file; None for any other file."""

    stamp = -1
    """The directory's mtime in nanoseconds when the book was complete; -1 if it was never complete."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of an address: an interface of a container."""

    container_id: str
    ifname: str

    @property
    def content(self) -> bytes:
        """The content of an address file of this owner."""
        return os.fsencode(f"{self.container_id.strip()}\r\n{self.ifname}")


class LeaseDirectory:
    """The directory while its lock is held (`locked` makes one). All methods block and raise OSError."""

    def __init__(self, descriptor: int, owner: Owner, book: Book | None = None) -> None:
        """`book`: the directory's known content; None: read it when needed."""
        self._descriptor = descriptor
        self._owner = owner
        self.book = Book() if book is None else book
        self._listed = False
        self.unreadable: dict[str, OSError] = {}
        if book is None:
            self.refresh()

    @property
    def taken(self) -> Set[str]:
        """Every name in the directory: an address is taken if it is the name of a file."""
        return self.book.keys()

    def refresh(self) -> bool:
        """List the directory, and read its new leases; return False if this call has done so already."""
        if self._listed:
            return False
        present = set(os.listdir(self._descriptor))
        for name in self.book.keys() - present:
            del self.book[name]
        for name in present - self.book.keys():
            self._look_up(name)
        self._listed = True
        return True

    def owned(self) -> list[str]:
        """Return the addresses that are reserved for the owner."""
        return [name for name in self.files() if _address_of(name)]

    def holder(self, address: str) -> str:
        """Return the id of the container that has the address; empty if not known."""
        with contextlib.suppress(OSError):
            return self._read(address).decode("utf-8", "replace").partition("\r\n")[0]
        return ""

    def files(self) -> list[str]:
        """Return the names of the owner's address files. Reads each again: memory alone must not decide a removal."""
        names = [name for name, content in self.book.items() if content == self._owner.content]
        for name in names:
            self._look_up(name)
        return sorted(name for name in names if self.book.get(name) == self._owner.content)

    def require_readable(self, addresses: Collection[str]) -> None:
        """Raise OSError if the file of one of `addresses` (empty: of any address) could not be read.

        A DEL calls it after it has released the owner's `files`: an unreadable file may belong to the owner, too.
        """
        wanted = {ipaddress.ip_address(text) for text in addresses}
        for name, error in self.unreadable.items():
            if not wanted or _address_of(name) in wanted:
                raise OSError(error.errno, error.strerror, name) from error

    def _look_up(self, name: str) -> None:
        """Read a file, and put its content or absence into the book."""
        self.unreadable.pop(name, None)
        try:
            is_lease = name not in (LOCK_NAME, BESIDE) and not name.startswith(LAST_RESERVED_PREFIX)
            self.book[name] = self._read(name).strip() if is_lease else None
        except FileNotFoundError:
            self.book.pop(name, None)
        except OSError as error:
            # The address is taken; the next call tries to read it again.
            self.book[name] = None
            # An IPAM plugin makes files: a directory or a link has no owner.
            if not isinstance(error, fs.NotRegularFileError) and error.errno != errno.ELOOP:
                self.unreadable[name] = error

    def last_reserved(self, index: int) -> str:
        """Return the address of the set `index` that was reserved last; empty if the file can't be read."""
        try:
            return self._read(f"{LAST_RESERVED_PREFIX}{index}").decode("ascii")
        except (OSError, UnicodeDecodeError):
            # Only the order depends on it.
            return ""

    def reserve(self, address: str, index: int) -> bool:
        """Make the address file, then write `last_reserved_ip.<index>`; return False if the address is taken.

        If it raises, it leaves no address file.
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
        self.book[address] = content
        try:
            _sweep(self._descriptor)
            self._mark(f"{LAST_RESERVED_PREFIX}{index}", address.encode())
        except BaseException:
            self.release(address)
            raise
        return True

    def release(self, address: str) -> None:
        """Remove an address file; it is no error if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address, dir_fd=self._descriptor)
        self.book.pop(address, None)

    def _read(self, name: str) -> bytes:
        descriptor = fs.open_regular(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._descriptor)
        try:
            return os.read(descriptor, _OWNER_MAX_BYTES)
        finally:
            os.close(descriptor)

    def _mark(self, name: str, data: bytes) -> None:
        """Overwrite a `last_reserved_ip` file. Only the order of addresses depends on it, so a crash does no harm.

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


class Index:
    """The known contents of the directories that were used last. Thread-safe; never blocks."""

    def __init__(self, *, directories_max: int = 64, names_max: int = 32_768) -> None:
        """`names_max`: maximum number of names in all directories together; each takes about 0.3 KiB."""
        self._directories_max = directories_max
        self._names_max = names_max
        self._guard = threading.Lock()
        # By device and inode; least recently used first.
        self._kept: OrderedDict[tuple[int, int], Book] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, directory: int) -> Book | None:
        """Return the book of the directory with this descriptor; None if missing or outdated. Raises OSError.

        The caller holds the directory's lock, and calls `keep` at the end.
        """
        status = os.fstat(directory)
        with self._guard:
            book = self._kept.pop((status.st_dev, status.st_ino), None)
        return book if book is not None and book.stamp == status.st_mtime_ns else None

    def keep(self, directory: int, book: Book) -> None:
        """Keep the complete book of the directory with this descriptor for the next call."""
        try:
            status = os.fstat(directory)
            if status.st_mtime_ns != book.stamp:
                # The call has changed the directory, or is the first.
                book.stamp = time.time_ns()
                os.utime(directory, ns=(book.stamp, book.stamp))
                status = os.fstat(directory)
        except OSError:
            # Every lease is read by the next call.
            return
        with self._guard:
            is_shared = self._kept.pop((status.st_dev, status.st_ino), None) is not None
            # Two calls had the directory at a time (`lock` was removed), or its file system has no nanoseconds.
            if is_shared or status.st_mtime_ns != book.stamp or len(book) > self._names_max:
                return
            self._kept[status.st_dev, status.st_ino] = book
            names = sum(len(kept) for kept in self._kept.values())
            while names > self._names_max or len(self._kept) > self._directories_max:
                _, oldest = self._kept.popitem(last=False)
                names -= len(oldest)


@contextlib.contextmanager
def locked(path: str, owner: Owner, *, patience: float, index: Index | None = None) -> Iterator[LeaseDirectory]:
    """Hold the directory `path` exclusively for the block; make it if it is missing.

    `index`: keeps the directory's content between calls; None: read everything. Raises TryAgainLaterError (11) if the
    lock is not free within `patience` seconds, Interrupted, OSError.
    """
    descriptor = _open_directory(path)
    try:
        lock = fs.open_regular(LOCK_NAME, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o750, dir_fd=descriptor)
        try:
            _acquire(lock, f"{path}/{LOCK_NAME}", patience)
            # Closing the file releases the lock.
            _sweep(descriptor)
            leases = LeaseDirectory(descriptor, owner, None if index is None else index.take(descriptor))
            try:
                yield leases
            finally:
                if index is not None and not leases.unreadable:
                    index.keep(descriptor, leases.book)
        finally:
            os.close(lock)
    finally:
        os.close(descriptor)


def held(path: Path, owner: Owner) -> list[str]:
    """Return the owner's address files in the directory `path`, without its lock; empty without a directory.

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
    """Remove the temporary file of a crash. It may be a hard link to an address file, so it must not be written."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(BESIDE, dir_fd=directory)


def _acquire(lock: int, path: str, patience: float) -> None:
    """Take the lock by polling: a thread in a blocking flock(2) can't be stopped."""
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
        remedy="`lslocks` shows which process holds the lock",
        origin=Origin.NODE,
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


def _address_of(name: str) -> Address | None:
    """Return the address that is the name of a file, in any spelling; None for another name."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name)
    return None


# --- how much of each network's ranges is given ----------------------------------------------------------------------


@dataclass(slots=True)
class _Network:
    range_sets: Sequence[RangeSet]
    book: weakref.ref[Book]
    """A weak reference, as the index decides which books stay in memory."""
    ratio: float | None = None
    """The last computed share of used addresses; None before the first."""


class Usage:
    """The share of used addresses of the networks that were used last, for the metrics. Thread-safe.

    Changes by other programs are noticed at the network's next call.
    """

    def __init__(self, *, networks_max: int = 128) -> None:
        self._networks_max = networks_max
        self._guard = threading.Lock()
        self._networks: OrderedDict[str, _Network] = OrderedDict()

    def served(self, network: str, range_sets: Sequence[RangeSet], book: Book) -> None:
        """Record the state of a network after a call: the reserved addresses in `book`. Takes a microsecond."""
        with self._guard:
            before = self._networks.pop(network, None)
            self._networks[network] = _Network(range_sets, weakref.ref(book), before.ratio if before else None)
            if len(self._networks) > self._networks_max:
                self._networks.popitem(last=False)

    def ratios(self) -> dict[str, float]:
        """Return by network the share of reserved addresses of its fullest range set. Reads no file."""
        with self._guard:
            networks = tuple(self._networks.items())
        for _, network in networks:
            if (book := network.book()) is not None:
                # A copy, in one step: a call may change the book meanwhile. A file `fd00::02` does not take `fd00::2`.
                given = [address for name in list(book) if str(address := _address_of(name)) == name and address]
                network.ratio = max((_share(item, given) for item in network.range_sets), default=0.0)
        return {name: network.ratio for name, network in networks if network.ratio is not None}


def _share(range_set: RangeSet, given: Sequence[Address]) -> float:
    """Return the share (0 to 1) of the set's addresses, without gateways, that are in `given`."""
    size = sum(one.last - one.first + 1 - (one.gateway in one) for one in range_set.ranges)
    return min(1.0, sum(address in one for one in range_set.ranges for address in given) / size) if size > 0 else 1.0


usage: Final = Usage()
"""The usage that this process has recorded."""
