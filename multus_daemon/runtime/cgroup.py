"""Limits of memory and CPU time of this process's control groups, on all visible levels.

Formats: https://docs.kernel.org/admin-guide/cgroup-v2.html (`memory.max`, `memory.high`, `cpu.max`),
cgroup-v1/memory.html (`memory.limit_in_bytes`, `hierarchical_memory_limit`), scheduler/sched-bwc.html
(`cpu.cfs_quota_us`), cgroups(7), proc_pid_cgroup(5) and proc_pid_mountinfo(5). All functions block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

# Version 1 has 2^63 bytes less one page for "no limit".
_NO_LIMIT = 1 << 60
_READ_LIMIT = 1 << 20
_LIMITS_V2 = ("memory.max", "memory.high")
_LIMITS_V1 = ("memory.limit_in_bytes",)


class _Mount(NamedTuple):
    root: PurePosixPath
    """The control group that is the root of the mount."""
    point: Path
    kind: str
    options: frozenset[str]


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the smallest memory limit of this process's control group and its parents in bytes; None without one.

    Unreadable files mean no limit; a container does not see all parents. `root`: parent of `/proc` and `/sys`.
    """
    texts: list[str] = []
    for group, top, version in _groups(root, "memory"):
        names = _LIMITS_V2 if version == 2 else _LIMITS_V1
        texts += [_read(directory / name).strip() for directory in _levels(group, top) for name in names]
        if version == 1:
            # With `memory.use_hierarchy` this includes parents that are not mounted in the container.
            texts += re.findall(r"(?m)^hierarchical_memory_limit (\d+)$", _read(group / "memory.stat"))
    return min((int(text) for text in texts if text.isdecimal() and int(text) < _NO_LIMIT), default=None)


def cpu_limit(root: Path = Path("/")) -> float | None:
    """Return the smallest CPU limit in cores, such as 0.1, found as in `memory_limit`; None without one."""
    limits = []
    for group, top, version in _groups(root, "cpu"):
        for directory in _levels(group, top):
            if version == 2:
                fields = _read(directory / "cpu.max").split()
            else:
                fields = [_read(directory / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
            # Without a limit, the quota is `max` or -1.
            if len(fields) == 2 and all(field.isdecimal() and int(field) for field in fields):
                limits.append(int(fields[0]) / int(fields[1]))
    return min(limits, default=None)


def host_memory(root: Path = Path("/")) -> int | None:
    """Return the machine's memory in bytes; None if /proc lacks it."""
    found = re.search(r"(?m)^MemTotal:\s+(\d+) kB$", _read(root / "proc/meminfo"))
    return int(found[1]) * 1024 if found else None


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, Path, int]]:
    mounts = list(_mounts(root))
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and controller not in controllers.split(","):
            continue
        kind = "cgroup2" if version == 2 else "cgroup"
        fitting = [mount for mount in mounts if mount.kind == kind and (version == 2 or controller in mount.options)]
        # A mount from outside this process's namespace, such as the host's in a container, is the last choice.
        fitting.sort(key=lambda mount: ".." in mount.root.parts)
        tops = [root / mount.point.relative_to("/") for mount in fitting]
        for mount, top in zip(fitting, tops, strict=True):
            if directory := _directory(top, mount.root, PurePosixPath(path)):
                yield directory, top, version
                break
        else:
            # The path belongs to another namespace: use the mounted group.
            for top in tops[:1]:
                yield top, top, version


def _directory(top: Path, mounted: PurePosixPath, path: PurePosixPath) -> Path | None:
    """Return the directory of the control group `path`; None if it is not below `mounted`, or hidden (`..`)."""
    if not path.is_relative_to(mounted) or ".." in (below := path.relative_to(mounted)).parts:
        return None
    directory = top / below
    return directory if directory.is_dir() else None


def _levels(group: Path, top: Path) -> Iterator[Path]:
    for directory in (group, *group.parents):
        yield directory
        if directory == top:
            break


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) >= 5 and len(kinds) >= 3 and kinds[0] in ("cgroup", "cgroup2"):
            options = frozenset(kinds[2].split(","))
            yield _Mount(PurePosixPath(_unescaped(fields[3])), Path(_unescaped(fields[4])), kinds[0], options)


def _unescaped(text: str) -> str:
    """Decode the three octal digits of blanks and the like in mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_READ_LIMIT).decode("utf-8", "surrogateescape")
    except OSError:
        return ""
