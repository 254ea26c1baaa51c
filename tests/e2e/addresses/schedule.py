"""Pods come and go on three nodes while everything that may happen to a cluster does, by a seed.

    python -m tests.e2e.addresses.schedule builtin [--seeds 1 2 3] [--seconds 45]

Exit status 1, with a line for each thing that is wrong. As root; `make e2e` builds the programs.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tests.e2e.addresses.checker import Excuse
from tests.e2e.addresses.fleet import NODES, Fleet, Machine, Pod, Subject, subjects
from tests.e2e.addresses.kernels import API
from tests.e2e.addresses.rows import Outcome, Row
from tests.e2e.kube_client import ApiError
from tests.soak.remains import processes

WORKERS: Final = 6
ORDINALS: Final = 3
"""Pods of a StatefulSet: each is made anew under its name, on any node."""


class Schedule:
    """One run."""

    def __init__(self, row: Row, seconds: float) -> None:
        self.row, self.fleet = row, row.fleet
        self.end = time.monotonic() + seconds
        self.random = random.Random(row.seed)
        self.struck: Counter[str] = Counter()
        self._may_be_restored = True
        self._snapshot: Path | None = None

    # --- pods ------------------------------------------------------------------------------------------------------

    def work(self, worker: int) -> None:
        """Start pods on one node and end them, again and again."""
        choice = random.Random(self.row.seed * 1000 + worker)
        index = worker % len(self.fleet.machines)
        while time.monotonic() < self.end:
            if self.fleet.machines[index].cut_at is not None:
                time.sleep(0.3)
                continue
            try:
                self._one(index, choice, worker)
            except (ApiError, OSError, http.client.HTTPException):
                # The API server is away.
                time.sleep(0.3)

    def _one(self, index: int, choice: random.Random, worker: int) -> None:
        name = ""
        if worker < ORDINALS and choice.random() < 0.5:
            name, index = f"{self.row.name}-web-{worker}", choice.randrange(len(self.fleet.machines))
            self.fleet.server.delete_pod(name)
        pod = self.row.start(index, name)
        self.row.count("ADDs")
        if pod.error:
            self.row.count("failed ADDs")
            self.fleet.server.delete_pod(pod.name)
            return
        time.sleep(choice.uniform(0.2, 5))
        if choice.random() < 0.3:
            # Deleted by force: its container lives a little longer.
            self._delete(pod)
            time.sleep(choice.uniform(0, 3))
        self.fleet.stop(pod)
        self._delete(pod)

    def _delete(self, pod: Pod) -> None:
        """Delete its object, not one that was made anew under its name."""
        with contextlib.suppress(ApiError, OSError):
            found = self.fleet.server.get("v1", "Pod", pod.name)
            if found["metadata"]["uid"] == pod.uid:
                self.fleet.server.delete_pod(pod.name)

    # --- faults ----------------------------------------------------------------------------------------------------

    def strike(self) -> None:
        """Strike every few seconds, in one way after the other."""
        ways: dict[str, Callable[[Machine], None]] = {
            "kill": self._kill, "freeze": self._freeze, "cut": self._cut, "api away": self._api_away,
            "by hand": self._by_hand, "records lost": self._records_lost, "made anew": self._made_anew,
            "dead": self._dead, "restore": self._restore,
        }  # fmt: skip
        while time.monotonic() < self.end - 8:
            time.sleep(self.random.uniform(0.5, 3))
            name = self.random.choice(list(ways))
            machine = self.random.choice(self.fleet.machines)
            with self._excused(machine):
                ways[name](machine)
            self.struck[name] += 1

    @contextlib.contextmanager
    def _excused(self, machine: Machine) -> Iterator[None]:
        """The node's daemon can't do anything in this block."""
        begin = time.monotonic()
        yield
        self.fleet.done.excuses.append(Excuse(begin, time.monotonic(), machine.name))

    def _kill(self, machine: Machine) -> None:
        machine.node.kill()
        if self.random.random() < 0.5:
            for line in processes(machine.node):
                if "multus-shim" not in line and "control" not in line:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(line.partition(":")[0]), signal.SIGKILL)
        machine.node.start(timeout=90, ready=False)

    def _freeze(self, machine: Machine) -> None:
        assert machine.node.daemon
        machine.node.daemon.send_signal(signal.SIGSTOP)
        time.sleep(self.random.uniform(0.3, 3))
        machine.node.daemon.send_signal(signal.SIGCONT)

    def _cut(self, machine: Machine) -> None:
        """Cut it off; half the time its pods are evicted, and some come back elsewhere under their names."""
        machine.cut()
        if self.random.random() < 0.5:
            for pod in [pod for pod in list(self.fleet.pods.values()) if self.fleet.machines[pod.index] is machine]:
                self._delete(pod)
        time.sleep(self.random.uniform(2, 8))
        machine.mend()

    def _api_away(self, _: Machine) -> None:
        if self.random.random() < 0.5:
            begin = time.monotonic()
            self.fleet.server.pause()
            time.sleep(self.random.uniform(0.5, 3))
            self.fleet.server.resume()
            self.fleet.done.excuses.append(Excuse(begin, time.monotonic()))
        else:
            with self.fleet.api_away():
                time.sleep(self.random.uniform(0.2, 3))

    def _by_hand(self, _: Machine) -> None:
        """Delete some reservations, or all that the API server has of the range."""
        items = self.fleet.server.client.get(f"{API}/overlappingrangeipreservations")["items"]
        for item in items:
            if self.random.random() < 0.5:
                metadata = item["metadata"]
                path = f"{API}/namespaces/{metadata['namespace']}/overlappingrangeipreservations/{metadata['name']}"
                with contextlib.suppress(ApiError):
                    self.fleet.server.client.request("DELETE", path)

    def _records_lost(self, machine: Machine) -> None:
        machine.node.kill()
        shutil.rmtree(machine.node.cni_dir, ignore_errors=True)
        machine.node.start(timeout=90, ready=False)

    def _made_anew(self, machine: Machine) -> None:
        self.fleet.server.delete("v1", "Node", machine.name)
        self.fleet.server.create_node(machine.name)

    def _dead(self, machine: Machine) -> None:
        """Its power is off, somebody says so, and it comes back after some seconds."""
        machine.cut()
        machine.node.kill()
        for pod in [pod for pod in list(self.fleet.pods.values()) if self.fleet.machines[pod.index] is machine]:
            self.fleet.lose(pod)
            self._delete(pod)
        time.sleep(0.3)
        index = self.fleet.machines.index(machine)
        self.fleet.fence(index, self.random.choice(("delete", "taint")))
        time.sleep(self.random.uniform(1, 4))
        self.fleet.unfence(index)
        machine.mend()
        machine.node.start(timeout=90, ready=False)

    def _restore(self, _: Machine) -> None:
        """The first time, look; the second time, restore what there was then; not a third time."""
        if self._snapshot is None and self._may_be_restored:
            self._snapshot = self.fleet.snapshot()
        elif self._snapshot is not None:
            self.fleet.restore(self._snapshot)
            shutil.rmtree(self._snapshot)
            self._snapshot, self._may_be_restored = None, False


def run(fleet: Fleet, seed: int, number: int, seconds: float = 45.0) -> Outcome:
    """One seed; `number`: of its network."""
    begin = time.monotonic()
    row = Row(fleet, number, seed)
    row.lan("0/26")
    schedule = Schedule(row, seconds)
    with ThreadPoolExecutor(WORKERS + 1) as pool:
        futures = [pool.submit(schedule.strike), *(pool.submit(schedule.work, worker) for worker in range(WORKERS))]
        for future in futures:
            future.result()
    for item in fleet.server.client.get("/api/v1/namespaces/default/pods")["items"]:
        if not any(pod.name == item["metadata"]["name"] for pod in fleet.pods.values()):
            fleet.server.delete_pod(item["metadata"]["name"])
    row.settle()
    struck = {f"struck: {name}": number for name, number in sorted(schedule.struck.items())}
    return Outcome(f"seed {seed}", row.verdict(), row.counted | struck, time.monotonic() - begin)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.addresses.schedule")
    parser.add_argument("subject", choices=(*Subject, "mixed"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=45.0)
    given = parser.parse_args(arguments)
    wrong = 0
    for seed in given.seeds:
        clocks = clocks_of(seed)
        with Fleet(*subjects(given.subject), clocks=clocks) as fleet:
            # Of several at once on a machine, each has its own addresses: a node asks all kernels that it sees.
            outcome = run(fleet, seed, 100 + seed % 100, given.seconds)
        print(f"{given.subject} {outcome}; clocks {clocks}", flush=True)
        for fault in outcome.faults[:20]:
            print(f"  {fault}", flush=True)
        wrong += len(outcome.faults)
    return 1 if wrong else 0


def clocks_of(seed: int) -> list[float]:
    """By how many seconds the clocks of the nodes are wrong."""
    choice = random.Random(seed)
    return [choice.choice((0.0, 5.0, -5.0)) * 3600 for _ in range(NODES)]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
