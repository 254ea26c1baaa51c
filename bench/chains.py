"""The lists of plugins that clusters have, with a real API server: ADD and DEL beside the same list without Multus.

    python -m bench.chains [--quick] [--rounds 60] [--block 2000] [--record FOLDER]

Sides: `ours`, `binaries`, `bare` (each plugin of the list started directly, as libcni does it), and `peer` (see
bench.peer) where it is there. A pod has one network, whose list is one of `sides.CHAINS`; they take turns, round by
round. Then pods of one list come and go, 16 at a time. Needs root and iproute2; a list with flannel needs its plugin.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Sequence

from bench import burst, sides, stats
from bench import cluster as clusters
from bench.burst import Cell
from bench.harness import Bench
from bench.sides import CHAINS, PTP, START, Bare, Side, Size
from bench.verbs import one_pod
from tests.e2e.node import Node

WARM_UP = 2
AT_ONCE = 16
BUSY: Size = "full"
"""The list of the pods that come and go at the same time."""
BLOCKS = 4

Samples = dict[tuple[str, Size, str], list[float]]
"""(verb, chain, side) -> milliseconds in each round."""


def main() -> None:
    """Measure, print, and judge."""
    bench = Bench("chains", __doc__, seconds=600, rounds=60, block=2000)
    chains = [name for name, plugins in CHAINS.items() if sides.has_programs(plugins)]
    sides.require_reference()
    bench.versions["bare"] = sides.reference_version()
    program = clusters.implementation()
    with clusters.started(chains, AT_ONCE) as cluster, contextlib.ExitStack() as stack:
        ours = [cluster.ours("ours"), cluster.ours("binaries", binaries=True)]
        for side in ours:
            side.node.start(timeout=START)
        everyone: list[Side] = [*ours, Bare(stack.enter_context(Node()))]
        if program is not None:
            bench.versions["peer"] = program.version
            peer = cluster.peer(program)
            stack.callback(peer.stop)
            peer.start()
            everyone.append(peer)
        report(bench, chains, measure(bench, chains, everyone))
        busy(bench, [side for side in everyone if side.name in ("ours", "peer")])
    bench.end()


def measure(bench: Bench, chains: Sequence[Size], everyone: Sequence[Side]) -> Samples:
    """Milliseconds of each verb."""
    samples: Samples = defaultdict(list)
    for number in range(bench.number("rounds", 4) + WARM_UP):
        if not bench.has_time(0.8):
            break
        # Each list is compared with ptp alone of the same round.
        entries = [(chain, side) for chain in chains for side in everyone]
        for chain, side in sides.in_turn(entries, number):
            found = one_pod(side, f"{side.name}{chain}{number}", chain, with_check=False)
            if number >= WARM_UP:
                for verb in ("ADD", "DEL"):
                    samples[verb, chain, side.name].append(found[verb] * 1000)
    return samples


def report(bench: Bench, chains: Sequence[Size], samples: Samples) -> None:
    """Medians and quotients."""
    for (verb, chain, side), values in samples.items():
        bench.add(f"{verb} {chain} {side}", stats.median(values, "ms"))
    for chain in chains:
        for verb in ("ADD", "DEL"):
            ours = samples[verb, chain, "ours"]
            for other in ("bare", "peer"):
                if theirs := samples.get((verb, chain, other)):
                    bench.add(f"{verb} {chain} ours/{other}", stats.ratio(ours, theirs))
            if chain != PTP:
                bench.add(f"{verb} {chain} ours/{PTP} ours", stats.ratio(ours, samples[verb, PTP, "ours"]))


def busy(bench: Bench, both: Sequence[Side]) -> None:
    """Pods a second, 16 at a time, in blocks that take turns."""
    cells = {side.name: Cell() for side in both}
    seconds = bench.number("block", 500) / 1000
    for number in range(1 if bench.quick else BLOCKS):
        for side in sides.in_turn(list(both), number):
            burst.block(side, BUSY, AT_ONCE, seconds, cells[side.name], f"{os.getpid()}-{number}")
    burst.report(bench, BUSY, AT_ONCE, cells)


if __name__ == "__main__":
    main()
