"""The old files of a log: `<file>.1`, the newest, to `<file>.N`, compressed to `<file>.1.gz` and so on.

A compressed file is written beside and renamed, and the original is removed after that: a crash loses nothing.
Several daemons may write the same log during a roll-out: a lock keeps them from compressing the same file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
import zlib
from typing import Final

_CHUNK: Final = 256 * 1024
"""Bytes that are compressed at once, in about 5 ms."""
_GZIP: Final = 31
"""`wbits` of zlib for a gzip header."""
_DAY: Final = 86400


class Backups:
    """The old files of one log. Only the thread that writes the log uses it."""

    def __init__(self, path: str, *, most: int, days: int, compress: bool) -> None:
        """`most`: how many are kept; `days`: the age at which they are removed, 0 for never."""
        self.most = most
        self._path = path
        self.days = days
        self.compresses = compress
        self._waiting: list[str] = []
        self._job: _Job | None = None

    @property
    def is_busy(self) -> bool:
        """True while a file is to be compressed."""
        return bool(self._job or self._waiting)

    def take(self) -> None:
        """Make the log the newest old file, and remove the oldest. Raises OSError if the log is not renamed."""
        self.stop()
        for number in range(self.most, 0, -1):
            for suffix in ("", ".gz"):
                with contextlib.suppress(OSError):
                    if number == self.most:
                        os.unlink(f"{self._path}.{number}{suffix}")
                    else:
                        os.rename(f"{self._path}.{number}{suffix}", f"{self._path}.{number + 1}{suffix}")
        os.rename(self._path, f"{self._path}.1")
        self.tidy()

    def tidy(self) -> None:
        """Remove what is too old, and have the others compressed."""
        waiting = []
        for number in range(1, self.most + 1):
            for suffix in ("", ".gz"):
                path = f"{self._path}.{number}{suffix}"
                with contextlib.suppress(OSError):
                    status = os.lstat(path)
                    if self.days and time.time() - status.st_mtime > self.days * _DAY:
                        os.unlink(path)
                    elif not suffix and stat.S_ISREG(status.st_mode) and not os.path.lexists(f"{path}.gz"):
                        waiting.append(path)
        if self.compresses and self._job is None:
            self._waiting = waiting

    def work(self) -> None:
        """Compress one piece. A file that can't be compressed stays as it is until the next rotation."""
        try:
            if self._job is None:
                self._job = _Job(self._waiting.pop(0), f"{self._path}.gz.tmp")
            if not self._job.step():
                return
        except OSError:
            pass
        self._end_job()

    def stop(self) -> None:
        """Compress nothing more; what is half compressed stays as it was."""
        self._waiting.clear()
        self._end_job()

    def _end_job(self) -> None:
        if self._job is not None:
            self._job.close()
            self._job = None


class _Job:
    """Compresses one file."""

    def __init__(self, path: str, beside: str) -> None:
        """Raises OSError, also if another process compresses a file of this log."""
        self._path = path
        self._beside = beside
        self._deflate = zlib.compressobj(wbits=_GZIP)
        with contextlib.ExitStack() as opened:
            self._source = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            opened.callback(os.close, self._source)
            self._target = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            opened.callback(os.close, self._target)
            fcntl.flock(self._target, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one that had the lock may have renamed the file.
            if not _is_at(self._target, beside):
                raise FileNotFoundError(beside)
            os.ftruncate(self._target, 0)
            self._opened = opened.pop_all()

    def step(self) -> bool:
        """Compress one piece; return True if the file is in place. Raises OSError."""
        piece = os.read(self._source, _CHUNK)
        self._write(self._deflate.compress(piece) if piece else self._deflate.flush())
        if piece:
            return False
        status = os.fstat(self._source)
        # Its age is that of its lines.
        os.utime(self._target, (status.st_atime, status.st_mtime))
        os.fsync(self._target)
        if _is_at(self._source, self._path):
            os.rename(self._beside, f"{self._path}.gz")
            os.unlink(self._path)
        return True

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._target, view) :]

    def close(self) -> None:
        """Remove what is half written."""
        with self._opened, contextlib.suppress(OSError):
            if _is_at(self._target, self._beside):
                os.unlink(self._beside)


def _is_at(descriptor: int, path: str) -> bool:
    """Report whether the open file is the one at the path. Raises OSError."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
