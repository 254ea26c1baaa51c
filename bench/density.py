"""How soon pods start on a node, and what the daemon takes meanwhile: the scenario `node-density-cni` of kube-burner.

    python -m bench.density [--quick] [--iterations 64] [--rounds 2] [--record FOLDER]

Each iteration makes a web server and a client, with one macvlan network each; the client is Ready once it has read a
page from its web server. One pod is made in a second; then, with other pods, ten. The node is the one of the end-to-end
tests, with a real kubelet, containerd, scheduler and API server, and the daemon is the pod of its manifest: ours, and
upstream's with the limits of ours instead of its own. `none` is the node without Multus and without the second network.
They take turns. Needs root and what `make e2e` builds.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench import cluster as clusters
from bench import density_pods as pods
from bench import verdict
from bench.density_pods import Group, Started
from bench.harness import Bench
from bench.memory import MIB, most
from bench.stats import Figure, mean, percentile, ratio
from tests.e2e.build_tools import ToolError
from tests.e2e.certificates import OpensslError
from tests.e2e.cluster import daemon_image
from tests.e2e.cluster.images import ImageError
from tests.e2e.cluster.multus import MultusPod, UpstreamPod
from tests.e2e.cluster.programs import NodeError
from tests.e2e.cluster.real_node import RealNode

PRIMARY: Final[dict[str, Any]] = {
    "cniVersion": "1.0.0",
    "name": "primary",
    "type": "ptp",
    "ipMasq": True,
    "ipam": {"type": "host-local", "subnet": "10.88.0.0/16", "routes": [{"dst": "0.0.0.0/0"}]},
}
"""The cluster network. No list of plugins: upstream v4.3.0 loses their settings at DEL."""
RATES: Final = (1, 10)
"""Pods a second: what two cores hold, and what upstream's reports have, which is more than the node can start."""
PHASES: Final = ("start", "delete")
PERCENTS: Final = (50, 95, 99)
SETTLED_SECONDS: Final = 3.0
QUIET_SECONDS: Final = 20.0
"""Long enough for two readiness probes and a liveness probe."""


@dataclass
class Taken:
    """Findings of all rounds of a side at one rate."""

    started: list[Started] = field(default_factory=list)
    sandbox: list[float] = field(default_factory=list)
    """Mean milliseconds in which the kubelet had a sandbox made, for each round."""
    processor: dict[str, list[float]] = field(default_factory=lambda: {what: [] for what in PHASES})
    """Milliseconds of processor time of the daemon, for a pod, for each round."""
    most: list[float] = field(default_factory=list)
    """MiB of anonymous memory."""
    gone: list[float] = field(default_factory=list)
    """Seconds from the deletion of all pods until they are gone."""


@dataclass
class Side:
    """A daemon, or none, and the findings about it."""

    name: str
    daemon: MultusPod | None
    at: dict[int, Taken] = field(default_factory=lambda: {rate: Taken() for rate in RATES})
    idle: list[float] = field(default_factory=list)
    """MiB of anonymous memory without pods."""
    quiet: list[float] = field(default_factory=list)
    """Milliseconds of processor time a second without pods: of the probes above all."""


def main() -> None:
    """Measure, print, and judge."""
    bench = Bench("density", __doc__, seconds=3600, iterations=64, rounds=2)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            node = RealNode()
            with node:
                sides = everyone(bench, node, Path(scratch))
                measure(bench, node, sides)
        except (NodeError, ToolError, ImageError, OpensslError) as error:
            verdict.skip(str(error))
    for side in sides:
        report(bench, side)
    by_name = {side.name: side for side in sides}
    if "peer" in by_name:
        quotients(bench, by_name["ours"], by_name["peer"])
    bench.end()


def everyone(bench: Bench, node: RealNode, scratch: Path) -> list[Side]:
    """All sides. Raises ToolError, ImageError."""
    sides = [Side("none", None), Side("ours", MultusPod(node, daemon_image.find()))]
    if (program := clusters.implementation()) is not None:
        programs = {"multus-daemon": program.daemon, "multus-shim": program.shim}
        sides.append(Side("peer", UpstreamPod.released(node, scratch, programs)))
        bench.versions["peer"] = program.version
    return sides


def measure(bench: Bench, node: RealNode, sides: Sequence[Side]) -> None:
    """All rounds; each begins with another side."""
    node.start()
    node.primary("10-primary.conf", PRIMARY)
    node.wait_ready()
    for number in range(bench.number("rounds", 1)):
        if not bench.has_time():
            return
        for place in range(len(sides)):
            side = sides[(number + place) % len(sides)]
            with running(node, side.daemon) as group:
                if group:
                    rest(side, group)
                for rate, taken in side.at.items():
                    once(node, group, taken, bench.number("iterations", 4), rate)
                    print(f"{number + 1}, {side.name}, {rate} a second: {taken.started[-1].all:.1f} s", flush=True)


@contextlib.contextmanager
def running(node: RealNode, daemon: MultusPod | None) -> Iterator[Group | None]:
    """The daemon on the node, and the network; its group."""
    if daemon is None:
        yield None
        return
    daemon.install()
    try:
        daemon.start()
        if isinstance(daemon, UpstreamPod):
            same_limits(node, daemon)
        pods.define(node)
        yield Group(node, daemon.uid)
    finally:
        daemon.uninstall()


def same_limits(node: RealNode, daemon: UpstreamPod) -> None:
    """Give upstream's daemon the limits of ours. Its own manifest gives it 50 MiB and a tenth of a core."""
    container = {"name": "kube-multus", "resources": {"limits": {"cpu": None, "memory": "512Mi"}}}
    patch = {"spec": {"template": {"spec": {"containers": [container]}}}}
    node.kubectl("-n", "kube-system", "patch", "daemonset", "kube-multus-ds", "-p", json.dumps(patch))
    daemon.wait_rolled_out()
    daemon.wait_ready()


def rest(side: Side, group: Group) -> None:
    """Measure the daemon without pods."""
    time.sleep(SETTLED_SECONDS)
    before = group.processor()
    time.sleep(QUIET_SECONDS)
    side.quiet.append((group.processor() - before) / QUIET_SECONDS * 1000)
    side.idle.append(group.anonymous() / MIB)


def once(node: RealNode, group: Group | None, taken: Taken, iterations: int, rate: float) -> None:
    """One side's pods come and go."""
    count = iterations * 2
    processor = group.processor if group else lambda: 0.0
    clock, before = [processor()], pods.sandboxes(node)
    with most(group.anonymous if group else lambda: 0) as seen:
        taken.started.append(pods.start(node, iterations, rate, attached=group is not None))
    clock.append(processor())
    made, seconds = (after - old for after, old in zip(pods.sandboxes(node), before, strict=True))
    taken.sandbox.append(seconds / made * 1000)
    taken.gone.append(pods.delete(node))
    clock.append(processor())
    if group:
        taken.most.append(max(seen) / MIB)
        for what, begin, end in zip(PHASES, clock, clock[1:], strict=False):
            taken.processor[what].append((end - begin) / count * 1000)


def report(bench: Bench, side: Side) -> None:
    """Add the figures of a side."""
    for rate, taken in side.at.items():
        where = f"at {rate} {side.name}"
        for kind in ("servers", "clients"):
            values = [value for round_ in taken.started for value in getattr(round_, kind)]
            for percent in PERCENTS:
                found = Figure.exact(percentile(values, percent), "s", len(values))
                bench.add(f"{kind} p{percent} {where}", found)
        bench.add(f"all ready {where}", mean([round_.all for round_ in taken.started], "s"))
        bench.add(f"all gone {where}", mean(taken.gone, "s"))
        bench.add(f"sandbox {where}", mean(taken.sandbox, "ms"))
        if side.daemon:
            bench.add(f"most {where}", mean(taken.most, "MiB"))
            for what, values in taken.processor.items():
                bench.add(f"processor {what} {where}", mean(values, "ms"))
    if side.daemon:
        bench.add(f"idle {side.name}", mean(side.idle, "MiB"))
        bench.add(f"quiet {side.name}", mean(side.quiet, "ms/s"))


def quotients(bench: Bench, ours: Side, peer: Side) -> None:
    """Add ours against the peer, by round."""
    for rate in RATES:
        one, other = ours.at[rate], peer.at[rate]
        bench.add(f"sandbox at {rate} ours/peer", ratio(one.sandbox, other.sandbox))
        for what in PHASES:
            bench.add(f"processor {what} at {rate} ours/peer", ratio(one.processor[what], other.processor[what]))


if __name__ == "__main__":
    main()
