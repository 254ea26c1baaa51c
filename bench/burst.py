"""Pods that come and go at the same time: 1, 4, 16 and 64 at a time, with 0, 1, 4 and 16 networks.

    python -m bench.burst [--quick] [--block 2000] [--record FOLDER]

As many workers as pods at a time; each attaches, checks and deletes one pod after the other for `--block`
milliseconds. Sides take turns in blocks: `ours`, `binaries`, `bare` (the reference plugins started directly, one
call for each network), and `peer` (see bench.peer) where it is there. With a peer everything runs with an API server,
else without. For each cell: pods a second (of the median block), and median and 99th percentile of ADD.
An ADD that fails is counted, and does not end the bench. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from bench import cluster as clusters
from bench import sides, stats
from bench.harness import Bench
from bench.sides import START, Bare, Daemon, Side, Size
from bench.stats import Figure
from tests.e2e.node import Node

SIZES: tuple[Size, ...] = (0, 1, 4, 16)
AT_ONCE = (1, 4, 16, 64)
BLOCKS = 4
"""Blocks of each side in a cell, in turns."""
LARGE = 100
"""Networks of all pods at a time; with more there is one block only."""


@dataclass
class Cell:
    """Measurements of one side in one cell."""

    pods: int = 0
    failed: int = 0
    times: list[float] = field(default_factory=list)
    """Milliseconds of each ADD that succeeded."""
    paces: list[float] = field(default_factory=list)
    """Seconds for a pod, of each block."""


def main() -> None:
    """Measure, print, and judge."""
    bench = Bench("burst", __doc__, seconds=1500, block=2000)
    sides.require_reference()
    bench.versions["bare"] = sides.reference_version()
    with contextlib.ExitStack() as stack:
        everyone = everybody(bench, stack)
        for side in everyone:
            for size in SIZES:
                block(side, size, 2, 0, Cell(), "warm")
        first: list[tuple[Size, int]] = [(0, 16)]  # The cell that has an aim, whatever time there is.
        grid = first + [(size, count) for size in SIZES for count in AT_ONCE if (size, count) not in first]
        for size, at_once in grid:
            if not bench.has_time():
                print(f"no time for {at_once} pods with {size} networks at a time")
                continue
            if bench.quick and (size not in (0, 4) or at_once not in (1, 16)):
                continue
            report(bench, size, at_once, cell(bench, everyone, size, at_once))
    bench.end()


def everybody(bench: Bench, stack: contextlib.ExitStack) -> list[Side]:
    """Sides that are started."""
    bare = Bare(stack.enter_context(Node()))
    program = clusters.implementation()
    if program is None:
        nodes = {name: stack.enter_context(Node(settings={"logLevel": "error"})) for name in ("ours", "binaries")}
        alone = [Daemon(node, name, binaries=name == "binaries") for name, node in nodes.items()]
        for side in alone:
            side.declare(max(AT_ONCE), SIZES)
            side.node.start(timeout=START)
        return [*alone, bare]
    bench.versions["peer"] = program.version
    cluster = stack.enter_context(clusters.started(SIZES, max(AT_ONCE)))
    ours = [cluster.ours("ours"), cluster.ours("binaries", binaries=True)]
    for side in ours:
        side.node.start(timeout=START)
    peer = cluster.peer(program)
    stack.callback(peer.stop)
    peer.start()
    return [*ours, bare, peer]


def cell(bench: Bench, everyone: Sequence[Side], size: Size, at_once: int) -> dict[str, Cell]:
    """Blocks in turns; one of each side where a single round of pods takes longer than all blocks should."""
    found: dict[str, Cell] = {side.name: Cell() for side in everyone}
    blocks = 1 if bench.quick or (int(size) + 1) * at_once > LARGE else BLOCKS
    seconds = bench.number("block", 500) / 1000
    for number in range(blocks):
        for side in sides.in_turn(list(everyone), number):
            block(side, size, at_once, seconds, found[side.name], f"{os.getpid()}-{size}-{at_once}-{number}")
    return found


def block(side: Side, size: Size, at_once: int, seconds: float, into: Cell, mark: str) -> None:
    """Each worker attaches and deletes pods until the time is over; at least one each."""
    lock = threading.Lock()
    begun = time.perf_counter()
    pods_before = into.pods

    def work(worker: int) -> None:
        number = 0
        while not number or time.perf_counter() - begun < seconds:
            container = f"b{mark}-{worker}-{number}"
            number += 1
            added = side.call("ADD", container, size, worker)
            runs = (
                {"ADD": added} if added.code else {"ADD": added, "CHECK": side.call("CHECK", container, size, worker)}
            )
            runs["DEL"] = side.call("DEL", container, size, worker)
            failed = any(done.code for done in runs.values())
            with lock:
                into.pods += not failed
                into.failed += failed
                if not added.code:
                    into.times.append(added.seconds * 1000)

    with ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(work, worker) for worker in range(at_once)]:
            done.result()
    took = time.perf_counter() - begun
    if into.pods > pods_before:
        into.paces.append(took / (into.pods - pods_before))


def report(bench: Bench, size: Size, at_once: int, cells: dict[str, Cell]) -> None:
    """A cell's figures."""
    where = f"{size} networks {at_once} at a time"
    for name, found in cells.items():
        if found.failed:
            bench.add(f"failed {where} {name}", Figure.exact(found.failed, "pods", found.failed + found.pods))
        if not found.pods:
            continue
        # The median of the blocks: now and then the kernel keeps everybody waiting for a second.
        bench.add(f"pods {where} {name}", stats.median([1 / pace for pace in found.paces], "pods/s"))
        values = found.times
        bench.add(f"ADD {where} {name}", Figure.exact(statistics.median(values), "ms", len(values)))
        bench.add(f"ADD p99 {where} {name}", Figure.exact(stats.percentile(values, 99), "ms", len(values)))
    if "peer" in cells and len(cells["ours"].paces) == len(cells["peer"].paces) > 0:
        bench.add(f"time per pod {where} ours/peer", stats.ratio(cells["ours"].paces, cells["peer"].paces))


if __name__ == "__main__":
    main()
