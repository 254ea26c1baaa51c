"""The memory limit as a real hierarchy of cgroups has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multus_daemon.runtime import cgroup
from tests.programs import needed

# Groups $2, $2/pod and $2/pod/c of the kernel's hierarchy with a limit each, and what is found: as the host sees them;
# in a namespace that begins with the container; in one that begins with the pod; in one that begins with the container
# which the process was moved out of. There is no memory.max where version 1 has the memory controller, so it is done by
# another file of each group that the kernel reads and writes in the same way.
HIERARCHY = r"""
set -e
cd "$3"; mount -t tmpfs none .; cd "$3"; mkdir outer inner; mount -t cgroup2 none outer
top=$PWD/outer/$2
trap 'echo $$ >outer/cgroup.procs; rmdir $top/pod/c $top/pod $top' EXIT
mkdir -p $top/pod/c
echo 157286400 >$top/cgroup.max.depth; echo 209715200 >$top/pod/cgroup.max.depth
echo 262144000 >$top/pod/c/cgroup.max.depth
limit="from multus_daemon.runtime import cgroup; cgroup._LIMITS_V2 = ('cgroup.max.depth',)
print(cgroup.memory_limit())"
into() { sh -c "echo \$PPID >$1/cgroup.procs"; }
inside() { unshare --cgroup --mount sh -c "mount -t cgroup2 none inner; $1"'; exec "$0" -c "$1"' "$2" "$limit"; }
export PYTHONPATH=$4
(into $top/pod/c; "$1" -c "$limit"; inside : "$1")
(into $top/pod; inside "echo \$\$ >$top/pod/c/cgroup.procs" "$1")
(into $top/pod/c; inside "echo \$\$ >$top/cgroup.procs" "$1")
"""


def test_version_2_of_this_kernel(tmp_path: Path) -> None:
    arguments = (sys.executable, f"multus-test-{os.getpid()}", str(tmp_path), str(Path(cgroup.__file__).parents[2]))
    command = [needed("unshare"), "--mount", "--propagation", "private", "sh", "-c"]
    probe = ["mount", "-t", "cgroup2", "none", str(tmp_path)]
    if subprocess.run([*command, '"$@"', "sh", *probe], capture_output=True, timeout=20).returncode:
        pytest.skip("needs root and a kernel with control groups of version 2")
    done = subprocess.run([*command, HIERARCHY, "sh", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    host, container, pod, moved = (int(line) >> 20 for line in done.stdout.split())
    assert (host, container, pod, moved) == (150, 250, 200, 250)
