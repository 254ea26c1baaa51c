"""Measure the cost of questions to pods: ADD while `multusctl` asks, against ADD without.

    python -m bench.asking [--quick] [--block 1000] [--record FOLDER]

One daemon, with 8 pods that stay. 1 and 16 workers attach and delete pods of the cluster network only, one after the
other, for `--block` milliseconds in each turn: once without questions, once while a command begins each second, each of
COMMANDS in its turn. A quotient is of the medians of a round. The commands run on this machine, too: what they take of
its processors is in the figures, as on a node. Then: how long each command takes meanwhile. Without an API server.
Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from bench import sides, stats
from bench.harness import Bench
from bench.sides import START, Daemon
from bench.stats import Figure
from tests.e2e.node import Node

AT_ONCE: Final = (1, 16)
KEPT: Final = 8
"""Pods that stay: what the commands have to show."""
PERIOD: Final = 1.0
"""Seconds between the beginnings of two commands."""
COMMANDS: Final = (
    "status",
    "attachments",
    "attachments --check",
    "attachments --leaks",
    "explain default/pod0-0",
    "trace",
    "plugins",
    "doctor",
)
TURNS: Final = ("quiet", "asked")


def main() -> None:
    """Measure, print, and judge."""
    bench = Bench("asking", __doc__, seconds=300, block=1000)
    with Node(settings={"logLevel": "error"}) as node:
        ours = Daemon(node, "ours")
        ours.declare(workers=max(AT_ONCE) + KEPT)
        node.start(timeout=START)
        for number in range(KEPT):
            sides.checked(ours, "ADD", f"kept{number}", 0, max(AT_ONCE) + number)
        asker = Asker(node)
        for place, at_once in enumerate(AT_ONCE, 1):
            measure(bench, ours, asker, at_once, place / len(AT_ONCE))
        for command, seconds in asker.took.items():
            bench.add(f"answer {command}", stats.median(seconds, "s"))
    bench.end()


class Asker:
    """Somebody who asks all the time; goes on with the next command where it has stopped."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._next = 0
        self.took: dict[str, list[float]] = defaultdict(list)
        """Seconds from exec to exit, by command."""

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Ask meanwhile. Raises FailedError where a command gave no answer."""
        is_over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self._ask, is_over)
            try:
                yield
            finally:
                is_over.set()
            asked.result()

    def _ask(self, is_over: threading.Event) -> None:
        while not is_over.is_set():
            words = COMMANDS[self._next % len(COMMANDS)]
            self._next += 1
            command = [
                sys.executable,
                "-m",
                "multus_tools.ctl",
                *words.split(),
                "--config",
                str(self._node.config),
            ]
            begun = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            took = time.perf_counter() - begun
            if not done.stdout:
                raise sides.FailedError(f"multusctl {words}: {done.stderr}")
            self.took[words].append(took)
            is_over.wait(PERIOD - took)


def measure(bench: Bench, ours: Daemon, asker: Asker, at_once: int, share: float) -> None:
    """Rounds of both turns until the bench has spent `share` of its time; at least two."""
    seconds = bench.number("block", 500) / 1000
    times: dict[str, list[float]] = defaultdict(list)
    medians: dict[str, list[float]] = defaultdict(list)
    number = 0
    while number < 2 or (bench.has_time(share) and not bench.quick):
        for turn in sides.in_turn(TURNS, number):
            with asker.asking() if turn == "asked" else contextlib.nullcontext():
                taken = block(ours, at_once, seconds, f"{os.getpid()}-{at_once}-{number}-{turn}")
            times[turn] += taken
            medians[turn].append(statistics.median(taken))
        number += 1
    where = f"ADD {at_once} at a time"
    for turn in TURNS:
        bench.add(f"{where} {turn}", stats.median(times[turn], "ms"))
        bench.add(f"{where} p99 {turn}", Figure.exact(stats.percentile(times[turn], 99), "ms", len(times[turn])))
    bench.add(f"{where} asked/quiet", stats.ratio(medians["asked"], medians["quiet"]))


def block(ours: Daemon, at_once: int, seconds: float, mark: str) -> list[float]:
    """Milliseconds of each ADD, of workers that attach and delete pods until the time is over."""
    begun = time.perf_counter()

    def work(worker: int) -> list[float]:
        taken: list[float] = []
        while not taken or time.perf_counter() - begun < seconds:
            container = f"a{mark}-{worker}-{len(taken)}"
            taken.append(sides.checked(ours, "ADD", container, 0, worker).seconds * 1000)
            sides.checked(ours, "DEL", container, 0, worker)
        return taken

    with ThreadPoolExecutor(at_once) as pool:
        return [one for done in pool.map(work, range(at_once)) for one in done]


if __name__ == "__main__":
    main()
