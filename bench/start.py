"""Measure how long the daemon takes to start in a cluster, and its memory there, against a real API server.

    python -m bench.start [--starts 9] [--pairs 300]

Started again and again: the medians of the time from `exec` until `/readyz?gates` says yes, and of the anonymous memory
when it has settled. Then `--pairs` times ADD and DEL of a ptp network, and the memory after them. Byte code is compiled
before, as it is in the image. Needs root, iproute2, and the programs that `make e2e` builds. Exit status 3 where a
reading is over its budget.
"""

from __future__ import annotations

import argparse
import compileall
import json
import shutil
import statistics
import sys
import time
from pathlib import Path

from bench import verdict
from bench.cluster_memory import NAMESPACE, anonymous, prepare
from tests.e2e.apiserver import ApiServer
from tests.e2e.build_tools import ToolError
from tests.e2e.node import NAD, Node

PACKAGE = Path(__file__).parents[1] / "multus_daemon"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=9)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=0.7, help="budget: from exec to ready")
    parser.add_argument("--idle", type=float, default=45.0, help="budget: anonymous memory, MB")
    parser.add_argument("--used", type=float, default=48.0, help="budget: the same after the pairs")
    options = parser.parse_args()
    verdict.require_node()
    if shutil.which("openssl") is None:
        verdict.skip("needs the program `openssl`: install openssl")
    try:
        server = ApiServer()
    except ToolError as error:
        verdict.skip(str(error))
    compileall.compile_dir(PACKAGE, quiet=1)
    with server, Node(standalone=False) as node:
        prepare(server, node)
        declare(server, node)
        with server.reachable_in(node.host):
            seconds, idle = zip(*(started(node) for _ in range(options.starts)), strict=True)
            used = after_pairs(node, options.pairs)
            node.kill()
    print(f"{options.starts} starts: {min(seconds):.2f} to {max(seconds):.2f} s, {min(idle):.1f} to {max(idle):.1f} MB")
    verdict.end(
        verdict.Result("exec to ready in a cluster", statistics.median(seconds), options.seconds, "s"),
        verdict.Result("anonymous memory, idle", statistics.median(idle), options.idle, "MB"),
        verdict.Result(f"anonymous memory after {options.pairs} ADDs and DELs", used, options.used, "MB"),
    )


def declare(server: ApiServer, node: Node) -> None:
    """One pod of this node, and its cluster network: ptp with addresses of host-local."""
    ipam = {"type": "host-local", "subnet": "10.88.0.0/16", "dataDir": str(node.networks_dir)}
    config = {"cniVersion": node.cni_version, "name": "cluster", "type": "ptp", "ipam": ipam}
    metadata = {"namespace": "kube-system", "name": "cluster"}
    server.apply({**NAD, "metadata": metadata, "spec": {"config": json.dumps(config)}})
    server.create_pod("pod", namespace=NAMESPACE, node="here", running=True)


def started(node: Node) -> tuple[float, float]:
    """Start the daemon anew: seconds until it is ready, megabytes that it has then."""
    node.kill()
    begun = time.perf_counter()
    node.start()
    seconds = time.perf_counter() - begun
    return seconds, anonymous(node)


def after_pairs(node: Node, pairs: int) -> float:
    """Megabytes that the daemon has after so many ADDs and DELs."""
    netns = node.add_netns()
    for number in range(pairs):
        for verb in ("ADD", "DEL"):
            answer = node.cni(verb, f"c{number}", netns, "pod", NAMESPACE, uid="")
            if answer.code:
                sys.exit(f"{verb} failed: {answer.stdout.decode()}\n{node.log.read_text()[-4000:]}")
    return anonymous(node)


if __name__ == "__main__":
    main()
