"""Measure how much longer a scrape takes because of `attachmentMetrics`, with a node full of pods.

    python -m bench.traffic [--pods 250] [--interfaces 1] [--rounds 200]

Real namespaces, a veth pair for each interface, ten networks. Metrics without and with traffic take turns, round by
round; the result is the median of the differences in the scraping thread's processor time, which on a calm machine is
the time that a scrape takes. The daemon has scraped before most pods come, as on a node. Needs root and iproute2. Exit
status 3 if it is over its budget.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from bench import verdict
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.metrics import Metrics
from multus_daemon.node.traffic import Traffic
from multus_daemon.pod.view import View
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Interface, Result
from tests.namespaces import make_at, remove_netns
from tests.netns.conftest import Netns, new_host

NETWORKS: Final = 10
CONFIG: Final = conf.parse(b'{"name":"n","type":"ptp","cniVersion":"1.0.0"}')


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=250)
    parser.add_argument("--interfaces", type=int, default=1, help="of each pod, beside the cluster network's")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--networks-ms", type=float, default=5.0, help="budget")
    options = parser.parse_args()
    verdict.require_node()
    with tempfile.TemporaryDirectory() as folder, new_host() as host, namespaces(Path(folder), options.pods) as paths:
        connect(host, paths[:1], options.interfaces)
        rounds([record(0, paths[0], options.interfaces)], 1)
        connect(host, paths[1:], options.interfaces, first=1)
        records = [record(number, path, options.interfaces) for number, path in enumerate(paths)]
        without, by_network = rounds(records, options.rounds)
    added = statistics.median(map(float.__sub__, by_network, without))
    print(f"a scrape of {options.pods} pods without traffic: {statistics.median(without):.2f} ms")
    verdict.end(verdict.Result(f"traffic of {options.pods} pods by network", added, options.networks_ms, "ms"))


@contextlib.contextmanager
def namespaces(folder: Path, number: int) -> Iterator[list[Path]]:
    """Namespaces for the duration of a block."""
    paths = [folder / f"pod{position}" for position in range(number)]
    try:
        for path in paths:
            make_at(path)
        yield paths
    finally:
        for path in paths:
            remove_netns(path)


def connect(host: Netns, paths: list[Path], interfaces: int, *, first: int = 0) -> None:
    """Give each namespace its interfaces, `net<number>`."""
    host.batch(
        *(
            f"link add v{pod}n{number} type veth peer name net{number} netns {path}"
            for pod, path in enumerate(paths, first)
            for number in range(1, interfaces + 1)
        )
    )


def record(pod: int, path: Path, interfaces: int) -> ContainerRecord:
    """Return what the ADD of such a pod leaves."""
    with PodNetns(str(path)) as netns:
        identity = netns.identity()
    attachments = (
        Attachment(
            f"default/network-{(pod + number) % NETWORKS}",
            CONFIG,
            ifname := IfName(f"net{number}"),
            result=Result(interfaces=(Interface(ifname, sandbox=str(path)),)),
        )
        for number in range(1, interfaces + 1)
    )
    return ContainerRecord(
        Sandbox(ContainerId(f"c{pod}"), str(path)),
        IfName("eth0"),
        Namespace("default"),
        PodName(f"application-7d4b9c6f5-{pod:05}"),
        PodUid(""),
        tuple(attachments),
        complete=True,
        created=time.time(),
        netns_id=identity,
    )


def rounds(records: list[ContainerRecord], number: int) -> tuple[list[float], ...]:
    """Return the milliseconds of scrapes without traffic and with it."""
    view, metrics = View(), Metrics()
    traffic = Traffic(view, fresh_seconds=0)
    metrics.measure_traffic(traffic.figures)
    for item in records:
        view.enter(item)
    first = time.thread_time()
    metrics.render()
    print(f"the first scrape: {(time.thread_time() - first) * 1000:.1f} ms")
    variants: list[tuple[Callable[[], object], list[float]]] = [(Metrics().render, []), (metrics.render, [])]
    for _ in range(number):
        for render, taken in variants:
            begun = time.thread_time()
            render()
            taken.append((time.thread_time() - begun) * 1000)
    return tuple(taken for _, taken in variants)


if __name__ == "__main__":
    main()
