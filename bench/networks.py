"""What further networks of a pod cost: ADD and DEL of a pod with 1 and with 4 ptp networks beside its cluster network.

    python -m bench.networks [--rounds 40]

Four daemons run at the same time, each on a scratch node of its own: `attachConcurrency` 1 and 4, with the built-in
plugins and with the reference binaries (CNI_REFERENCE_DIR, or Debian's containernetworking-plugins; without them only
the built-in ones). The cases take turns, round by round, so that what else the machine does is the same for all: only
ratios count. Timed as a runtime sees them, from the start of the shim to its exit. Needs root and iproute2.
Exit status 3 where, with `attachConcurrency` 4, ADD of the larger pod takes more than `--times` that of the smaller.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from pathlib import Path

from bench import verdict
from tests.e2e.node import Node

REFERENCE = Path(os.environ.get("CNI_REFERENCE_DIR", "/usr/lib/cni"))
SIZES = (0, 1, 4)
"""Networks of the pods, beside the cluster network."""
WARM_UP = 3


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--times", type=float, default=2.0, help="the most that 4 networks may cost, 1 network being 1")
    options = parser.parse_args()
    verdict.require_node()
    kinds = ["built-in", "binaries"] if (REFERENCE / "ptp").exists() else ["built-in"]
    times: dict[tuple[str, int, str, int], list[float]] = {}
    with contextlib.ExitStack() as stack:
        nodes = {
            (kind, at_once): (node := stack.enter_context(_node(kind, at_once)), node.add_netns())
            for kind in kinds
            for at_once in (1, 4)
        }
        for number in range(options.rounds + WARM_UP):
            for size in SIZES:
                for (kind, at_once), (node, netns) in nodes.items():
                    for verb in ("ADD", "DEL"):
                        answer = node.cni(verb, f"c{number}", netns, f"pod{size}")
                        if answer.code:
                            sys.exit(f"{verb} failed: {answer.stdout.decode()}\n{node.log.read_text()[-4000:]}")
                        if number >= WARM_UP:
                            times.setdefault((kind, at_once, verb, size), []).append(answer.seconds * 1000)
    print(f"{options.rounds} rounds, medians in milliseconds, {os.cpu_count()} CPUs")
    sizes = "".join(f"{f'{size} more':>12}" for size in SIZES)
    print(f"{'plugins':10}{'attachConcurrency':>18}{'':5}{sizes}{'4 : 1':>8}")
    results = []
    for kind, at_once in nodes:
        for verb in ("ADD", "DEL"):
            medians = {size: statistics.median(times[kind, at_once, verb, size]) for size in SIZES}
            ratio = medians[4] / medians[1]
            cells = "".join(f"{medians[size]:12.1f}" for size in SIZES)
            print(f"{kind:10}{at_once:18}{verb:>5}{cells}{ratio:8.2f}")
            if verb == "ADD" and at_once == 4:
                results.append(verdict.Result(f"ADD of 4 networks, 1 being 1, {kind}", ratio, options.times, "x"))
    verdict.end(*results)


def _node(kind: str, at_once: int) -> Node:
    mode = "off" if kind == "binaries" else "prefer"
    node = Node(settings={"logLevel": "error", "attachConcurrency": at_once, "builtinPlugins": mode})
    if mode == "off":
        for name in ("ptp", "host-local"):
            (node.bin_dir / name).symlink_to(REFERENCE / name)
    node.ptp("cluster", "10.88.0.0/24")
    names = [f"n{number}" for number in range(max(SIZES))]
    for number, name in enumerate(names, 1):
        node.ptp(name, f"10.88.{number}.0/24", namespace="default")
    for size in SIZES:
        node.pod(f"pod{size}", ",".join(names[:size]))
    node.start()
    return node


if __name__ == "__main__":
    main()
