"""Ten thousand pods, one after the other, four at a time: the daemon's memory, descriptors and threads stay flat.

    python -m tests.soak.steady [--pairs 10000] [--at-once 4]

Prints its figures each tenth of the way, then the slope of a line through those after the first tenth. Exit status 1
where memory grows by more than 2 MiB over that line, or descriptors or threads do, or anything is left.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.conftest import REFERENCE
from tests.e2e.node import Node
from tests.soak.churn import Outcome, end_in_good_order, report, settings
from tests.soak.load import Kind, Load, mixed
from tests.soak.remains import Remains

GROWTH_MAX = 2 * 1024
"""KiB, over the line that fits from the first tenth to the end."""
SAMPLES = 100
_KIB = 1024


@dataclass(frozen=True)
class Sample:
    """Holds the daemon's resources after a number of pairs."""

    pairs: int
    rss: int
    """KiB."""
    pss: int
    """KiB: like RSS, but a shared page counts in part."""
    anonymous: int
    """KiB."""
    descriptors: int
    threads: int

    def __str__(self) -> str:
        return (
            f"{self.pairs:6} pairs  RSS {self.rss / _KIB:6.1f} MiB  PSS {self.pss / _KIB:6.1f} MiB  "
            f"anonymous {self.anonymous / _KIB:6.1f} MiB  {self.descriptors:3} descriptors  {self.threads:3} threads"
        )


def sample(pid: int, pairs: int) -> Sample:
    """Look at a process now."""
    proc = Path(f"/proc/{pid}")
    rollup = (proc / "smaps_rollup").read_text()

    def kib(name: str, text: str = rollup) -> int:
        found = re.search(rf"(?m)^{name}:\s+(\d+)", text)
        assert found, f"no {name} in\n{text}"
        return int(found[1])

    threads = kib("Threads", (proc / "status").read_text())
    return Sample(pairs, kib("Rss"), kib("Pss"), kib("Anonymous"), len(list((proc / "fd").iterdir())), threads)


def slope(samples: list[Sample], value: Callable[[Sample], int]) -> float:
    """Return the growth of the value with each pair, as the slope of the line that fits best."""
    return statistics.linear_regression([item.pairs for item in samples], [value(item) for item in samples]).slope


def growth(samples: list[Sample]) -> list[str]:
    """List each value that grows, one line for each."""
    over = samples[-1].pairs - samples[0].pairs
    wrong = []
    for name, value, most in (
        ("anonymous memory, KiB", _anonymous, GROWTH_MAX),
        ("descriptors", _descriptors, 3),
        ("threads", _threads, 3),
    ):
        grown = slope(samples, value) * over
        if grown > most:
            wrong.append(f"{name}: grows by {grown:.1f} over {over} pairs")
    return wrong


def _anonymous(item: Sample) -> int:
    return item.anonymous


def _descriptors(item: Sample) -> int:
    return item.descriptors


def _threads(item: Sample) -> int:
    return item.threads


def run(node: Node, pairs: int, at_once: int = 4, show: Callable[[str], None] = print) -> Outcome:
    """The run, on a node that has `churn.settings` and is not started."""
    chosen: list[Kind] = mixed(
        node,
        REFERENCE,
        lambda name, config: node.network(name, config, "kube-system" if name == "cluster" else "default"),
    )
    # Of one interface, of two, and one in ten with binaries, which take fifty times as long.
    plain, lans, more, ports = chosen
    load = Load(node, [plain, more, plain, plain, more, lans, plain, more, plain, ports], at_once)
    node.start()
    load.warm_up()
    remains = Remains(node)
    assert node.daemon is not None
    pid = node.daemon.pid
    samples: list[Sample] = []
    step = max(1, pairs // SAMPLES)
    began = time.monotonic()
    for number in range(step, pairs + 1, step):
        load.run(step)
        load.drop_kept()
        # What is being done now counts too: all of it has ended here.
        samples.append(sample(pid, number))
        if number % (10 * step) == 0:
            show(str(samples[-1]))
    seconds = time.monotonic() - began
    left = remains.settled(seconds=30)
    if load.counts["ADD failed"]:
        left.append(f"{load.counts['ADD failed']} ADDs failed: {load.summary()}")
    rest = samples[len(samples) // 10 :]
    per_thousand = slope(rest, _anonymous) * 1000
    text = (
        f"{seconds:.0f} s, {pairs / seconds:.1f} pairs a second, load {os.getloadavg()[0]:.1f}; slope of anonymous "
        f"memory {per_thousand:+.1f} KiB, of descriptors {slope(rest, _descriptors) * 1000:+.2f}, of threads "
        f"{slope(rest, _threads) * 1000:+.2f} for a thousand pairs"
    )
    return Outcome(text, [*load.wrong, *growth(rest), *left])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.steady", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--keep-logs", type=Path, help="copy the daemon's log to this directory")
    given = parser.parse_args()
    end_in_good_order()
    with Node(settings=settings("prefer")) as node:
        outcome = run(node, given.pairs, given.at_once)
        if given.keep_logs:
            shutil.copy(node.log, given.keep_logs / "steady.log")
    return report("steady", outcome)


if __name__ == "__main__":
    sys.exit(main())
