"""`python dying_daemon.py`: starts daemons that die at a step of their work with files, and note what they did.

A line of JSON on standard input (`Start`) starts one, in a fork of this process, which has imported the program
already; its process id is the answer. `wait` waits for its end.

What it is to die at stands in a file (`Order`), which it reads before each operation: so one that has done a verb can
be told to die in the next. With SIGKILL; at a write, half of it is done before.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec

# As a program this has no `tests` to import from.
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests import power

T = TypeVar("T")


class Start(msgspec.Struct, frozen=True):
    """A daemon to be started."""

    arguments: list[str]
    root: str
    """The directory on the disk."""
    elsewhere: list[str]
    """Directories whose changes are steps too, on a disk that loses nothing."""
    order: str
    """The file with its order."""
    journal: str
    """Where it puts a `Journal` before it dies, and after each step."""
    syncs: bool = True


class Order(msgspec.Struct, frozen=True):
    """Instructions for a daemon from now on."""

    number: int
    """Tells it from the one before."""
    dies_at: int = 0
    """The step, from 1, counted from here; 0: at none."""
    settles: bool = False
    """True if the changes made so far survive a power failure."""


class Journal(msgspec.Struct, frozen=True):
    """Record of the operations of a daemon on the disk."""

    initial: dict[str, bytes]
    operations: list[power.Operation]

    @property
    def disk(self) -> power.Disk:
        """Return the disk after these operations."""
        return power.Disk(self.initial, self.operations)


class DyingRecorder(power.Recorder):
    """Obeys the order of the moment."""

    def __init__(self, start: Start) -> None:
        super().__init__(Path(start.root), elsewhere=[Path(path) for path in start.elsewhere], syncs=start.syncs)
        self._order_file = Path(start.order)
        self._journal = Path(start.journal)
        self._order = Order(0)
        self._steps = 0
        # Nothing is done by another thread between an operation and its note.
        self._guard = threading.RLock()

    def act(self, operation: power.Operation, do: Callable[[power.Operation], T]) -> T:
        """Do the operation, or die."""
        with self._guard:
            order = msgspec.json.decode(self._order_file.read_bytes(), type=Order)
            if order.number != self._order.number:
                self._order, self._steps = order, 0
                if order.settles:
                    self._settle_before(operation)
            self._steps += 1
            if self._steps == self._order.dies_at:
                if operation.kind == power.WRITE:
                    super().act(replace(operation, data=operation.data[: len(operation.data) // 2]), do)
                self._tell()
                os.kill(os.getpid(), signal.SIGKILL)
            result = super().act(operation, do)
            self._tell()
            return result

    def _settle_before(self, operation: power.Operation) -> None:
        assert operation.kind in (power.CREATE, power.ELSEWHERE), operation
        self.settle()

    def _tell(self) -> None:
        self._journal.write_bytes(msgspec.json.encode(Journal(dict(self.initial), self.operations)))


def _run(start: Start) -> None:
    """Be the daemon. Does not return."""
    from multus_daemon import cli

    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    with DyingRecorder(start):
        cli.main(start.arguments)


def _main() -> None:
    # Whatever a daemon imports later it finds imported: starting one takes a third of the time.
    plugins = ("plugins.builtin.ptp", "plugins.builtin.host_local")
    for name in ("cli", "daemon", "cluster.standalone.store", *plugins):
        importlib.import_module(f"multus_daemon.{name}")
    pid = 0
    for line in sys.stdin:
        if line == "wait\n":
            _, status = os.waitpid(pid, 0)
            pid = 0
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if not pid:
            _run(msgspec.json.decode(line, type=Start))
            sys.exit(1)
        print(pid, flush=True)
    # The tests are gone.
    if pid:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _main()
