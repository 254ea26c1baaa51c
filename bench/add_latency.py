"""How long ADD and DEL take through the shim and the daemon, beside the reference plugins run directly, in one run.

    python -m bench.add_latency [--rounds 200]

One pod, one ptp network with host-local addresses, no API server. Both sides are timed the same way, in turns, as a
runtime sees them: from starting the program (shim, reference ptp) to its exit. The reference plugins come from
CNI_REFERENCE_DIR, or Debian's containernetworking-plugins; without them only our side is measured. Needs root and
iproute2. Exit status 3 where the median ADD is over `--budget` milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench import verdict
from tests.e2e.node import Node

REFERENCE = Path(os.environ.get("CNI_REFERENCE_DIR", "/usr/lib/cni"))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--budget", type=float, default=10.0, help="milliseconds for the median ADD")
    options = parser.parse_args()
    verdict.require_node()
    with Node(settings={"logLevel": "error"}) as node:
        node.ptp("cluster", "10.83.0.0/16")
        node.pod("hello")
        node.start()
        netns = node.add_netns()
        times: dict[str, list[float]] = {}
        for number in range(options.rounds + 10):
            rows = {**_ours(node, netns, number), **_reference(node, netns, number)}
            if number >= 10:  # the first ones warm caches
                for name, seconds in rows.items():
                    times.setdefault(name, []).append(seconds * 1000)
    print(f"{options.rounds} rounds, milliseconds, {os.cpu_count()} CPUs")
    print(f"{'':28}{'median':>8}{'p95':>8}{'p99':>8}{'max':>8}")
    for name, values in times.items():
        cuts = statistics.quantiles(values, n=100)
        print(f"{name:28}{statistics.median(values):8.2f}{cuts[94]:8.2f}{cuts[98]:8.2f}{max(values):8.2f}")
    median = statistics.median(times["ADD shim + daemon"])
    if "ADD reference ptp" in times:
        print(f"ADD: {median / statistics.median(times['ADD reference ptp']):.2f} x the reference plugins run directly")
    verdict.end(verdict.Result("the median ADD", median, options.budget, "ms"))


def _ours(node: Node, netns: str, number: int) -> dict[str, float]:
    found = {}
    for verb in ("ADD", "DEL"):
        answer = node.cni(verb, f"c{number}", netns, "hello")
        if answer.code:
            sys.exit(f"{verb} failed: {answer.stdout.decode()}\n{node.log.read_text()[-4000:]}")
        found[f"{verb} shim + daemon"] = answer.seconds
    start = time.perf_counter()
    node.cni("VERSION", f"c{number}", netns, "hello")
    found["VERSION shim alone"] = time.perf_counter() - start
    return found


def _reference(node: Node, netns: str, number: int) -> dict[str, float]:
    if not (REFERENCE / "ptp").exists():
        return {}
    ipam = {"type": "host-local", "subnet": "10.84.0.0/16", "dataDir": str(node.networks_dir)}
    config = json.dumps({"cniVersion": "1.0.0", "name": "reference", "type": "ptp", "ipam": ipam}).encode()
    found = {}
    for verb in ("ADD", "DEL"):
        environment = node.environment(verb, f"r{number}", netns, "hello") | {"CNI_PATH": str(REFERENCE)}
        start = time.perf_counter()
        subprocess.run([str(REFERENCE / "ptp")], env=environment, input=config, capture_output=True, check=True)
        found[f"{verb} reference ptp"] = time.perf_counter() - start
    return found


if __name__ == "__main__":
    main()
