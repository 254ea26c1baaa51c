"""Scrapes of a node full of pods: their time, and what ten a second cost an ADD.

    python -m bench.scrape [--pods 250] [--networks 100] [--block 500] [--rounds 40]

Each pod has one of the networks beside its cluster network, all ptp with host-local. A scrape reads OpenMetrics over
the port by a new connection, long enough after the one before that the daemon reads all counters: the time that the
client waits, and the processor time of the daemon. Then blocks of `--block` milliseconds in which one worker attaches
and deletes pods of the cluster network only, with ten scrapes a second and without; a quotient is of the medians, or of
the means, of a round. The scraping client shares the machine's processors. With BENCH_BASE, that checkout's daemon
takes turns with ours. Without an API server. Needs root and iproute2. Exit status 3 if a scrape is over its budget.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from bench import harness, sides, stats, verdict
from bench.sides import START, Daemon
from bench.stats import Figure
from multus_daemon import deadlines
from tests.e2e.node import Node

PORT: Final = 9900
SCRAPES: Final = 10
"""For each second."""
BUDGET_MS: Final = 40.0
"""Budget of a scrape."""
CLIENT: Final = f"""
import json, socket, sys, time
fields = ["Host: node", "Accept: application/openmetrics-text", "Connection: close", "", ""]
head = "\\r\\n".join(["GET /metrics HTTP/1.1", *fields]).encode()
for line in sys.stdin:
    number, period = json.loads(line)
    took = []
    for _ in range(number):
        begun = time.perf_counter()
        parts = []
        with socket.create_connection(("127.0.0.1", {PORT}), timeout=20) as connection:
            connection.sendall(head)
            while part := connection.recv(1 << 20):
                parts.append(part)
        took.append((time.perf_counter() - begun) * 1000)
        answer = b"".join(parts)
        assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"# EOF\\n"), answer[:200]
        time.sleep(max(0.0, begun + period - time.perf_counter()))
    print(json.dumps([took, answer.partition(b"\\r\\n\\r\\n")[2].count(b"\\n")]), flush=True)
"""
"""Not http.client: its own work would be a tenth of what the client waits."""


def main() -> None:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=250)
    parser.add_argument("--networks", type=int, default=100)
    parser.add_argument("--block", type=int, default=500, help="milliseconds")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    verdict.require_node()
    harness.isolate("scrape")
    checkouts: dict[str, Path | None] = {"ours": None}
    if (checkout := sides.base_checkout()) is not None:
        checkouts["base"] = checkout
    with contextlib.ExitStack() as stack:
        everyone = [stack.enter_context(full_node(options, *item)) for item in checkouts.items()]
        found = measure(options, everyone)
    for key, figure in found.items():
        print(f"{key:48}{figure.value:10.2f} {figure.unit:4} {figure.low:9.2f} to {figure.high:.2f}  n={figure.n}")
    verdict.end(verdict.Result(f"a scrape of {options.pods} pods", found["scrape ours"].value, BUDGET_MS, "ms"))


class Scraped:
    """A daemon with its pods, and a client in its network namespace."""

    def __init__(self, daemon: Daemon, client: subprocess.Popen[str], worker: int) -> None:
        """`worker`: of the pod that comes and goes."""
        self.daemon = daemon
        self.worker = worker
        self._client = client
        self.lines = 0

    def begin(self, number: int, period: float = 0.0) -> None:
        """Begin this many scrapes, `period` seconds from the beginning of one to that of the next."""
        assert self._client.stdin is not None
        print(json.dumps([number, period]), file=self._client.stdin, flush=True)

    def end(self) -> list[float]:
        """Wait for the scrapes that were begun; return the milliseconds of each. Raises FailedError."""
        assert self._client.stdout is not None
        if not (line := self._client.stdout.readline()):
            raise sides.FailedError(f"a scrape of {self.daemon.name} failed")
        took, self.lines = json.loads(line)
        return list(took)

    def scrape(self) -> tuple[float, float]:
        """Return the milliseconds of a scrape, and of the daemon's processor time."""
        time.sleep(1.1 * deadlines.TRAFFIC_FRESH_SECONDS)
        before = self.daemon.processor()
        self.begin(1)
        [took] = self.end()
        return took, (self.daemon.processor() - before) * 1000


@contextlib.contextmanager
def full_node(options: argparse.Namespace, name: str, checkout: Path | None) -> Iterator[Scraped]:
    """A node whose pods are attached."""
    pods: int = options.pods
    settings = {"logLevel": "error", "metricsPort": PORT}
    with Node(settings=settings) as node:
        daemon = Daemon(node, name, checkout=checkout)
        networks = min(options.networks, pods)
        for network, config in sides.definitions(node.networks_dir, networks).items():
            node.network(network, config, "kube-system" if network == "cluster" else "default")
        for number in range(pods + 1):
            # The last one comes and goes.
            asked = {sides.NETWORKS: f"n{number % networks}"} if number < pods else {}
            sides.write_pod(node, f"pod0-{number}", asked)
        node.start(timeout=START)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda number: sides.checked(daemon, "ADD", f"kept{number}", 0, number), range(pods)))
        command = ["ip", "netns", "exec", Path(node.host).name, sys.executable, "-c", CLIENT]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            yield Scraped(daemon, client, pods)
            client.stdin.close()  # type: ignore[union-attr]  # it is a pipe


def measure(options: argparse.Namespace, everyone: Sequence[Scraped]) -> dict[str, Figure]:
    """Return the figures of all rounds."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(options.rounds):
        for side in sides.in_turn(everyone, number):
            name = side.daemon.name
            took, processor = side.scrape()
            found["scrape", name].append(took)
            found["processor time of a scrape", name].append(processor)
            for turn in sides.in_turn(("quiet", "scraped"), number):
                mark = f"{os.getpid()}-{number}"
                taken = block(side, options.block / 1000, mark, is_scraped=turn == "scraped")
                for what, middle in (("median", statistics.median), ("mean", statistics.fmean)):
                    found[f"{what} ADD {turn}", name].append(middle(taken))
    figures = {f"{what} {name}": stats.median(values, "ms") for (what, name), values in found.items()}
    for side in everyone:
        name = side.daemon.name
        figures[f"lines {name}"] = Figure.exact(side.lines, "")
        for what in ("median", "mean"):
            quotient = stats.ratio(found[f"{what} ADD scraped", name], found[f"{what} ADD quiet", name])
            figures[f"{what} ADD scraped/quiet {name}"] = quotient
    for what in ("scrape", "processor time of a scrape"):
        if (what, "base") in found:
            figures[f"{what} ours/base"] = stats.ratio(found[what, "ours"], found[what, "base"])
    return figures


def block(side: Scraped, seconds: float, mark: str, *, is_scraped: bool) -> list[float]:
    """Milliseconds of each ADD, of a worker that attaches and deletes a pod until the time is over."""
    begun = time.perf_counter()
    if is_scraped:
        side.begin(max(1, round(seconds * SCRAPES)), 1 / SCRAPES)
    taken: list[float] = []
    while not taken or time.perf_counter() - begun < seconds:
        container = f"a{mark}-{is_scraped}-{len(taken)}"
        taken.append(sides.checked(side.daemon, "ADD", container, 0, side.worker).seconds * 1000)
        sides.checked(side.daemon, "DEL", container, 0, side.worker)
    if is_scraped:
        side.end()
    return taken


if __name__ == "__main__":
    main()
