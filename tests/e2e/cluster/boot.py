"""The first process of a scratch machine (`machine.Machine`): its own view of files, network and sysctls, then a wait.

    unshare --mount --net --uts --ipc --pid --fork --propagation private python boot.py ROOT HOSTNAME ADDRESS [SERVICE]

`/var` is ROOT/var, `/run` is empty at each start, what is written below `/etc` and `/opt` goes to ROOT; everything else
is the outer machine's. SERVICE is an address that it has besides its own. Says `ready` on standard output. Ends when
its standard input ends, and with it, being the first of its process namespace, every process of the machine: whoever
started it may be killed at any time, and no process, mount or link is left. Only the standard library is imported.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Final

# What the kubelet sets for a whole machine; here it gets files that it may write. (`setupKernelTunables`)
_TUNABLES: Final = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def _forget_namespaces() -> None:
    """Unmount the network namespaces that others have mounted: a copy of the mount here would keep them alive."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, source = line.partition(" - ")
        if source.startswith("nsfs "):
            target = fields.split()[4].encode().decode("unicode_escape")
            subprocess.run(["umount", "--lazy", target], check=False, stderr=subprocess.DEVNULL)


def _mount_files(root: Path) -> None:
    for name in ("etc", "opt"):
        upper, work = root / name, root / f".{name}"
        for directory in (upper, work):
            directory.mkdir(exist_ok=True)
        Path("/", name).mkdir(exist_ok=True)
        _run("mount", "-t", "overlay", "-o", f"lowerdir=/{name},upperdir={upper},workdir={work}", "overlay", f"/{name}")
    for name in ("cache", "lib", "log", "tmp"):
        (root / "var" / name).mkdir(parents=True, exist_ok=True)
    if not (root / "var" / "run").is_symlink():
        (root / "var" / "run").symlink_to("/run")
    _run("mount", "--bind", str(root / "var"), "/var")
    _run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")


def _mount_kernel() -> None:
    """A /proc of this process namespace, a /sys of this network namespace with the cgroups that there are."""
    _run("mount", "-t", "proc", "proc", "/proc")
    cgroups = Path("/run/cgroups")
    cgroups.mkdir()
    _run("mount", "--rbind", "/sys/fs/cgroup", str(cgroups))
    _run("mount", "-t", "sysfs", "sysfs", "/sys")
    _run("mount", "--rbind", str(cgroups), "/sys/fs/cgroup")
    _run("umount", "--lazy", "--recursive", str(cgroups))
    cgroups.rmdir()
    fakes = Path("/run/kernel")
    fakes.mkdir()
    # Each start of the machine is a boot of its own.
    for name, value in {"kernel/random/boot_id": str(uuid.uuid4()), **_TUNABLES}.items():
        if (real := Path("/proc/sys", name)).exists():
            fake = fakes / name.replace("/", ".")
            fake.write_text(value + "\n")
            _run("mount", "--bind", str(fake), str(real))


def _set_up_network(own: str, *service: str) -> None:
    """`eth0` with the node's address; its other end is `wire0`, a link that leads nowhere."""
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "wire0")
    for name in ("eth0", "wire0"):
        _run("ip", "link", "set", name, "up")
    _run("ip", "address", "add", f"{own}/24", "dev", "eth0")
    for address in service:
        _run("ip", "address", "add", f"{address}/32", "dev", "lo")
    _run("ip", "route", "add", "default", "via", "192.0.2.1")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def main() -> None:
    """Set up, say so, wait."""
    root, hostname, addresses = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    socket.sethostname(hostname)
    _forget_namespaces()
    _mount_files(root)
    _mount_kernel()
    # As on a machine of systemd's: what a container mounts below `/` can reach the others.
    _run("mount", "--make-rshared", "/")
    _set_up_network(*addresses)
    os.chdir("/")
    # Orphans come to the first process; the kernel takes them away at once.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
