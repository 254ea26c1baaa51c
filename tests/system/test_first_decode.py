"""The first requests of a daemon come at once, so several of its threads are the first to read a record."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

PROGRAM: Final = """
import importlib, sys, threading

from multus_daemon.spec.attachment import ContainerRecord, Sandbox
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid

# So that one thread is in the midst of a thing when the next has its turn.
sys.setswitchinterval(1e-6)
sandbox = Sandbox(ContainerId("c1"), "/run/netns/c1")
one = ContainerRecord(sandbox, IfName("eth0"), Namespace("default"), PodName("hello"), PodUid("u1"), (), True, 1.0)
for _ in range(200):
    # As a process that has just started has it.
    sys.modules.pop("multus_daemon.pod.record_format", None)
    record = importlib.import_module("multus_daemon.pod.record_format")
    data, found, together = record.encode(one), [], threading.Barrier(8)

    def read():
        together.wait()
        found.append(record.decode(data))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [one] * 8, found
"""


def test_the_first_records_are_read_by_several_threads_at_once() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
