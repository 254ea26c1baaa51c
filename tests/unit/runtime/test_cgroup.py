"""Limits, read from trees such as kernels show them in and outside of containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from multus_daemon.runtime import cgroup

V1_UNLIMITED = str(2**63 - 4096)
V2 = "0::/\n"
V2_MOUNT = "30 25 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


class Host:
    """A `/proc` and a `/sys` below a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def groups(self, cgroup: str, mountinfo: str) -> None:
        self.write("/proc/self/cgroup", cgroup)
        self.write("/proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mountinfo)

    def limit(self) -> int | None:
        return cgroup.memory_limit(self.root)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_version_2_in_a_container(host: Host) -> None:
    host.groups(V2, V2_MOUNT)
    host.write("/sys/fs/cgroup/memory.max", "536870912\n")
    host.write("/sys/fs/cgroup/memory.high", "max\n")
    assert host.limit() == 512 << 20


def test_version_2_throttles_before_it_kills(host: Host) -> None:
    host.groups(V2, V2_MOUNT)
    host.write("/sys/fs/cgroup/memory.max", "536870912\n")
    host.write("/sys/fs/cgroup/memory.high", "400000000\n")
    assert host.limit() == 400000000


@pytest.mark.parametrize(
    ("levels", "smallest"),
    [
        ({"kubepods.slice": "900", "kubepods.slice/pod1": "700", "kubepods.slice/pod1/c": "max"}, 700),
        ({"kubepods.slice": "900", "kubepods.slice/pod1": "max", "kubepods.slice/pod1/c": "800"}, 800),
        ({"kubepods.slice": "600", "kubepods.slice/pod1": "700", "kubepods.slice/pod1/c": "800"}, 600),
        ({"kubepods.slice": "max", "kubepods.slice/pod1": "max", "kubepods.slice/pod1/c": "max"}, None),
        ({"kubepods.slice": "max", "kubepods.slice/pod2": "5"}, None),
    ],
)
def test_version_2_seen_from_the_host(host: Host, levels: dict[str, str], smallest: int | None) -> None:
    host.groups("0::/kubepods.slice/pod1/c\n", V2_MOUNT)
    host.write("/sys/fs/cgroup/kubepods.slice/pod1/c/cgroup.procs", "1\n")
    for name, text in levels.items():
        host.write(f"/sys/fs/cgroup/{name}/memory.max", f"{text}\n")
    # Above the mount nothing counts.
    host.write("/sys/fs/memory.max", "1\n")
    assert host.limit() == smallest


# Kubelet and containerd make this path with the systemd driver, under a runtime that shows the whole hierarchy.
SCOPE = (
    "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0f1e2d3c_4b5a_6978_8796_a5b4c3d2e1f0.slice/"
    "cri-containerd-6c1f8a2b3d4e5f60718293a4b5c6d7e8f90123456789abcdef0123456789abcd.scope"
)


@pytest.mark.parametrize(
    ("limits", "smallest"),
    [
        (("4294967296", "max", "max", "536870912"), 512 << 20),
        # The pod's limit, if all its containers have one; the limit of the node's pods, if none has one.
        (("4294967296", "max", "268435456", "max"), 256 << 20),
        (("4294967296", "max", "max", "max"), 4 << 30),
        (("max", "max", "max", "max"), None),
    ],
)
def test_version_2_as_kubelet_has_it(host: Host, limits: tuple[str, ...], smallest: int | None) -> None:
    host.groups(f"0::/{SCOPE}\n", V2_MOUNT)
    group = Path("/sys/fs/cgroup")
    # The root has no limit, not even the file.
    host.write(str(group / "cgroup.controllers"), "cpuset cpu io memory hugetlb pids rdma misc\n")
    for name, limit in zip(SCOPE.split("/"), limits, strict=True):
        group /= name
        host.write(str(group / "memory.max"), f"{limit}\n")
        host.write(str(group / "memory.high"), "max\n")
    assert host.limit() == smallest


OWN = "1264 1247 0:27 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate\n"


@pytest.mark.parametrize("first", [True, False])
def test_version_2_beside_the_hosts_mount(host: Host, first: bool) -> None:
    """The container's own group is what counts, also where the node's root is mounted before it."""
    nodes = "1201 1180 0:27 /../../../.. /hostroot/sys/fs/cgroup rw,nosuid master:11 - cgroup2 cgroup2 rw,nsdelegate\n"
    host.groups(V2, nodes + OWN if first else OWN + nodes)
    host.write("/sys/fs/cgroup/memory.max", "536870912\n")
    host.write("/hostroot/sys/fs/cgroup/kubepods.slice/memory.max", "4294967296\n")
    assert host.limit() == 512 << 20


@pytest.mark.parametrize(
    ("path", "mounted", "directory"),
    [
        # A process was moved out of the group that its namespace began in: the groups above have no name here.
        ("/../..", "/", ""),
        ("/../..", "/../../..", ""),
        ("/../..", "/../..", ""),
        ("/../../other", "/../..", "other"),
        ("/../../other/inner", "/../..", "other/inner"),
        ("/../../other", "/..", ""),
        ("/c/inner", "/c", "inner"),
    ],
)
def test_version_2_in_nested_namespaces(host: Host, path: str, mounted: str, directory: str) -> None:
    host.groups(f"0::{path}\n", V2_MOUNT.replace(" / /sys", f" {mounted} /sys"))
    host.write("/sys/fs/cgroup/memory.max", "900000000\n")
    if directory:
        host.write(f"/sys/fs/cgroup/{directory}/memory.max", "800000000\n")
    assert host.limit() == (800000000 if directory else 900000000)


def test_version_1_in_a_container(host: Host) -> None:
    """The path is the host's, and the container's group is what is mounted."""
    path = "/kubepods/burstable/pod1/c"
    host.groups(
        f"5:cpu,cpuacct:{path}\n4:memory:{path}\n0::/\n",
        f"31 30 0:30 {path} /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
        f"32 30 0:31 {path} /sys/fs/cgroup/memory ro,nosuid master:1 - cgroup cgroup rw,memory\n",
    )
    host.write("/sys/fs/cgroup/cpu,cpuacct/memory.limit_in_bytes", "1\n")
    host.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "268435456\n")
    assert host.limit() == 256 << 20


def test_version_1_tells_of_groups_above_the_container(host: Host) -> None:
    host.groups("4:memory:/a/b\n", "32 30 0:31 /a/b /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n")
    host.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", f"{V1_UNLIMITED}\n")
    host.write("/sys/fs/cgroup/memory/memory.stat", "cache 1\nhierarchical_memory_limit 300000000\nrss 2\n")
    assert host.limit() == 300000000


def test_version_1_nested(host: Host) -> None:
    host.groups("4:memory:/a/b\n", "32 30 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n")
    host.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", f"{V1_UNLIMITED}\n")
    host.write("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "500000000\n")
    host.write("/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", f"{V1_UNLIMITED}\n")
    assert host.limit() == 500000000


def test_version_1_without_a_limit(host: Host) -> None:
    host.groups("4:memory:/\n", "32 30 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n")
    host.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", f"{V1_UNLIMITED}\n")
    host.write("/sys/fs/cgroup/memory/memory.stat", f"hierarchical_memory_limit {V1_UNLIMITED}\n")
    assert host.limit() is None


def test_both_versions_mounted(host: Host) -> None:
    """A hybrid host: version 1 has the memory controller, version 2 has none."""
    host.groups(
        "4:memory:/a\n1:name=systemd:/a\n0::/a\n",
        "32 30 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "33 30 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    )
    host.write("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "700000000\n")
    host.write("/sys/fs/cgroup/unified/a/cgroup.procs", "")
    assert host.limit() == 700000000


@pytest.mark.parametrize("path", ["/../../other", "/not/mounted", "/../c"])
def test_a_path_of_another_namespace_is_taken_for_the_mount(host: Host, path: str) -> None:
    host.groups(f"0::{path}\n", V2_MOUNT)
    host.write("/sys/fs/cgroup/memory.max", "1000000\n")
    host.write("/sys/fs/other/memory.max", "5\n")
    assert host.limit() == 1000000


def test_a_mount_point_with_a_blank(host: Host) -> None:
    host.groups(V2, "30 25 0:26 / /sys/c\\040g rw - cgroup2 cgroup2 rw\n")
    host.write("/sys/c g/memory.max", "1000000\n")
    assert host.limit() == 1000000


@pytest.mark.parametrize(
    ("cgroup", "mountinfo"),
    [("", ""), (V2, ""), ("", V2_MOUNT), ("garbage", "garbage - x\n - \n"), ("0::\n", V2_MOUNT), (":::", V2_MOUNT)],
)
def test_nothing_to_be_known(host: Host, cgroup: str, mountinfo: str) -> None:
    host.groups(cgroup, mountinfo)
    assert host.limit() is None


def test_no_proc(host: Host) -> None:
    assert host.limit() is None
    assert cgroup.host_memory(host.root) is None


def test_host_memory(host: Host) -> None:
    host.write("/proc/meminfo", "MemTotal:       16384 kB\nMemFree:  1 kB\n")
    assert cgroup.host_memory(host.root) == 16 << 20


def test_this_machine() -> None:
    total = cgroup.host_memory()
    assert total is not None
    assert total > 1 << 28
    limit = cgroup.memory_limit()
    assert limit is None or limit > 1 << 24


# --- processor time --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("levels", "smallest"),
    [
        ({"": "10000 100000"}, 0.1),
        ({"": "max 100000"}, None),
        ({"": ""}, None),
        ({"": "10000"}, None),
        ({"": "10000 0"}, None),
        ({"kubepods": "150000 100000", "kubepods/pod1": "max 100000"}, 1.5),
        ({"kubepods": "50000 100000", "kubepods/pod1": "20000 50000"}, 0.4),
    ],
)
def test_cpu_limit_of_version_2(host: Host, levels: dict[str, str], smallest: float | None) -> None:
    group = max(levels, key=len)
    host.groups(f"0::/{group}\n", V2_MOUNT)
    for level, text in levels.items():
        host.write(f"/sys/fs/cgroup/{level}/cpu.max", f"{text}\n")
    assert cgroup.cpu_limit(host.root) == smallest


@pytest.mark.parametrize(("quota", "expected"), [("10000", 0.1), ("-1", None), ("", None)])
def test_cpu_limit_of_version_1(host: Host, quota: str, expected: float | None) -> None:
    mounts = (
        "31 25 0:27 /kubepods/pod1/c /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
        "32 25 0:28 /kubepods/pod1/c /sys/fs/cgroup/cpuset ro - cgroup cgroup rw,cpuset\n"
    )
    host.groups("4:cpuset:/kubepods/pod1/c\n3:cpu,cpuacct:/kubepods/pod1/c\n0::/\n", mounts)
    host.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", f"{quota}\n")
    host.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    assert cgroup.cpu_limit(host.root) == expected


def test_what_this_process_may_use_is_told() -> None:
    limit = cgroup.cpu_limit()
    assert limit is None or limit > 0
