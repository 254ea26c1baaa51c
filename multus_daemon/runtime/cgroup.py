"""How much memory and processor time the control groups of this process allow it, all levels that can be seen.

https://docs.kernel.org/admin-guide/cgroup-v2.html (`memory.max`, `memory.high`, `cpu.max`), cgroup-v1/memory.html
(`memory.limit_in_bytes`, `hierarchical_memory_limit`) and scheduler/sched-bwc.html (`cpu.cfs_quota_us`). Which group it
is, and where it is mounted: cgroups(7), proc_pid_cgroup(5) and proc_pid_mountinfo(5). All functions block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

# "No limit" of version 1 is the largest number of pages, in bytes: 2^63 less one page.
_NO_LIMIT = 1 << 60
_READ_LIMIT = 1 << 20
_LIMITS_V2 = ("memory.max", "memory.high")
_LIMITS_V1 = ("memory.limit_in_bytes",)


class _Mount(NamedTuple):
    root: PurePosixPath
    """The group that is mounted there."""
    point: Path
    kind: str
    options: frozenset[str]


def memory_limit(root: Path = Path("/")) -> int | None:
    """The smallest memory limit, in bytes, of this process's control group and those above it; None without one.

    Of groups above a container's own only what the kernel tells inside of it counts. What can't be read counts as no
    limit. `root`: where `/proc` and `/sys` are, for tests.
    """
    limits = [limit for group in _groups(root, "memory") for limit in _memory_limits(*group)]
    return min(limits, default=None)


def cpu_limit(root: Path = Path("/")) -> float | None:
    """As `memory_limit`: how many cores' time may be used, such as 0.1; None without a limit."""
    limits = [limit for group in _groups(root, "cpu") for limit in _cpu_limits(*group)]
    return min(limits, default=None)


def host_memory(root: Path = Path("/")) -> int | None:
    """The memory of the machine in bytes; None where /proc does not tell. `root`: as for `memory_limit`."""
    found = re.search(r"(?m)^MemTotal:\s+(\d+) kB$", _read(root / "proc/meminfo"))
    return int(found[1]) * 1024 if found else None


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, Path, int]]:
    """The directory of the group, the mount point above it, and the version; of a hybrid host those of both."""
    mounts = list(_mounts(root))
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and controller not in controllers.split(","):
            continue
        fitting = [mount for mount in mounts if _has(mount, controller, version)]
        # A mount of what is above this process's namespace, such as the host's in a container, is the last choice.
        fitting.sort(key=lambda mount: ".." in mount.root.parts)
        tops = [root / mount.point.relative_to("/") for mount in fitting]
        for mount, top in zip(fitting, tops, strict=True):
            if directory := _directory(top, mount.root, PurePosixPath(path)):
                yield directory, top, version
                break
        else:
            # The path is another namespace's: what is mounted is the nearest that can be known.
            for top in tops[:1]:
                yield top, top, version


def _has(mount: _Mount, controller: str, version: int) -> bool:
    return mount.kind == "cgroup2" if version == 2 else mount.kind == "cgroup" and controller in mount.options


def _directory(top: Path, mounted: PurePosixPath, path: PurePosixPath) -> Path | None:
    """Where the group is below the mount; None where it is not in there, or its name is not told (`..`)."""
    if not path.is_relative_to(mounted) or ".." in (below := path.relative_to(mounted)).parts:
        return None
    directory = top / below
    return directory if directory.is_dir() else None


def _levels(group: Path, top: Path) -> Iterator[Path]:
    """The group and those above it."""
    for directory in (group, *group.parents):
        yield directory
        if directory == top:
            break


def _cpu_limits(group: Path, top: Path, version: int) -> Iterator[float]:
    for directory in _levels(group, top):
        if version == 2:
            fields = _read(directory / "cpu.max").split()
        else:
            fields = [_read(directory / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        # Without a limit the quota is `max`, or -1.
        if len(fields) == 2 and all(field.isdecimal() and int(field) for field in fields):
            yield int(fields[0]) / int(fields[1])


def _memory_limits(group: Path, top: Path, version: int) -> Iterator[int]:
    for directory in _levels(group, top):
        for name in _LIMITS_V2 if version == 2 else _LIMITS_V1:
            text = _read(directory / name).strip()
            if text.isdecimal() and int(text) < _NO_LIMIT:
                yield int(text)
    if version == 1:
        # With `memory.use_hierarchy` this knows of groups above the container's, which are not mounted in it.
        found = re.search(r"(?m)^hierarchical_memory_limit (\d+)$", _read(group / "memory.stat"))
        if found and int(found[1]) < _NO_LIMIT:
            yield int(found[1])


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) >= 5 and len(kinds) >= 3 and kinds[0] in ("cgroup", "cgroup2"):
            options = frozenset(kinds[2].split(","))
            yield _Mount(PurePosixPath(_unescaped(fields[3])), Path(_unescaped(fields[4])), kinds[0], options)


def _unescaped(text: str) -> str:
    """Blanks and the like are three octal digits in mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_READ_LIMIT).decode("utf-8", "surrogateescape")
    except OSError:
        return ""
