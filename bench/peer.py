"""Beside upstream, with a real API server: ADD, CHECK and DEL, processor time, the start, and requests for a pod.

    python -m bench.peer [--quick] [--rounds 60] [--record FOLDER]

Sides: `ours`, `binaries` (ours with the same reference plugins as the other one), and `peer`: what BENCH_PEER_SHIM and
BENCH_PEER_DAEMON name, else upstream's programs, which `make e2e` builds. Each has a node of its own on the same API
server, and pods with 0, 1, 4 and 16 networks; they take turns, round by round. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from bench import cluster as clusters
from bench import sides, stats, verdict
from bench.cluster import Cluster, Peer
from bench.harness import Bench
from bench.sides import START, Daemon, Size
from bench.stats import Figure
from bench.verbs import one_pod

SIZES: tuple[Size, ...] = (0, 1, 4, 16)
SPARSE: dict[Size, int] = {16: 3}
WARM_UP = 2
COUNTED = 10
"""Pods for whose requests the audit log is asked."""


def main() -> None:
    """Measure, print, and judge."""
    bench = Bench("peer", __doc__, seconds=500, rounds=60, starts=7)
    sides.require_reference()
    program = clusters.implementation()
    if program is None:
        verdict.skip("needs another implementation: `make e2e` builds upstream's, or name one by BENCH_PEER_DAEMON")
    bench.versions |= {"peer": program.version, "reference plugins": sides.reference_version()}
    with clusters.started(SIZES, 1) as cluster, contextlib.ExitStack() as stack:
        ours, binaries = cluster.ours("ours"), cluster.ours("binaries", binaries=True)
        peer = cluster.peer(program)
        stack.callback(peer.stop)
        starts(bench, ours, peer)
        binaries.node.start(timeout=START)
        requests(bench, cluster, [ours, peer])
        verbs(bench, [ours, binaries, peer])
    bench.end()


def starts(bench: Bench, ours: Daemon, peer: Peer) -> None:
    """From exec until each serves; both run afterwards."""
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    for number in range(bench.number("starts", 2) + 1):
        ours.node.kill()
        peer.stop()
        for name, start in sides.in_turn([("ours", ours.node.start), ("peer", peer.start)], number):
            begun = time.perf_counter()
            start(START)
            if number:  # The first compiles byte code, and reads files into the cache.
                seconds[name].append(time.perf_counter() - begun)
    for name, values in seconds.items():
        bench.add(f"start {name}", stats.median(values, "s"))


def requests(bench: Bench, cluster: Cluster, both: Sequence[Daemon | Peer]) -> None:
    """Count the API requests for ADD and DEL of a new pod with one more network."""
    users = {"ours": clusters.USER, "peer": "system:multus:peer"}
    for side in both:
        for number in range(COUNTED):
            cluster.pod(side.name, f"pod1-{1000 + number}", 1)
        time.sleep(2)
        mark = cluster.server.audit_mark()
        for number in range(COUNTED):
            for verb in ("ADD", "DEL"):
                sides.checked(side, verb, f"counted{number}", 1, pod=f"pod1-{1000 + number}")
        time.sleep(2)
        asked = [item for item in cluster.server.audit(users[side.name], since=mark) if item["verb"] != "watch"]
        kinds = Counter(f"{item['verb']} {item['resource']}/{item['subresource']}".rstrip("/") for item in asked)
        for kind, number in sorted(kinds.items()):
            bench.add(f"requests {side.name}: {kind}", Figure.exact(number / COUNTED, "a pod", COUNTED))
        bench.add(f"requests {side.name}", Figure.exact(len(asked) / COUNTED, "a pod", COUNTED))


def verbs(bench: Bench, everyone: Sequence[Daemon | Peer]) -> None:
    """The same pods on every side, in turns."""
    samples: dict[tuple[str, Size, str], list[float]] = defaultdict(list)
    for number in range(bench.number("rounds", 4) + WARM_UP):
        if not bench.has_time(0.95):
            break
        for size in SIZES:
            every = SPARSE.get(size, 1)
            if number % every:
                continue
            with_check = number // every % 3 == 0
            for side in sides.in_turn(list(everyone), number):
                found = one_pod(side, f"{side.name}{size}-{number}", size, with_check=with_check)
                if number >= WARM_UP or size in SPARSE:
                    for what, value in found.items():
                        samples[what, size, side.name].append(value * 1000)
    for (what, size, side_name), values in samples.items():
        averaged = what in ("processor", "total")
        bench.add(f"{what} {size} {side_name}", (stats.mean if averaged else stats.median)(values, "ms"))
    for what, size in dict.fromkeys((what, size) for what, size, _ in samples):
        theirs = samples[what, size, "peer"]
        for name in ("ours", "binaries"):
            if what not in ("processor", "total"):
                bench.add(f"{what} {size} {name}/peer", stats.ratio(samples[what, size, name], theirs))
            else:
                quotient = statistics.fmean(samples[what, size, name]) / statistics.fmean(theirs)
                bench.add(f"{what} {size} {name}/peer", Figure.exact(quotient, "x", len(theirs)))


if __name__ == "__main__":
    main()
