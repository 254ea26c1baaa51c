"""Find the processes that a plugin has started, and end those that a killed daemon left running.

Each process that a daemon starts has a mark of the daemon and the call in its environment. If its daemon is killed, it
may attach a network after the runtime was told that the ADD failed, and even after the DEL. So a new daemon ends such
processes before it serves. A DEL that still runs may continue: it removes what the next DEL may not find.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import signal
import time
from typing import Final

from multus_daemon import deadlines

log = logging.getLogger(__name__)

VARIABLE: Final = "MULTUS_DAEMON"
_OF_CALL_MAX: Final = 256
_OUTPUTS: Final = (1, 2)
_REMOVING: Final = frozenset({b"CNI_COMMAND=DEL", b"CNI_COMMAND=GC"})


@functools.cache
def mark() -> str:
    """Return the mark of this daemon, unique since the boot: its process id, start time and PID namespace.

    In the environment of a child, `-` and the number of the call follow. See proc_pid_stat(5) and pid_namespaces(7):
    nodes that are containers have numbers of their own.
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return f"{os.getpid()}-{_started('self')}-{namespace}"


def end() -> int:
    """Kill the processes that killed daemons have left, wait for their end, and return how many they were. Blocks.

    A DEL or GC may continue, and a process that detached itself properly. Does nothing if /proc cannot be read.
    """
    pidfds: list[int] = []
    try:
        for pid in filter(_is_stray, _numbers()):
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(pid)
                pidfds.append(pidfd)
                # Another process may have got the number in between.
                if _is_stray(pid):
                    log.warning("ending process %d, which a killed daemon has left running: %s", pid, _command(pid))
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        _wait(pidfds)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)
    return len(pidfds)


def _numbers() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return []


def _is_stray(pid: int) -> bool:
    environ = _environ(pid)
    if not _REMOVING.isdisjoint(environ):
        return False
    try:
        number, started, namespace = _mark_in(environ).split("-")[:3]
        if namespace != mark().rpartition("-")[2] or _started(str(int(number))) == started:
            return False
        outputs = [os.readlink(f"/proc/{pid}/fd/{output}") for output in _OUTPUTS]
    except (OSError, ValueError):
        return False
    return any(output.startswith("pipe:") for output in outputs)


def of_call(mark: str, pid: int) -> list[int]:
    """Return pidfds of the processes that the process `pid` has started, in any session. Blocks.

    These are its descendants, and the processes with the same mark (their parents may have ended) and their
    descendants. Not found: a process whose parents have ended and that cleared its environment.
    """
    parents = {number: parent_and_session(number)[0] for number in _numbers() if number != pid}
    known = {pid, *(number for number in parents if _mark_in(_environ(number)) == mark)}
    while more := {number for number, parent in parents.items() if parent in known} - known:
        known |= more
    found: list[int] = []
    for number in sorted(known - {pid})[:_OF_CALL_MAX]:
        with contextlib.suppress(OSError):
            found.append(os.pidfd_open(number))
            # Another process may have got the number in between.
            if _mark_in(_environ(number)) != mark and parent_and_session(number)[0] not in known:
                os.close(found.pop())
    return found


def is_marked(pid: int) -> bool:
    """Return True if the process has the mark of this daemon; False also if it has ended or cannot be read."""
    return f"{_mark_in(_environ(pid))}-".startswith(f"{mark()}-")


def _mark_in(environ: list[bytes]) -> str:
    prefix = f"{VARIABLE}=".encode()
    found = next((item for item in environ if item.startswith(prefix)), b"")
    return found.removeprefix(prefix).decode("ascii", "replace")


def _environ(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def parent_and_session(pid: int) -> tuple[int, int]:
    """Return the ids of the process' parent and of its session; zeros if it does not exist."""
    fields = _stat(str(pid))
    return (int(fields[1]), int(fields[3])) if fields else (0, 0)


def _started(pid: str) -> str:
    """Return the start time of a process in the kernel's clock ticks; empty if it does not exist or has ended."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] not in "ZX" else ""


def _stat(pid: str) -> list[str]:
    """Return the fields of proc_pid_stat(5) after the name: state, parent, group, session, ...; none if it ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name, in parentheses, may hold anything.
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _command(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read(200).replace(b"\0", b" ").decode(errors="replace").strip()


def _wait(pidfds: list[int]) -> None:
    until = time.monotonic() + deadlines.KILLED_SECONDS
    left = list(pidfds)
    while left and (seconds := until - time.monotonic()) > 0:
        ended, _, _ = select.select(left, [], [], seconds)
        left = [pidfd for pidfd in left if pidfd not in ended]
    if left:
        log.error(
            "%d processes that a killed daemon has left do not end after SIGKILL: they hang in the kernel", len(left)
        )
