"""A memory control group of a run's own, and a command line that puts a program into it; versions 1 and 2.

https://docs.kernel.org/admin-guide/cgroup-v1/memory.html, https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import signal
import time
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_NUMBERS = itertools.count(1)


class NoMemoryGroupError(Exception):
    """No group can be made here; the message says why."""


class MemoryGroup:
    """Use it as a context manager; what is still in it when the block ends is killed."""

    def __init__(self, limit: int) -> None:
        """`limit` in bytes, for everything in the group together. Raises NoMemoryGroupError."""
        name = f"multus-test-{os.getpid()}-{next(_NUMBERS)}"
        self.version = 2 if (_ROOT / "cgroup.controllers").exists() else 1
        try:
            self.path = self._parent() / name
            self.path.mkdir()
        except OSError as error:
            raise NoMemoryGroupError(f"needs a memory control group that can be written to: {error}") from error
        try:
            self._set("memory.max" if self.version == 2 else "memory.limit_in_bytes", limit)
            if self.version == 2:
                self._set("memory.oom.group", 0)
        except OSError as error:
            self.path.rmdir()
            raise NoMemoryGroupError(f"{self.path} has no memory controller: {error}") from error

    def _parent(self) -> Path:
        """Below this process's own group where that can be seen, else at the top."""
        if self.version == 2:
            (_ROOT / "cgroup.subtree_control").write_text("+memory")
            return _ROOT
        found = re.search(r"(?m)^\d+:(?:\w+,)*memory(?:,\w+)*:/(.*)$", Path("/proc/self/cgroup").read_text())
        own = _ROOT / "memory" / (found[1] if found else "")
        return own if own.is_dir() else _ROOT / "memory"

    def _set(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))

    @property
    def mounted(self) -> dict[str, str]:
        """Where and how the hierarchy is mounted, and the path of the group in it."""
        if self.version == 2:
            return {"point": str(_ROOT), "kind": "cgroup2", "options": "", "group": f"/{self.path.relative_to(_ROOT)}"}
        point = _ROOT / "memory"
        group = f"/{self.path.relative_to(point)}"
        return {"point": str(point), "kind": "cgroup", "options": "memory", "group": group}

    @property
    def wrapper(self) -> tuple[str, ...]:
        """A program that enters the group and runs what follows it.

        In the private mounts of `ip netns exec`, which has a `/sys` without control groups: they are mounted again.
        """
        mount = "cgroup2 none" if self.version == 2 else "cgroup -o memory none"
        point = _ROOT if self.version == 2 else _ROOT / "memory"
        steps = f"mount -t tmpfs none {_ROOT} && mkdir -p {point} && mount -t {mount} {point}"
        return ("sh", "-ec", f'{steps} && echo $$ >{self.path}/cgroup.procs && exec "$@"', "sh")

    def usage(self) -> int:
        """Bytes that are in use now, file caches included."""
        return int((self.path / ("memory.current" if self.version == 2 else "memory.usage_in_bytes")).read_text())

    def anonymous(self) -> int:
        """Bytes in use that the kernel can't take back: without file caches. There is no swap on a node."""
        name = "anon" if self.version == 2 else "total_rss"
        return self._count("memory.stat", name)

    def killed(self) -> int:
        """How many processes the kernel has ended for want of memory."""
        return self._count("memory.events" if self.version == 2 else "memory.oom_control", "oom_kill")

    def _count(self, file: str, name: str) -> int:
        found = re.search(rf"(?m)^{name} (\d+)$", (self.path / file).read_text())
        if found is None:
            raise NoMemoryGroupError(f"{self.path / file} has no {name}")
        return int(found[1])

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + 10
        while (left := (self.path / "cgroup.procs").read_text().split()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)
        self.path.rmdir()


@functools.cache
def missing() -> str:
    """Return why no group can be made on this machine; empty if one can."""
    if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
        return "needs root that may mount control groups, and is in a user namespace"
    try:
        with MemoryGroup(1 << 30):
            return ""
    except NoMemoryGroupError as error:
        return str(error)
