"""Atomic writes (temporary file, fsync, rename) and reads with a limit, for small files.

All functions block; a write with fsync takes 0.34 ms. On the event loop, use `asyncio.to_thread`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import socket
import stat
import time
from pathlib import Path
from typing import TypeAlias

from multus_daemon import deadlines

StrPath: TypeAlias = str | os.PathLike[str]
"""Code of requests passes strings: pathlib takes 5 us to join a path."""

# MAXSYMLINKS of the kernel.
_MAX_LINKS = 40
DEFAULT_READ_LIMIT = 16 * 1024 * 1024
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<pid>[0-9]{1,10})-((?P<boot>[0-9a-f]{8})-)?[0-9a-f]{12}", re.DOTALL)


class FileTooLargeError(OSError):
    """The file exceeds the reader's limit (errno EFBIG)."""

    def __init__(self, path: StrPath, limit: int) -> None:
        super().__init__(errno.EFBIG, f"larger than {limit} bytes", str(path))


class NotRegularFileError(OSError):
    """The path is not a regular file (errno EINVAL)."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, "not a regular file", path)


def open_regular(path: StrPath, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
    """Open a regular file without blocking on another kind, such as a pipe; `mode` and `dir_fd` as for os.open.

    Raises NotRegularFileError, OSError.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    except OSError as error:
        # A socket, or a pipe without a reader.
        if error.errno != errno.ENXIO:
            raise
        raise NotRegularFileError(str(path)) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotRegularFileError(str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_atomic(path: StrPath, data: bytes, *, mode: int = 0o600, fsync: bool = True, fsync_name: bool = True) -> None:
    """Replace the content of `path` atomically: after a crash it is the old or the new one.

    The temporary file has a dot name in the same directory, which scanners (libcni, containerd) skip. Raises OSError
    and leaves nothing behind except a temporary file that can't be removed (`sweep`); if only the fsync of the
    directory fails, the new content is in place. Without `fsync` a power failure may lose the old and the new content;
    without `fsync_name` it may leave the new content under the temporary name (`temporary_files`).
    """
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name[:200]}.{os.getpid()}-{boot()}-{os.urandom(6).hex()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            # Independent of the umask.
            os.fchmod(descriptor, mode)
            if fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno and not error.filename:
            # The error of an open file does not say which.
            error.filename = os.fspath(path)
        raise
    if fsync and fsync_name:
        fsync_directory(directory or ".")


def append(path: StrPath, data: bytes) -> None:
    """Append `data` to an existing file without fsync. A crash may leave a part of it, which readers must detect.

    If it raises OSError, it has removed the part.
    """
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
    try:
        size = os.fstat(descriptor).st_size
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            error.filename = os.fspath(path)
            raise
    finally:
        os.close(descriptor)


def temporary_files(directory: Path, *, name: str = "", own: bool = True) -> dict[Path, str]:
    """Return the temporary files of dead writers, with the names of their targets, cut after 200 characters.

    `name`: only for this target, in a shared directory. `own`: include those with this process's id, which belong to
    an earlier process until this one writes. Files of living writers, such as another daemon during a hand-over, are
    excluded; writers from before the last boot are dead. A missing directory has none. Raises OSError.
    """
    left: dict[Path, str] = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
        for entry in entries:
            match = _TEMPORARY.fullmatch(entry.name)
            if not match or (name and match["name"] != name[:200]):
                continue
            is_earlier = match["boot"] not in (None, boot())
            pid = int(match["pid"])
            if is_earlier or (own if pid == os.getpid() else not Path(f"/proc/{pid}").exists()):
                left[Path(entry.path)] = match["name"]
    return left


@functools.cache
def boot() -> str:
    """Return eight digits that identify the boot of the machine (random(4)). Raises OSError."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def is_of_earlier_boot(status: os.stat_result) -> bool:
    """Return True if the file was last written before the last boot, by the machine's clock."""
    return status.st_mtime < time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def sweep(directory: Path, *, name: str = "", own: bool = True) -> int:
    """Remove `temporary_files` and return their number. Raises OSError."""
    return sum(remove(path) for path in temporary_files(directory, name=name, own=own))


def resolve(root: str, path: str, *, missing: bool = False) -> str:
    """Return where `path`, as seen inside the root directory `root`, really is, with all symbolic links resolved.

    Links and `..` never leave `root`, as with chroot(2); an empty `root` is `/`. `missing`: the last parts need not
    exist. Raises OSError (ENOENT, ELOOP, ...) as the kernel would. openat2(2) with RESOLVE_IN_ROOT is no replacement:
    old kernels and filters of system calls lack it.
    """
    root = root.rstrip("/")
    pending = path.split("/")[::-1]
    inside: list[str] = []
    links = 0
    while pending:
        part = pending.pop()
        if part in ("", "."):
            continue
        if part == "..":
            del inside[-1:]
            continue
        outside = "/".join((root, *inside, part))
        try:
            is_link = stat.S_ISLNK(os.lstat(outside).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            if not missing:
                raise
            is_link = False
        if not is_link:
            inside.append(part)
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(outside)
        if target.startswith("/"):
            inside.clear()
        pending += target.split("/")[::-1]
    return "/".join((root, *inside)) or "/"


def is_listening(path: StrPath) -> bool:
    """Return True if a process accepts connections at the socket. (A killed process leaves its socket behind.)"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(deadlines.SOCKET_CONNECT_SECONDS)
        try:
            client.connect(os.fspath(path))
        except TimeoutError:
            # Its backlog is full.
            return True
        except OSError:
            return False
    return True


def fsync_directory(path: StrPath) -> None:
    """Make renames and removals in `path` durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_limited(path: StrPath, *, limit: int = DEFAULT_READ_LIMIT, follow: bool = True) -> bytes:
    """Read a regular file of at most `limit` bytes; `follow=False` refuses symbolic links.

    Raises FileTooLargeError, OSError.
    """
    descriptor = open_regular(path, os.O_RDONLY | (0 if follow else os.O_NOFOLLOW))
    try:
        # Reading `limit` at once would allocate a buffer of that size. The size is 0 in /proc.
        step = min(max(os.fstat(descriptor).st_size, 4096), limit) + 1
        chunks, length = [], 0
        while length <= limit and (chunk := os.read(descriptor, min(step, limit + 1 - length))):
            chunks.append(chunk)
            length += len(chunk)
    finally:
        os.close(descriptor)
    if length > limit:
        raise FileTooLargeError(path, limit)
    return b"".join(chunks)


def remove(path: StrPath) -> bool:
    """Remove a file; return False if it does not exist. Raises OSError."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def ensure_directory(path: StrPath, *, mode: int = 0o700) -> None:
    """Create `path` and its parents; a new `path` has `mode`, independent of the umask. Raises OSError."""
    if os.path.isdir(path):
        return
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    try:
        os.mkdir(path, mode)
        os.chmod(path, mode)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def ensure_private_directory(path: StrPath) -> None:
    """Create a directory for this user only: not a symbolic link, mode 0700, repaired if necessary. Raises OSError."""
    ensure_directory(path)
    repair_private_directory(path)


def repair_private_directory(path: StrPath) -> bool:
    """Set the mode of a private directory to 0700; return True if it changed.

    Raises NotADirectoryError for a symbolic link, PermissionError for another user's directory, OSError.
    """
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "a directory of its own is needed, no link and no file", str(path))
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"belongs to user {status.st_uid}, not to {os.geteuid()}", str(path))
    if stat.S_IMODE(status.st_mode) == 0o700:
        return False
    os.chmod(path, 0o700)
    return True
