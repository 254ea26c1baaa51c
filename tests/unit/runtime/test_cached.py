"""Reading a file only where that takes no wait."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from multus_daemon.runtime import cached


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Make a directory on a disk: pytest's may be in memory, and tmpfs does not know RWF_NOWAIT."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        yield Path(path)


def _is_known(path: Path) -> bool:
    """Return whether kernel and file system can read a file that was just written without blocking."""
    path.write_bytes(b"x")
    return cached.read(str(path)) is not None


def test_what_was_just_written_is_read_or_left_to_others(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for content in (b"", b"{}", b"x" * (64 * 1024)):
        path.write_bytes(content)
        assert cached.read(str(path)) in (content, None)


def test_it_is_read_on_a_kernel_and_a_file_system_of_today(tmp_path: Path) -> None:
    if not _is_known(tmp_path / "probe"):
        pytest.skip("needs openat2 with RESOLVE_CACHED, and RWF_NOWAIT of the file system of /var/tmp")
    path = tmp_path / "record.json"
    path.write_bytes(b"content")
    assert cached.read(str(path)) == b"content"


def test_what_is_no_plain_small_file_is_left_to_others(tmp_path: Path) -> None:
    large, link, pipe = tmp_path / "large", tmp_path / "link", tmp_path / "pipe"
    large.write_bytes(b"x" * (64 * 1024 + 1))
    link.symlink_to(large)
    os.mkfifo(pipe)
    before = len(os.listdir("/proc/self/fd"))
    for path in (large, link, pipe, tmp_path, tmp_path / "absent", "/dev/null"):
        assert cached.read(str(path)) is None
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("answer", [errno.EAGAIN, errno.EOPNOTSUPP, 3])
def test_what_is_not_in_memory_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    """Nothing of the file is in memory, the file system can't say, or only the beginning is there."""
    if not _is_known(tmp_path / "probe"):
        pytest.skip("needs openat2 with RESOLVE_CACHED")
    path = tmp_path / "record.json"
    path.write_bytes(b"content")

    def preadv(descriptor: int, buffers: Sequence[bytearray], offset: int, flags: int) -> int:
        assert flags & os.RWF_NOWAIT
        if answer == 3:
            return answer
        raise OSError(answer, os.strerror(answer))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "preadv", preadv)
    assert cached.read(str(path)) is None
    assert len(os.listdir("/proc/self/fd")) == before
