"""A kernel in QEMU, by virtme-ng, over the machine's own files.

The guest reads them, and writes to memory: what it changes is gone with it. It runs everywhere, as it needs no KVM; a
program is five to ten times slower in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.kernels.debian_kernels import image
from tests.programs import missing, needed

_MODULES: Final = (
    "8021q bonding br_netfilter bridge dummy ifb igb igbvf ip6_tables ip_tables ipvlan macvlan nf_tables sch_tbf tun"
    " veth vrf"
)
"""Loaded at the start, as on a node: a test's namespace may not be able to."""
_OPTIONS: Final = ("mitigations=off", "init_on_alloc=0", "nokaslr", "apparmor=0", "loglevel=3")
"""Kernel parameters that save time, and quiet its log."""
_ENVIRONMENT: Final = {
    "HOME": str(Path.home()),
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    # The machine's own /tmp may have the sources, and much else.
    "TMPDIR": "/run/tmp",
}
_BEGINS: Final = "kernels: the tests begin"
_ATTEMPTS: Final = 3
_QEMU: Final = "qemu-system-x86_64"
# virtme mounts the root without a cache: programs would be read again at each start.
_ENTER: Final = f"""\
set -e
share() {{ mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,$3" "$1" "$2"; }}
modprobe --all 9pnet_virtio 9p overlay
mkdir -p /run/files /run/changes /run/root
share files /run/files cache=loose,ro
mount -t tmpfs changes /run/changes
mkdir /run/changes/upper /run/changes/work
mount -t overlay -o lowerdir=/run/files,upperdir=/run/changes/upper,workdir=/run/changes/work root /run/root
mkdir -p /run/root/lib/modules
mount --rbind /lib/modules /run/root/lib/modules
modprobe --all {_MODULES}
cd /run/root
for folder in proc sys dev; do mount --rbind /$folder $folder; done
mount -t tmpfs run run
mkdir run/netns run/scratch run/tmp
share scratch run/scratch cache=none
# A chroot may not make user namespaces.
pivot_root . mnt
umount -l /mnt
echo '{_BEGINS}'
status=0
sh -e /run/scratch/command || status=$?
echo $status >/run/scratch/status
"""


class MachineError(Exception):
    """The virtual machine did not start, or did not end in time; the message has its last lines."""


def lacks() -> str:
    """Say what this machine lacks for a virtual machine, and how to get it; empty if it has all."""
    if not _virtme_run().exists():
        return "needs virtme-ng: `make kernels` installs it"
    return missing(_QEMU, "busybox", "depmod", "modprobe", "unshare")


def _virtme_run() -> Path:
    return Path(sys.executable).with_name("virtme-run")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Wait until no other virtual machine runs: one takes all cores."""
    with Path(tempfile.gettempdir(), "vm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(kernel: Path, command: Sequence[str], environment: Mapping[str, str], seconds: float) -> int:
    """Run a command in a kernel, as root in the present directory; show its output, and return its exit status.

    Raises MachineError.
    """
    with _alone(), tempfile.TemporaryDirectory(prefix="multus-kernel-") as name:
        scratch = Path(name)
        words = [f"{key}={value}" for key, value in (_ENVIRONMENT | dict(environment)).items()]
        inner = shlex.join(["env", "-i", *words, *command])
        (scratch / "command").write_text(f"cd {shlex.quote(os.getcwd())}\n{inner}\n")
        (scratch / "enter").write_text(_ENTER)
        said = ""
        for _ in range(_ATTEMPTS):
            # QEMU 7.2 ends by an assertion of its own in one start of ten: msix_table_mmio_write.
            begun, said = _boot(_line(kernel, scratch), seconds)
            if begun:
                break
        status = scratch / "status"
        if not status.exists():
            raise MachineError("the virtual machine ended early; it said last:\n" + said)
        return int(status.read_text())


def _line(kernel: Path, scratch: Path) -> list[str]:
    shares = _card()
    for tag, path, more in (("files", "/", ",readonly=on"), ("scratch", str(scratch), "")):
        shares += ["-fsdev", f"local,id={tag},path={path},security_model=none,multidevs=remap{more}"]
        shares += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    return [
        str(_virtme_run()),
        *("--kimg", str(image(kernel)), "--mods", "auto", "--name", "kernels", "--cwd", "/"),
        *("--disable-kvm", "--force-9p", "--cpus", "2", "--memory", "4G", "--show-boot-console"),
        # As vng does: the modules are mounted below the one, and a plain /tmp would hide the scratch directory.
        *("--overlay-rwdir", "/lib", "--overlay-rwdir", "/tmp"),
        *(word for option in _OPTIONS for word in ("--kopt", option)),
        *("--script-sh", f"unshare --mount --propagation private sh {scratch}/enter"),
        *("--qemu-opts", *shares),
    ]


def _card() -> list[str]:
    """Return the options for a card with SR-IOV, which QEMU has since release 8."""
    command = [needed(_QEMU), "-device", "help"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    card = "-device pcie-root-port,id=root0 -device igb,bus=root0,netdev=card -netdev hubport,hubid=1,id=card"
    return card.split() if '"igb"' in listed else []


def _boot(line: Sequence[str], seconds: float) -> tuple[bool, str]:
    """Show what the machine says from the beginning of the tests on; return whether they began, and its last words."""
    begun, said = False, ""
    # A session of its own: all of it ends with the machine.
    with subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as child:
        assert child.stdout is not None
        output = child.stdout.fileno()
        end = threading.Timer(seconds, os.killpg, (child.pid, signal.SIGKILL))
        end.start()
        try:
            # Not by lines: pytest ends one after many tests.
            while raw := os.read(output, 4096):
                text = raw.decode(errors="replace")
                said = (said + text)[-4000:]
                if not begun and _BEGINS in said:
                    begun, text = True, said.partition(_BEGINS)[2].lstrip()
                if begun:
                    print(text, end="", flush=True)
        finally:
            end.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    return begun, said
