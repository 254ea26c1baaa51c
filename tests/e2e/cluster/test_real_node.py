"""The node itself: that what its harness promises is so, before anything of ours runs on it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.e2e.cluster.machine import Machine, hierarchies, sweep
from tests.e2e.cluster.real_node import LINKS, RealNode

pytest_plugins = ["tests.e2e.cluster.fixtures"]

STORE = "/var/lib/cni/networks/primary"


def addresses(node: RealNode) -> list[str]:
    return [name for name in node.files(STORE) if name.startswith("10.")]


def test_a_pod_runs_with_an_address_and_nothing_is_left_of_it(real_node: RealNode) -> None:
    rules = real_node.machine.run("iptables-save", "-t", "nat")
    real_node.pod("p1")
    (pod,) = real_node.wait_running("p1")
    address = pod["status"]["podIP"]
    assert addresses(real_node) == [address]
    assert real_node.links("p1") == ["eth0", "lo"]
    (eth0,) = real_node.ip("address", "show", "eth0", pod="p1")
    assert [item["local"] for item in eth0["addr_info"] if item["family"] == "inet"] == [address]
    assert len(real_node.links()) == len(LINKS) + 1
    assert real_node.replies(address) == 1
    assert address in real_node.machine.run("iptables-save", "-t", "nat")
    real_node.delete_pod("p1")
    assert real_node.links() == LINKS
    assert addresses(real_node) == []
    assert real_node.files("/var/lib/cni/results") == []
    assert real_node.machine.run("iptables-save", "-t", "nat").count("\n-A") == rules.count("\n-A")


def test_containers_outlive_containerd_and_the_kubelet(real_node: RealNode) -> None:
    real_node.pod("p1")
    real_node.wait_running("p1")
    (before,) = real_node.containerd.sandboxes("p1")
    real_node.kill_containerd()
    real_node.restart_kubelet()
    real_node.wait_ready()
    real_node.pod("p2")
    real_node.wait_running("p1", "p2")
    assert real_node.containerd.sandboxes("p1") == [before]
    real_node.delete_pod("p1")
    real_node.delete_pod("p2")
    assert real_node.links() == LINKS


def test_a_reboot_leaves_files_and_makes_new_sandboxes(real_node: RealNode) -> None:
    real_node.pod("p1")
    real_node.wait_running("p1")
    (before,) = real_node.containerd.sandboxes("p1")
    boot = real_node.machine.run("cat", "/proc/sys/kernel/random/boot_id")
    real_node.machine.path("/run/left").write_text("")
    real_node.machine.path("/var/left").write_text("")
    real_node.reboot()
    assert not real_node.machine.path("/run/left").exists()
    assert real_node.machine.path("/var/left").exists()
    assert real_node.machine.run("cat", "/proc/sys/kernel/random/boot_id") != boot
    real_node.wait_until(lambda: bool(real_node.containerd.sandboxes("p1")), "p1 has a sandbox again")
    assert real_node.containerd.sandboxes("p1")[0].identifier != before.identifier
    real_node.delete_pod("p1")
    assert real_node.links() == LINKS
    assert addresses(real_node) == []


def test_a_machine_touches_nothing_of_the_outer_one() -> None:
    before = Path("/proc/self/mounts").read_text().count("multus-machine-")
    tunable = Path("/proc/sys/kernel/panic").read_text()
    machine = Machine("outside")
    try:
        machine.boot()
        machine.run("sh", "-c", "echo 77 >/proc/sys/kernel/panic; touch /etc/mine /opt/mine /run/mine /var/mine")
        machine.run("ip", "link", "add", "mine0", "type", "veth", "peer", "name", "mine1")
        assert Path("/proc/sys/kernel/panic").read_text() == tunable
        assert not any(Path(directory, "mine").exists() for directory in ("/etc", "/opt", "/run", "/var"))
        assert not Path("/sys/class/net/mine0").exists()
        assert Path("/proc/self/mounts").read_text().count("multus-machine-") == before
        cgroups = [path for hierarchy in hierarchies() if (path := hierarchy / machine.root.name).exists()]
        assert cgroups
    finally:
        machine.close()
    assert not machine.root.exists()
    assert not any(cgroup.exists() for cgroup in cgroups)


# A test run that is killed while its machine runs a program and has a cgroup with another in it.
KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.e2e.cluster.machine import Machine, hierarchies
machine = Machine("killed")
machine.boot()
process = machine.start("sleep", "sleep", "1000")
for hierarchy in hierarchies():
    (hierarchy / machine.root.name / "inner").mkdir()
print(machine.root, process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_nothing_is_left_of_a_machine_whose_run_was_killed(real_node: RealNode) -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", KILLED, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == -9, done.stderr
    directory, pid = done.stdout.split()
    name = Path(directory).name
    real_node.wait_until(lambda: not Path("/proc", pid).exists(), "the program has ended")
    sweep()
    # Another test's machine may be at it.
    real_node.wait_until(lambda: not Path(directory).exists(), "its files are gone")
    assert not any((hierarchy / name).exists() for hierarchy in hierarchies())
    # One that runs is left alone.
    assert real_node.machine.root.exists()
    assert real_node.machine.root.parent == Path(tempfile.gettempdir())
    assert real_node.machine.run("true") == ""
