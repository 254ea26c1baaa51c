"""Locks that processes share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from multus_daemon.runtime import deadline, threads
from multus_daemon.runtime.deadline import ExpiredError


def test_a_process_that_is_killed_gives_its_keys_back(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from multus_daemon.runtime.threads import SharedKeyedLock
with SharedKeyedLock(Path({str(tmp_path / "locks")!r})).hold("a"):
    print(flush=True)
    time.sleep(60)
"""
    locks = threads.SharedKeyedLock(tmp_path / "locks")
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"\n"
        with pytest.raises(ExpiredError), deadline.within(0.05), locks.hold("a"):
            pytest.fail("the other has it")
        other.kill()
        other.wait()
    with locks.hold("a"):
        pass
