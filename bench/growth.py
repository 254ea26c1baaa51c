"""Measure the cost of ADD as a node and its cluster grow: leases, attachments, NetworkAttachmentDefinitions.

    python -m bench.growth [--quick] [--rounds 40] [--record FOLDER]

* Leases: 10, 100, 1,000 and 10,000 files in host-local's directory of the network that the pod is attached to. The
  same for `bare`, the reference plugins started directly.
* Attachments: daemons that have attached 0, 50 and 250 pods, which stay.
* Networks: daemons that know 0, 500 and 5,000 NetworkAttachmentDefinitions; and their anonymous memory.

Without an API server. All variants take turns, round by round; a quotient is against the smallest of the same round.
Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import sides, stats
from bench.harness import Bench
from bench.sides import START, Bare, Daemon, Side, Size
from tests.e2e.node import NAD, Node

LEASES = (10, 100, 1_000, 10_000)
ATTACHMENTS = (0, 50, 250)
NETWORKS = (0, 500, 5_000)
WARM_UP = 3
FILE = 500
"""Objects in one manifest: the daemon reads files of up to 1 MiB."""


def main() -> None:
    """Measure, print, and judge."""
    bench = Bench("growth", __doc__, seconds=420, rounds=40)
    sides.require_reference()
    bench.versions["bare"] = sides.reference_version()
    leases(bench)
    attachments(bench)
    networks(bench)
    bench.end()


Variant = tuple[str, Side, Size]


def paired(bench: Bench, what: str, variants: Sequence[Variant], share: float) -> None:
    """ADD and DEL of every variant in every round; the first is what the others are compared with."""
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(bench.number("rounds", 4) + WARM_UP):
        if not bench.has_time(share) and number > WARM_UP:
            break
        for label, side, size in sides.in_turn(list(variants), number):
            for verb in ("ADD", "DEL"):
                done = sides.checked(side, verb, f"{what}-{label.replace(' ', '-')}-{number}", size)
                if number >= WARM_UP:
                    samples[verb, label].append(done.seconds * 1000)
    for (verb, label), values in sorted(samples.items()):
        bench.add(f"{what} {verb} {label}", stats.median(values, "ms"))
    for prefix in dict.fromkeys(label.rpartition(" ")[0] for label, _, _ in variants):
        labels = [label for label, _, _ in variants if label.rpartition(" ")[0] == prefix]
        for label in labels[1:]:
            of = f"{label}/{labels[0].rpartition(' ')[2]}"
            bench.add(f"{what} ADD {of}", stats.ratio(samples["ADD", label], samples["ADD", labels[0]]))


def leases(bench: Bench) -> None:
    """One daemon, and a cluster network for each number of leases."""
    with Node(settings={"logLevel": "error"}) as node, Node() as lent:
        bare = Bare(lent)
        ours = Daemon(node, "ours")
        counts = LEASES[:: len(LEASES) - 1] if bench.quick else LEASES
        ours.declare(sizes=[f"l{count}" for count in counts])
        for place, count in enumerate(counts):
            name = f"l{count}"
            for data in (node.networks_dir, bare.data):
                reserve(data / name, 20 + place, count)
            node.network(name, network(name, node.networks_dir, 20 + place))
            bare.define(name, network(name, bare.data, 20 + place))
        node.start(timeout=START)
        variants: list[Variant] = [(str(count), ours, f"l{count}") for count in counts]
        variants += [(f"bare {count}", bare, f"l{count}") for count in counts]
        paired(bench, "leases", variants, 0.35)


def network(name: str, data: Path, number: int) -> dict[str, object]:
    """A ptp network."""
    return sides.network(name, data, number)


def reserve(directory: Path, network_number: int, count: int) -> None:
    """Leases of other containers, as host-local writes them, from the start of the subnet."""
    directory.mkdir(parents=True)
    address = ""
    for number in range(count):
        address = f"10.{100 + network_number}.{(number + 2) >> 8}.{(number + 2) & 255}"
        (directory / address).write_text(f"other{number}\r\neth0")
    (directory / "last_reserved_ip.0").write_text(address)


def attachments(bench: Bench) -> None:
    """A daemon for each number of pods that stay."""
    counts = (0, 8) if bench.quick else ATTACHMENTS
    with contextlib.ExitStack() as stack:
        variants: list[Variant] = []
        for count in counts:
            side = Daemon(stack.enter_context(Node(settings={"logLevel": "error"})), str(count))
            side.declare(workers=count + 1)
            side.node.start(timeout=START)
            for number in range(1, count + 1):
                sides.checked(side, "ADD", f"stays{number}", 0, number)
            variants.append((str(count), side, 0))
        paired(bench, "attachments", variants, 0.75)


def networks(bench: Bench) -> None:
    """A daemon for each number of networks that are declared; the pod has one of them."""
    counts = (0, 500) if bench.quick else NETWORKS
    with contextlib.ExitStack() as stack:
        daemons: list[Daemon] = []
        for count in counts:
            node = stack.enter_context(Node(settings={"logLevel": "error"}))
            declare(node, count)
            side = Daemon(node, str(count))
            side.declare(sizes=(1,))
            node.start(timeout=START)
            daemons.append(side)
        paired(bench, "networks", [(side.name, side, 1) for side in daemons], 1)


def declare(node: Node, count: int) -> None:
    """Networks of a usual size."""
    ipam = {"type": "whereabouts", "range": "192.0.2.0/24", "exclude": ["192.0.2.0/28"]}
    plugins = [{"type": "macvlan", "master": "bond0", "mode": "bridge", "mtu": 9000, "ipam": ipam}, {"type": "tuning"}]

    def definition(number: int) -> dict[str, object]:
        config = json.dumps({"cniVersion": "1.0.0", "name": f"net-{number}", "plugins": plugins})
        return {**NAD, "metadata": {"namespace": "bench", "name": f"net-{number}"}, "spec": {"config": config}}

    for first in range(0, count, FILE):
        items: Iterable[dict[str, object]] = map(definition, range(first, min(first + FILE, count)))
        content = {"apiVersion": "v1", "kind": "List", "items": list(items)}
        (node.manifests / f"networks-{first}.json").write_text(json.dumps(content))


if __name__ == "__main__":
    main()
