"""A scratch machine in namespaces of its own: processes run in it, it can be switched off and on, nothing of it stays.

It shares the kernel, the programs and the cgroup tree with the machine that the tests run on. What it writes is in one
directory, its cgroups are below one of the directory's name (`boot` says what is its own).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.e2e.cluster import boot
from tests.programs import needed

_PREFIX: Final = "multus-machine-"

ADDRESS: Final = "192.0.2.10"
"""A machine's, of TEST-NET-1 (RFC 5737)."""


class Machine:
    """Made switched off. Needs root, and util-linux' `unshare` and `nsenter`."""

    def __init__(self, hostname: str, *service: str, address: str = ADDRESS) -> None:
        """`service`: an address that it has on its loopback device, as kube-proxy would lead one there."""
        self.address = address
        sweep()
        self._arguments = (hostname, address, *service)
        # Locked before it has the name by which another run's sweep would find it.
        made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
        self._lock = _lock(made)
        self.root = made.rename(made.with_name(made.name[1:]))
        self.cgroup = f"/{self.root.name}"
        self.logs = self.root / "log"
        self.logs.mkdir()
        self._unshare: subprocess.Popen[bytes] | None = None
        self._processes: list[MachineProcess] = []
        self._pid = 0

    # --- its life ----------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Switch it on."""
        assert self._unshare is None, "it is on"
        for hierarchy in hierarchies():
            (hierarchy / self.root.name).mkdir(exist_ok=True)
        namespaces = ["--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        script = [sys.executable, "-I", "-S", boot.__file__, str(self.root), *self._arguments]
        log = self.logs / "boot.log"
        with log.open("ab") as errors:
            self._unshare = subprocess.Popen(
                [needed("unshare"), *namespaces, "--propagation", "private", *script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != b"ready\n":
            self.power_off()
            raise AssertionError(f"the machine does not start:\n{log.read_text()}")
        self._pid = _only_child(self._unshare.pid)

    def power_off(self) -> None:
        """Switch it off: every process ends at once, and links, mounts and `/run` are gone."""
        child, self._unshare = self._unshare, None
        if child is None:
            return
        assert child.stdin is not None
        assert child.stdout is not None
        if self._pid:
            # The kernel ends the first process of a namespace last, so its end is everybody's.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        child.stdin.close()
        child.stdout.close()
        child.wait(timeout=60)
        self._pid = 0
        for process in self._processes:
            process.reap()
        self._processes.clear()
        _remove_cgroups(self.root.name)

    def close(self) -> None:
        """Switch it off for good and remove its files."""
        self.power_off()
        shutil.rmtree(self.root)
        os.close(self._lock)

    # --- what runs in it ---------------------------------------------------------------------------------------------

    @property
    def netns(self) -> str:
        """Path of its network namespace."""
        return f"/proc/{self._pid}/ns/net"

    def path(self, inside: str) -> Path:
        """A path of the machine's as the tests see it; the machine must be on."""
        return Path(f"/proc/{self._pid}/root{inside}")

    def inside(self, *command: str) -> list[str]:
        """The command line that runs a command in the machine."""
        assert self._pid, "the machine is off"
        entered = ["--mount", "--net", "--uts", "--ipc", "--pid"]
        return ["nsenter", "--target", str(self._pid), *entered, "--wd=/", "--", *command]

    def run(self, *command: str, timeout: float = 60, stdin: bytes = b"") -> str:
        """Standard output of a command in the machine; raises AssertionError where it fails."""
        done = subprocess.run(self.inside(*command), input=stdin, capture_output=True, timeout=timeout, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: status {done.returncode}: {done.stderr.decode().strip()}"
        return done.stdout.decode()

    def start(self, name: str, *command: str, env: dict[str, str] | None = None) -> MachineProcess:
        """Start a program that stays; its log is `logs/NAME.log`, which goes on where there is one."""
        process = MachineProcess(name, self.inside(*command), self.logs / f"{name}.log", env)
        self._processes.append(process)
        return process

    def tails(self, lines: int = 40) -> str:
        """The ends of all logs."""
        parts = []
        for log in sorted(self.logs.glob("*.log")):
            text = log.read_text(errors="replace").splitlines()[-lines:]
            parts.append(f"--- {log.name}:\n" + "\n".join(text))
        return "\n".join(parts)


class MachineProcess:
    """A program that runs in a machine."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._nsenter = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | (env or {}),
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Return True if the process has not ended."""
        return self._nsenter.poll() is None

    @property
    def pid(self) -> int:
        """The program's, as the outer machine counts."""
        return _only_child(self._nsenter.pid)

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout: float = 30) -> int:
        """End it and wait, at last with SIGKILL; its exit status as a shell gives it."""
        with contextlib.suppress(AssertionError, ProcessLookupError):
            os.kill(self.pid, number)
        try:
            return self._nsenter.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.kill(self.pid, signal.SIGKILL)
            return self._nsenter.wait(timeout=timeout)

    def reap(self) -> None:
        """Wait for it where the machine has been switched off."""
        self._nsenter.wait(timeout=60)


def _only_child(pid: int, timeout: float = 10) -> int:
    """The process that `unshare` or `nsenter` has forked."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            break
        if children:
            return int(children[0])
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.005)
    raise AssertionError(f"process {pid} has no child")


# --- what dead runs left -------------------------------------------------------------------------------------------


def sweep() -> None:
    """Remove the files and cgroups of machines whose test run has ended without doing so. Their processes are gone."""
    for root in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            lock = _lock(root)
        except OSError:
            continue  # Its run goes on, or another sweep was first.
        _remove_cgroups(root.name)
        shutil.rmtree(root, ignore_errors=True)
        os.close(lock)


def _lock(root: Path) -> int:
    """Hold the directory's lock until the descriptor is closed, or we end. Raises OSError where another holds it."""
    descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def hierarchies() -> Iterator[Path]:
    """The cgroup hierarchies: that of version 2, or those of version 1 and what of version 2 is beside them."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, target, kind, *_ = line.split()
        if kind in ("cgroup", "cgroup2") and Path(target).is_relative_to("/sys/fs/cgroup"):
            yield Path(target)


def _remove_cgroups(name: str, timeout: float = 10) -> None:
    """Remove a cgroup and those in it, in every hierarchy; the processes in them have been ended."""
    deadline = time.monotonic() + timeout
    for hierarchy in hierarchies():
        top = hierarchy / name
        while top.exists():
            inner = [Path(path) for path, _, _ in os.walk(top, topdown=False)]
            for path in inner:
                # EBUSY: the kernel has not yet let go of a process.
                with contextlib.suppress(OSError):
                    path.rmdir()
            assert not top.exists() or time.monotonic() < deadline, f"{top} is still in use"
            if top.exists():
                time.sleep(0.02)
