"""One server program under test: started, frozen, ended by its own pid, its log kept."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

# Runs beside a server and ends it where we are gone without having done so: then its standard input ends without a
# line. (Not PR_SET_PDEATHSIG: that acts when the thread that started the server ends.)
_GUARD: Final = 'read -r line || kill -KILL "$0"'


class ServerProcess:
    """A program that can be started again with the same command; its log goes on in the same file."""

    def __init__(self, name: str, command: Sequence[str], directory: Path) -> None:
        self.name = name
        self.command = list(command)
        self.directory = directory
        self.log = directory / f"{name}.log"
        self._child: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The running program's. Raises RuntimeError where it does not run."""
        if self._child is None:
            raise RuntimeError(f"{self.name} does not run")
        return self._child.pid

    @property
    def running(self) -> bool:
        """Return True if the process has been started and has not ended. A frozen process is running."""
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start it; nothing is known yet about its readiness."""
        if self.running:
            return
        self.stop()
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                self.command,
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        guard = ["sh", "-c", _GUARD, str(self._child.pid)]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)

    def stop(self, number: signal.Signals = signal.SIGKILL, timeout: float = 70) -> None:
        """End it and wait; SIGKILL follows where `number` has not ended it within `timeout`."""
        child, self._child = self._child, None
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.communicate(b"done\n")
        if child is None:
            return
        if child.poll() is None:
            child.send_signal(signal.SIGCONT)
            child.send_signal(number)
            try:
                child.wait(timeout=timeout)
            except subprocess.TimeoutExpired:
                child.kill()
        child.wait()

    def pause(self) -> None:
        """Freeze it: connections are still taken by the kernel, and never answered."""
        if self._child is not None:
            self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        if self._child is not None:
            self._child.send_signal(signal.SIGCONT)

    def rss(self) -> int:
        """Resident memory in bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (kib,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(kib) << 10

    def tail(self, lines: int = 30) -> str:
        """The end of its log, under a heading."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return f"--- {self.name} ({self.log}):\n" + "\n".join(text.splitlines()[-lines:])


_given: set[int] = set()
"""Ports whose servers may not listen yet."""


def free_port() -> int:
    """A loopback TCP port that nobody listens on.

    Below the range from which the kernel takes ports for outgoing connections (32768 and up by default): so nobody
    gets it while the server that owns it is stopped for a test.
    """
    for port in random.sample([port for port in range(20000, 32000) if port not in _given], 200):
        with socket.socket() as probe:
            # As Go's listeners do: connections of a former server in TIME_WAIT are no hindrance.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            _given.add(port)
            return port
    raise RuntimeError("no free port between 20000 and 32000 on 127.0.0.1")
