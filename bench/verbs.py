"""ADD, CHECK and DEL by the number of networks, beside the reference plugins started directly, without an API server.

    python -m bench.verbs [--quick] [--rounds 100] [--record FOLDER]

Pods with 0, 1, 4 and 16 networks beside their cluster network, all ptp with host-local. Sides: `ours` (built-in
plugins), `binaries` (the same daemon with `builtinPlugins: off`), `bare` (the reference ptp started directly once for
each network, no Multus), and `base` where BENCH_BASE names another checkout: that checkout's daemon behind our shim.
All sides attach and delete a pod in each round, one after the other, in an order that turns; a quotient is taken within
a round. Only ratios mean anything on a machine that does other things too.

`x ours/bare` for any number of networks is against ONE bare network. What the bare plugins take for the same number of
networks is recorded as `ADD <n> bare`. Then: the stages of an ADD by the daemon's own metrics, the processor time of a
pod, and dual-stack against IPv4. The daemons run for a minute before the first round (`--quick`: not): until then each
DEL looks on the disk for records of a predecessor, which takes 0.1 ms. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bench import figures, sides, stats
from bench.harness import Bench
from bench.sides import DUAL, START, Bare, Daemon, Side, Size
from bench.stats import Figure
from multus_daemon import deadlines
from tests.e2e.node import Node

SIZES: tuple[Size, ...] = (0, 1, 4, 16, DUAL)
SPARSE: dict[Size, int] = {16: 3, DUAL: 6}
"""These sizes take part in every n-th round only: they take seconds."""
WARM_UP = 3
PORT = 9900

Samples = dict[tuple[str, Size, str], list[float]]
"""(what, size, side) -> a value for each round."""


def main() -> None:
    """Measure, print, and judge."""
    bench = Bench("verbs", __doc__, seconds=660, rounds=100)
    sides.require_reference()
    bench.versions["bare"] = sides.reference_version()
    checkout = sides.base_checkout()
    if checkout is not None:
        bench.versions["base"] = figures.commit(checkout)
    with contextlib.ExitStack() as stack:
        ours = _daemon(stack, "ours")
        everyone: list[Side] = [ours, _daemon(stack, "binaries"), Bare(stack.enter_context(Node()))]
        if checkout is not None:
            everyone.append(_daemon(stack, "base", checkout))
        if not bench.quick:
            time.sleep(deadlines.PREDECESSOR_SECONDS)
        samples = measure(bench, everyone)
        report(bench, samples)
        report_stages(bench, ours)
    bench.end()


def _daemon(stack: contextlib.ExitStack, name: str, checkout: Path | None = None) -> Daemon:
    node = stack.enter_context(Node(settings={"logLevel": "error", "metricsPort": PORT}))
    side = Daemon(node, name, binaries=name == "binaries", checkout=checkout)
    side.declare(sizes=SIZES)
    node.start(timeout=START)
    return side


def measure(bench: Bench, everyone: Sequence[Side]) -> Samples:
    """Milliseconds of each verb, and of processor time."""
    samples: Samples = defaultdict(list)
    named = {side.name: side for side in everyone}
    for number in range(bench.number("rounds", 6) + WARM_UP):
        if not bench.has_time(0.9):
            break
        for size in SIZES:
            # A larger pod is compared with pods of one network that live in the same round.
            entries: list[tuple[str, Side, Size]] = [(name, side, size) for name, side in named.items()]
            if size != 0:
                entries += [(f"{name} single", named[name], 0) for name in ("bare", "ours")]
            every = SPARSE.get(size, 1)
            if number % every:
                continue
            with_check = number // every % 3 == 0
            counts = number >= WARM_UP or size in SPARSE
            for label, side, of in sides.in_turn(entries, number):
                found = one_pod(side, f"{label.replace(' ', '-')}{size}-{number}", of, with_check=with_check)
                for what, value in found.items():
                    if counts:
                        samples[what, size, label].append(value * 1000)
    return samples


def one_pod(side: Side, container: str, size: Size, *, with_check: bool) -> dict[str, float]:
    """Seconds of each verb. Without CHECK, the processor time of ADD and DEL too.

    `processor` is what the daemon and its children take, `total` is that and what the runtime starts.
    """
    before = side.processor()
    verbs = ("ADD", "CHECK", "DEL") if with_check else ("ADD", "DEL")
    runs = {verb: sides.checked(side, verb, container, size) for verb in verbs}
    found = {verb: done.seconds for verb, done in runs.items()}
    if not with_check:
        outlives = side.processor() - before
        found |= {"processor": outlives, "total": outlives + sum(done.processor for done in runs.values())}
    return found


def report(bench: Bench, samples: Samples) -> None:
    """Medians and quotients."""
    for (what, size, side), values in samples.items():
        if not side.endswith("single"):
            averaged = what in ("processor", "total")  # Children count in ticks of 10 ms: no median of these.
            bench.add(f"{what} {size} {side}", (stats.mean if averaged else stats.median)(values, "ms"))

    def compare(key: str, ours: tuple[str, Size, str], theirs: tuple[str, Size, str]) -> None:
        if samples.get(ours) and samples.get(theirs):
            bench.add(key, stats.ratio(samples[ours], samples[theirs]))

    for size in SIZES:
        for what in ("ADD", "DEL"):
            compare(f"{what} {size} ours/bare", (what, size, "ours"), (what, size, "bare single" if size else "bare"))
        compare(f"processor {size} ours/base", ("processor", size, "ours"), ("processor", size, "base"))
    compare("ADD dual ours/ADD 0 ours", ("ADD", DUAL, "ours"), ("ADD", DUAL, "ours single"))
    for side in ("ours", "binaries"):
        compare(f"ADD 4 {side}/ADD 1 {side}", ("ADD", 4, side), ("ADD", 1, side))


# --- stages ----------------------------------------------------------------------------------------------------------


def report_stages(bench: Bench, ours: Daemon) -> None:
    """Report mean times of the stages, by the daemon's own histograms.

    Plugins that run side by side are summed: `plugins` may be more than the request that they are part of.
    """
    rounds = 3 if bench.quick else 30
    for size in (0, 4):
        before = ours.node.metrics(PORT)
        seconds = {"ADD": 0.0, "DEL": 0.0}
        for number in range(rounds):
            for verb in seconds:
                seconds[verb] += sides.checked(ours, verb, f"stage{size}-{number}", size).seconds
        after = ours.node.metrics(PORT)
        for verb, total in seconds.items():
            request, plugins = (
                _sum(after, name, verb) - _sum(before, name, verb)
                for name in ("multus_cni_request_duration_seconds", "multus_plugin_duration_seconds")
            )
            stages = {"shim and socket": total - request, "request in the daemon": request, "plugins": plugins}
            for stage, spent in stages.items():
                bench.add(f"stage {verb} {size} {stage}", Figure.exact(spent * 1000 / rounds, "ms", rounds))


def _sum(text: str, name: str, verb: str) -> float:
    """Seconds that a histogram has summed up for a verb; host-local runs inside another plugin's time."""
    lines = re.findall(rf"(?m)^{name}_sum\{{([^}}]*)\}} (\S+)$", text)
    return sum(float(value) for labels, value in lines if f'verb="{verb}"' in labels and "host-local" not in labels)


if __name__ == "__main__":
    main()
