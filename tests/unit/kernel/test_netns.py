"""Check that the daemon sees every process of its node."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest

from multus_daemon.kernel import netns

FIRST = {"/proc/self/ns/pid": netns._FIRST_PID_NAMESPACE}
INSIDE = {"/proc/self/ns/pid": 1, "/proc/self/ns/mnt": 2}


@pytest.mark.parametrize(
    ("inodes", "sees"),
    [
        (FIRST, True),
        ({**INSIDE, "/proc/1/ns/mnt": 3}, True),
        ({**INSIDE, "/proc/1/ns/mnt": 2}, False),
        # Without CAP_SYS_PTRACE: it may be either, so no namespace may be taken for one without processes.
        (INSIDE, False),
    ],
)
def test_who_sees_every_process(inodes: dict[str, int], sees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def stat(path: str) -> Any:
        if path not in inodes:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return SimpleNamespace(st_dev=4, st_ino=inodes[path])

    monkeypatch.setattr(netns, "os", SimpleNamespace(stat=stat))
    assert netns.sees_every_process() is sees
