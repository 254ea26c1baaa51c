"""The store on a disk that is sick."""

from __future__ import annotations

import os

import pytest

from multus_daemon.plugins.cache import ResultCache
from multus_daemon.pod.store import FileStore
from tests.disks import make_read_only, make_writable


@pytest.fixture
def cni_dir(tmp_path):
    return tmp_path / "multus"


@pytest.fixture
def cache(cni_dir):
    return ResultCache(cni_dir)


def test_a_read_only_disk_does_not_keep_the_daemon_from_starting(small_disk, cache, caplog):
    directory = small_disk / "attachments"
    directory.mkdir(mode=0o700)
    (directory / f".c0ffee.json.{os.getpid()}-0123456789ab").write_bytes(b"left")
    make_read_only(small_disk)
    FileStore(small_disk, ResultCache(small_disk)).sweep()
    assert "can't be removed: [Errno 30] Read-only file system" in caplog.text
    make_writable(small_disk)
