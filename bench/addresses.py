"""Measure addresses that a cluster shares: the built-in whereabouts beside its binary, behind the same daemon.

    python -m bench.addresses [--rounds 10] [--pods 100] [--taken 10000]

Three nodes with a real API server and etcd; each side has a cluster of its own, in one run. Needs root and the programs
of `make e2e`. Exit status 3 where a figure is over its budget.
"""

from __future__ import annotations

import argparse
import ipaddress
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import verdict
from multus_daemon.spec.addresses import API, RESERVATIONS, object_name
from tests.e2e import build_tools
from tests.e2e.addresses.fleet import Fleet, Pod, Subject
from tests.e2e.node import Answer

SMALL, LARGE = "10.150.0.0/24", "10.151.0.0/16"
NEEDED = (*build_tools.CONTROL_PLANE, *build_tools.ADDRESSES)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pods", type=int, default=100)
    parser.add_argument("--taken", type=int, default=10_000)
    options = parser.parse_args()
    verdict.require_node()
    try:
        for name in NEEDED:
            build_tools.find(name)
    except build_tools.ToolError as error:
        verdict.skip(str(error))
    found: dict[tuple[Subject, str], float] = {}
    for subject in (Subject.BINARY, Subject.BUILTIN):
        with Fleet(*[subject] * 3) as fleet:
            fleet.lan("small", SMALL)
            fleet.lan("large", LARGE)
            for index in range(3):
                one_at_a_time(fleet, "small", 1, index)
            found[subject, "one"] = one_at_a_time(fleet, "small", options.rounds)
            found[subject, "crowd"] = crowd(fleet, options.pods)
            if subject is Subject.BUILTIN:
                found[subject, "few"], before = one_at_a_time(fleet, "large", options.rounds), memory(fleet)
                take(fleet, options.taken)
                found[subject, "memory"] = memory(fleet) - before
                found[subject, "many"] = one_at_a_time(fleet, "large", options.rounds)
        for (side, what), value in found.items():
            if side is subject:
                print(f"{side} {what}: {value:.2f}", flush=True)
    ours, theirs = ({what: value for (side, what), value in found.items() if side is each} for each in Subject)
    verdict.end(
        verdict.Result("ADD of one pod, the binary's being 1", ours["one"] / theirs["one"], 0.15, "x"),
        verdict.Result("time for a crowd of pods, the binary's being 1", theirs["crowd"] / ours["crowd"], 0.05, "x"),
        verdict.Result(f"ADD with {options.taken} addresses taken", ours["many"] / ours["few"], 1.2, "x"),
        verdict.Result(f"memory for {options.taken} addresses", ours["memory"], 3.0, "MiB"),
    )


def one_at_a_time(fleet: Fleet, network: str, rounds: int, index: int = 0) -> float:
    """Return the median of the ADDs of pods that come and go, in milliseconds."""
    times = []
    for number in range(rounds):
        pod = declared(fleet, index, f"{network}-{index}-{number}", network)
        add(fleet, pod)
        if pod.error:
            raise RuntimeError(pod.error)
        times.append(pod.added.seconds * 1000)
        fleet.end(pod)
    return statistics.median(times)


def crowd(fleet: Fleet, number: int) -> float:
    """Return how many pods a second are attached, of a crowd over three nodes, ten at a time on each."""
    pods = [declared(fleet, at % 3, f"crowd-{at}", "small") for at in range(number)]
    with ThreadPoolExecutor(30) as threads:
        begin = time.monotonic()
        list(threads.map(lambda pod: add(fleet, pod), pods))
        seconds = time.monotonic() - begin
        errors = [pod.error for pod in pods if pod.error]
        print(f"of {number} pods {len(errors)} failed in {seconds:.1f} s: {errors[:1]}", flush=True)
        list(threads.map(fleet.end, pods))
    return (number - len(errors)) / seconds


def declared(fleet: Fleet, index: int, name: str, networks: str) -> Pod:
    """Create a pod and its namespace; the daemon knows it when its ADD comes."""
    machine = fleet.machines[index]
    annotations = {"k8s.v1.cni.cncf.io/networks": networks}
    made = fleet.server.create_pod(name, node=machine.name, annotations=annotations, running=False)
    nothing = Answer(1, b'{"msg":"none"}', b"", 0.0)
    pod = Pod(name, index, machine.node.add_netns(), f"c-{name}", made["metadata"]["uid"], nothing)
    fleet.pods[pod.container] = pod
    return pod


def add(fleet: Fleet, pod: Pod) -> None:
    """Attach the pod."""
    node = fleet.machines[pod.index].node
    pod.added = node.cni("ADD", pod.container, pod.netns, pod.name, uid=pod.uid, timeout=200)


def take(fleet: Fleet, number: int) -> None:
    """Reserve the lowest addresses for pods elsewhere, and wait until the node knows."""
    first, path = ipaddress.ip_network(LARGE)[1], f"{API}/namespaces/kube-system/{RESERVATIONS}"

    def reserve(offset: int) -> None:
        metadata: dict[str, Any] = {"name": object_name(first + offset, ""), "labels": {"multus.io/node": "elsewhere"}}
        spec = {"podref": f"default/other-{offset}", "ifname": "net1", "containerid": f"{offset:064x}"}
        kind = {"apiVersion": API.removeprefix("/apis/"), "kind": "OverlappingRangeIPReservation"}
        fleet.server.client.request("POST", path, {**kind, "metadata": metadata, "spec": spec})

    for offset in range(number):
        reserve(offset)
    time.sleep(5)


def memory(fleet: Fleet) -> float:
    """Return the memory of the first node's daemon that is its own, in MiB."""
    daemon = fleet.machines[0].node.daemon
    assert daemon is not None
    rollup = Path(f"/proc/{daemon.pid}/smaps_rollup").read_text()
    return sum(int(kib) for kib in re.findall(r"(?m)^Private_\w+: +(\d+)", rollup)) / 1024


if __name__ == "__main__":
    main()
