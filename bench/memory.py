"""Anonymous memory of the daemon: idle, at most in a burst, and after many pods, with an API server.

    python -m bench.memory [--quick] [--pods 10000] [--record FOLDER]

Anonymous memory of a control group that holds the daemon and the plugin processes that it starts: what counts against
the memory limit of its pod and cannot be taken back. Idle: 3 s after the start. Burst: 64 pods with 4 networks each,
all at once. Then `--pods` pods with their cluster network, 16 at a time, each of them made in the API server, attached,
deleted, and removed from the API server. First ours, then the peer (see bench.peer). Needs root, iproute2 and
a memory control group.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from bench import cluster as clusters
from bench import sides, verdict
from bench.burst import Cell, block
from bench.cluster import Cluster, Implementation, Peer
from bench.harness import Bench
from bench.sides import START, Daemon
from bench.stats import Figure
from tests.e2e.memory_group import MemoryGroup, NoMemoryGroupError

MIB = 1 << 20
LIMIT = 8 << 30
"""Bytes; high enough that no bench reaches it."""
AT_ONCE = 64
WORKERS = 16


def main() -> None:
    """Measure, print, and judge."""
    bench = Bench("memory", __doc__, seconds=2400, pods=10_000)
    sides.require_reference()
    program = clusters.implementation()
    everyone: list[Implementation | None] = [None] if program is None else [None, program]
    if program is not None:
        bench.versions["peer"] = program.version
    with clusters.started((4,), AT_ONCE) as cluster:
        for number, one in enumerate(everyone, 1):
            try:
                with MemoryGroup(LIMIT) as group:
                    measure(bench, cluster, one, group, number / len(everyone))
            except NoMemoryGroupError as error:
                verdict.skip(str(error))
    bench.end()


def measure(bench: Bench, cluster: Cluster, program: Implementation | None, group: MemoryGroup, share: float) -> None:
    """One side, in its control group."""
    side: Daemon | Peer
    if program is None:
        side = cluster.ours("ours", group=group)
        side.node.start(timeout=START)
        stop = side.node.kill
    else:
        side = cluster.peer(program, wrapper=group.wrapper)
        stop = side.stop
        side.start()
    try:
        time.sleep(3)
        bench.add(f"idle {side.name}", Figure.exact(group.anonymous() / MIB, "MiB"))
        with most(group.anonymous) as seen:
            block(side, 4, 4 if bench.quick else AT_ONCE, 0, Cell(), "burst")
        bench.add(f"burst {side.name}", Figure.exact(max(seen) / MIB, "MiB", AT_ONCE))
        done = come_and_go(bench, cluster, side, share)
        time.sleep(3)
        bench.add(f"after pods {side.name}", Figure.exact(group.anonymous() / MIB, "MiB", done))
    finally:
        stop()


@contextlib.contextmanager
def most(anonymous: Callable[[], int]) -> Iterator[list[int]]:
    """Sample a group's anonymous memory every 20 ms while the block runs."""
    seen = [anonymous()]
    ending = threading.Event()

    def watch() -> None:
        while not ending.wait(0.02):
            seen.append(anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        ending.set()
        thread.join()


def come_and_go(bench: Bench, cluster: Cluster, side: Daemon | Peer, share: float) -> int:
    """Pods of their own, one after the other in each worker; how many there were."""
    wanted = bench.number("pods", 48)
    numbers = itertools.count()

    def work(worker: int) -> int:
        done = 0
        while (number := next(numbers)) < wanted and bench.has_time(share):
            name = f"pod0-{10_000 + number}"
            cluster.pod(side.name, name, 0)
            for verb in ("ADD", "DEL"):
                sides.checked(side, verb, f"m{number}", 0, worker, pod=name)
            cluster.server.delete_pod(name, side.name)
            done += 1
        return done

    with ThreadPoolExecutor(WORKERS) as pool:
        return sum(pool.map(work, range(WORKERS)))


if __name__ == "__main__":
    main()
