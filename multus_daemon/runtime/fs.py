"""Files that are never half written: write beside, fsync, rename; and reads with a limit.

All functions block. The files concerned are small (a few KiB), and the measured cost is 0.34 ms for a write
with fsync; callers on the event loop that must not wait for a slow disk use `asyncio.to_thread`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import secrets
import stat
import time
from pathlib import Path
from typing import TypeAlias

StrPath: TypeAlias = str | os.PathLike[str]
"""On the way of each request these are strings: pathlib takes 5 us to put one together."""

# What the kernel follows in one path (MAXSYMLINKS).
_MAX_LINKS = 40
DEFAULT_READ_LIMIT = 16 * 1024 * 1024
# Temporary files of `write_atomic` that a failing disk kept, for `remove_left`.
_left: set[str] = set()
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<pid>[0-9]{1,10})-((?P<boot>[0-9a-f]{8})-)?[0-9a-f]{12}", re.DOTALL)


class FileTooLargeError(OSError):
    """A file is larger than what its reader is ready to take (errno EFBIG)."""

    def __init__(self, path: StrPath, limit: int) -> None:
        super().__init__(errno.EFBIG, f"larger than {limit} bytes", str(path))


class NotRegularFileError(OSError):
    """Something else than a regular file is at a path (errno EINVAL)."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, "not a regular file", path)


def open_regular(path: StrPath, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
    """A descriptor of the regular file at `path`, for the caller to close; `mode` and `dir_fd` as for os.open.

    For every file that others can make: nothing that they put there, a pipe for one, is waited for. Raises
    NotRegularFileError, OSError.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    except OSError as error:
        # A socket, or a pipe that nobody reads, to be written to.
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
    """Put `data` at `path` so that a reader, or a crash, sees the old content or the new, never a part.

    The temporary file has a dot name without the target's suffix, in the same directory: directory scanners
    (libcni, containerd) pass it over, and the rename stays within one file system. Raises OSError; nothing is left
    behind then, but a temporary file that can't be removed (`remove_left`). Only where the last step fails, the fsync
    of the directory, the new content is in place already.

    Without `fsync` a power failure may lose the new content, and the old with it. With it, but without `fsync_name`,
    the new content may be under the name of the temporary file then (`temporary_files`).
    """
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name[:200]}.{os.getpid()}-{boot()}-{secrets.token_hex(6)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            # The umask must not decide who can read it.
            os.fchmod(descriptor, mode)
            if fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except BaseException:
        try:
            remove(temporary)
        except OSError:
            _left.add(temporary)
        raise
    if fsync and fsync_name:
        fsync_directory(directory or ".")


def remove_left() -> None:
    """Try again to remove the temporary files that failed writes of this process have left."""
    for path in list(_left):
        with contextlib.suppress(OSError):
            remove(path)
            _left.discard(path)


def append(path: StrPath, data: bytes) -> None:
    """Put `data` behind what is in the file, which is there, without fsync; a crash may leave a part of it.

    For files whose readers tell a part from the whole. Raises OSError; what has been written of it then is taken away.
    """
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
    try:
        size = os.fstat(descriptor).st_size
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def temporary_files(directory: Path, *, name: str = "", own: bool = True) -> dict[Path, str]:
    """The temporary files that writers left which a crash, or kill -9, ended; each with the name that it was for.

    `name`: for that file only, in a directory that is not ours alone. `own`: also those with this process' number,
    which are of an earlier one for as long as this has written nothing. A writer that lives, another daemon during a
    hand-over for one, keeps its own; none lives of before the last boot, whoever has its number now. A name of more
    than 200 characters is cut. Raises OSError, but not for a directory that is not there.
    """
    found: dict[Path, str] = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            match = _TEMPORARY.fullmatch(entry.name)
            if not match or (name and match["name"] != name[:200]):
                continue
            is_earlier = match["boot"] not in (None, boot())
            pid = int(match["pid"])
            if is_earlier or (own if pid == os.getpid() else not Path(f"/proc/{pid}").exists()):
                found[Path(entry.path)] = match["name"]
    return found


@functools.cache
def boot() -> str:
    """Eight digits that tell this run of the machine from others (random(4)). Raises OSError."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def is_of_earlier_boot(status: os.stat_result) -> bool:
    """Whether the file was last written to before the machine's last start, as far as its clock can be trusted."""
    return status.st_mtime < time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def sweep(directory: Path, *, name: str = "", own: bool = True) -> int:
    """Remove `temporary_files`; how many there were. Raises OSError."""
    return sum(remove(path) for path in temporary_files(directory, name=name, own=own))


def resolve(root: str, path: str, *, missing: bool = False) -> str:
    """The real path, outside, of what `path` is for a process whose root is `root`; all links resolved.

    An absolute link starts again at `root` and `..` never leaves it, as with chroot(2). Empty `root` is `/`. With
    `missing` the last parts need not be there: where the path leads once they are made. Raises OSError (ENOENT, ELOOP,
    ...) where the kernel would.

    Not openat2(2) with RESOLVE_IN_ROOT: kernels before 5.6, and filters of system calls, would need this all the same.
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
        except FileNotFoundError:
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


def fsync_directory(path: StrPath) -> None:
    """Make renames and removals in `path` survive a power loss. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_limited(path: StrPath, *, limit: int = DEFAULT_READ_LIMIT, follow: bool = True) -> bytes:
    """The whole content of a regular file of at most `limit` bytes.

    `follow=False` refuses a symbolic link (for directories that only we write). Raises FileTooLargeError
    and OSError.
    """
    descriptor = open_regular(path, os.O_RDONLY | (0 if follow else os.O_NOFOLLOW))
    try:
        # Not `limit` at once: a buffer of that size would be made first. The size may be wrong, it is 0 in /proc.
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
    """Remove a file; False if it was not there. Raises OSError for anything else."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def ensure_directory(path: StrPath, *, mode: int = 0o700) -> None:
    """Make `path` and what is missing above it; `mode` is for `path` itself, where it is new, whatever the umask.

    Raises OSError.
    """
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
    """As `ensure_directory`, for one that only we use: no symbolic link, ours, mode 0700; another mode is put right.

    What is inside is then of nobody else's making, hard links included. Raises OSError.
    """
    ensure_directory(path)
    repair_private_directory(path)


def repair_private_directory(path: StrPath) -> bool:
    """Give a directory that only we use its mode back, 0700; whether it had another.

    Raises NotADirectoryError for a symbolic link, PermissionError for another user's, OSError.
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
