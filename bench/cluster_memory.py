"""Measure the memory of the daemon in a large cluster, against a real API server.

    python -m bench.cluster_memory [--networks 5000] [--pods 10000] [--here 250]

Three readings of the daemon's anonymous memory: on an empty cluster (idle), after all objects have come in by watch,
and after a restart that lists them. `--here` of the pods run on the daemon's node. Needs root, iproute2, and the
programs that `make e2e` builds. Exit status 3 where a reading is more than `--budget` MB over idle.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from bench import verdict
from tests.e2e.apiserver import ApiServer
from tests.e2e.build_tools import ToolError
from tests.e2e.node import NAD, Node

NAMESPACE = "bench"
MANIFESTS = Path(__file__).parents[1] / "manifests" / "base"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=5000)
    parser.add_argument("--pods", type=int, default=10000)
    parser.add_argument("--here", type=int, default=250)
    parser.add_argument("--budget", type=float, default=40.0, help="megabytes over idle")
    options = parser.parse_args()
    verdict.require_node()
    if shutil.which("openssl") is None:
        verdict.skip("needs the program `openssl`: install openssl")
    try:
        server = ApiServer()
    except ToolError as error:
        verdict.skip(str(error))
    with server, Node(standalone=False, settings={"metricsPort": 9900}) as node:
        prepare(server, node)
        with server.reachable_in(node.host):
            node.start()
            idle = anonymous(node)
            fill(server, options.networks, options.pods, options.here)
            node.wait_until(lambda: known(node) == options.networks + options.here, "all objects", timeout=120)
            watched = anonymous(node)
            node.stop()
            node.start(timeout=60)
            listed = anonymous(node)
            node.kill()
    print(f"{options.networks} networks, {options.here} pods of this node among {options.pods}; MB anonymous")
    for name, value in (("idle", idle), ("after the watch", watched), ("after a restart", listed)):
        print(f"{name:20}{value:8.1f}{value - idle:+8.1f}")
    verdict.end(verdict.Result("memory above idle", max(watched, listed) - idle, options.budget, "MB"))


def prepare(server: ApiServer, node: Node) -> None:
    """The CRD, the rights, and who the daemon is."""
    for name in ("crd.yaml", "rbac.yaml"):
        documents = [item for item in yaml.safe_load_all((MANIFESTS / name).read_text()) if item]
        if name == "crd.yaml":
            server.install_crd(*documents)
        else:
            server.apply(*documents)
    server.create_namespace(NAMESPACE)
    server.create_node("here")
    server.create_node("elsewhere")
    token = node.root / "token"
    token.write_text(server.service_account_token("kube-system", "multus-daemon"))
    node.settings["kubeconfig"] = str(server.kubeconfig_for_token(token))
    node.node_name = "here"


def fill(server: ApiServer, networks: int, pods: int, here: int) -> None:
    """Make the objects: NADs of a usual size, and pods with the annotation of one network."""
    ipam = {"type": "whereabouts", "range": "192.0.2.0/24", "exclude": ["192.0.2.0/28"]}
    plugins = [{"type": "macvlan", "master": "bond0", "mode": "bridge", "mtu": 9000, "ipam": ipam}, {"type": "tuning"}]

    def network(number: int) -> None:
        config = {"cniVersion": "1.0.0", "name": f"net-{number}", "plugins": plugins}
        metadata = {"namespace": NAMESPACE, "name": f"net-{number}", "labels": {"team": f"team-{number % 50}"}}
        server.apply({**NAD, "metadata": metadata, "spec": {"config": json.dumps(config, indent=2)}})

    def pod(number: int) -> None:
        server.create_pod(
            f"pod-{number}",
            namespace=NAMESPACE,
            node="here" if number < here else "elsewhere",
            annotations={"k8s.v1.cni.cncf.io/networks": f"net-{number % max(networks, 1)}"},
            running=number < here,
        )

    start = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(network, range(networks)))
        list(pool.map(pod, range(pods)))
    print(f"made {networks} networks and {pods} pods in {time.monotonic() - start:.0f} s", file=sys.stderr)


def anonymous(node: Node) -> float:
    """The daemon's anonymous memory in MB, when it has settled: what is its own, and not in the page cache anyway."""
    time.sleep(3)
    assert node.daemon is not None
    status = Path(f"/proc/{node.daemon.pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def known(node: Node) -> int:
    """Return how many networks, and pods of the node, the daemon knows."""
    answer = json.loads(node.get("/admin/v1/status")[1])
    return sum(informer["objects"] for informer in answer["cluster"]["informers"])


if __name__ == "__main__":
    main()
