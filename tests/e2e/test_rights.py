"""The daemons of these tests have the rights of the shipped manifest and no other (`rights.py`)."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import memory_group
from tests.e2e.node import Node
from tests.e2e.rights import SHIPPED, status

# Prints the errors of some system calls: add_key, bpf with a wrong size, one that no kernel has.
CALLS = """
import ctypes, json, os, platform
libc = ctypes.CDLL(None, use_errno=True)
numbers = {"x86_64": (248, 321), "aarch64": (217, 280)}[platform.machine()]
print(json.dumps([ctypes.get_errno() for number in (*numbers, 1000) if libc.syscall(number, 0, 0, 0, 0, 0)]))
"""


def run(node: Node, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(node.contained(*command), capture_output=True, text=True, timeout=60, check=False)


def test_the_daemon_has_what_the_manifest_grants(node: Node) -> None:
    node.start()
    assert node.daemon is not None
    assert status(Path(f"/proc/{node.daemon.pid}")) == SHIPPED.status


def test_only_what_the_manifest_mounts_writable_is(node: Node) -> None:
    for directory in (node.cni_dir, node.socket.parent, node.below_chroot(node.root), "/dev/shm"):
        assert run(node, "sh", "-ec", f"echo >{directory}/file; rm {directory}/file").stderr == ""
    for path in (node.root / "file", "/tmp/file", "/proc/sys/net/ipv4/ip_forward", "/sys/kernel/profiling"):
        assert "Read-only file system" in run(node, "sh", "-c", f"echo >{path}").stderr
    assert run(node, "cat", "/proc/timer_list").stdout == ""


def test_system_calls_are_those_of_the_runtime_default_profile(node: Node) -> None:
    done = run(node, sys.executable, "-I", "-S", "-c", CALLS)
    # SYS_ADMIN allows bpf, which then looks at its arguments.
    assert json.loads(done.stdout) == [errno.EPERM, errno.EINVAL, errno.ENOSYS], done.stderr


def test_the_daemon_has_the_memory_limit(node: Node) -> None:
    if reason := memory_group.missing():
        pytest.skip(reason)
    node.start()
    assert f"the memory limit of {SHIPPED.memory >> 20} MiB" in node.log.read_text()
    done = run(node, sys.executable, "-I", "-S", "-c", f"bytearray(b'x') * {SHIPPED.memory}")
    assert done.returncode == -signal.SIGKILL
