"""Measure how soon a running pod's networks follow its annotation, and how soon a deleted interface is back.

    python -m bench.hotplug [--rounds 50]

A real API server; the time is from the PATCH of the annotation (sent) until the interface is up in the pod, and from
the removal of the interface (RTM_DELLINK sent) until another one is up in its place. Our daemon with built-in plugins
and `hotplug: on`, `keep: repair`; beside it, if WIDE_DYNAMIC_NETWORKS_CONTROLLER names the program,
multus-dynamic-networks-controller with upstream's daemon (`make e2e` builds it). They take turns, round by round. Needs
root, iproute2, openssl and the programs of `make e2e`. Exit status 3 if one is over its budget.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

from bench import cluster, harness, verdict
from bench.cluster import Cluster, Peer
from bench.sides import Daemon, checked
from multus_daemon.kernel.pod_netns import PodNetns
from tests.e2e.dynamic_networks import VARIABLE, DynamicNetworksController
from tests.fakes.cri import FakeRuntime

BUDGET_MS: Final = 50.0
CONTAINER: Final = "c1"
IFNAME: Final = "data0"
PATIENCE_SECONDS: Final = 10.0
QUIET_SECONDS: Final = 0.3
"""Between two measurements: Events and statuses of the last one are written."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    verdict.require_node()
    harness.isolate("hotplug")
    with cluster.started((0,), 1) as made, contextlib.ExitStack() as stack:
        ours = made.ours("ours", hotplug="on", keep="repair")
        sides: dict[str, Daemon | Peer] = {"ours": ours}
        if other := with_controller(made, stack):
            sides["controller and upstream"] = other
        ours.node.start()
        stack.callback(ours.node.kill)
        pods = {name: Running(made, side) for name, side in sides.items()}
        plugged: dict[str, list[float]] = {name: [] for name in pods}
        repaired: list[float] = []
        for number in range(options.rounds + 1):
            for name, pod in pods.items():
                took = pod.plug()
                back = [pod.delete()] if name == "ours" else []
                pod.unplug()
                # The first round has what is imported and looked up once.
                if number:
                    plugged[name].append(took)
                    repaired += back
    shown = {f"from the annotation, {name}": found for name, found in plugged.items()}
    for name, figures in {**shown, "from `ip link del` to repaired": repaired}.items():
        ordered = sorted(figures)
        p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        print(f"{name}: median {statistics.median(figures):.1f} ms, p99 {p99:.1f} ms, n={len(figures)}")
    verdict.end(
        verdict.Result("from the annotation to the interface", statistics.median(plugged["ours"]), BUDGET_MS, "ms"),
        verdict.Result("from `ip link del` to repaired", statistics.median(repaired), BUDGET_MS, "ms"),
    )


def with_controller(made: Cluster, stack: contextlib.ExitStack) -> Peer | None:
    """Return a node with upstream's daemon and the controller; None where one of them is missing, which is said."""
    program = cluster.implementation()
    if program is None or not os.environ.get(VARIABLE):
        print(f"without the controller: {VARIABLE} is not set, or upstream's daemon is not built (make e2e)")
        return None
    peer = made.peer(program)
    peer.node.node_name = peer.name
    peer.start()
    stack.callback(peer.stop)
    runtime = stack.enter_context(FakeRuntime(peer.node.root / "cri.sock"))
    uid = made.uids[peer.name]["pod0-0"]
    runtime.sandboxes[uid] = (CONTAINER, peer.netns[0])
    controller = DynamicNetworksController(made.server, peer.node, runtime.socket).process
    controller.start()
    stack.callback(controller.stop)
    return peer


class Running:
    """A running pod, whose annotation is changed."""

    def __init__(self, made: Cluster, side: Daemon | Peer) -> None:
        self._made, self._name = made, side.name
        self._netns: str = side.netns[0]
        self._path = f"/api/v1/namespaces/{side.name}/pods/pod0-0"
        status = {"status": {"phase": "Running"}}
        made.server.client.merge(f"{self._path}/status", status)
        checked(side, "ADD", CONTAINER, 0)
        self._stays = {"name": "n1", "namespace": self._name, "interface": "data1"}
        self._comes = {"name": "n0", "namespace": self._name, "interface": IFNAME}
        self._annotate(self._stays)
        self._until(lambda: self._index("data1") != 0)

    def plug(self) -> float:
        """Add a network; milliseconds until its interface is up."""
        began = time.monotonic()
        self._annotate(self._stays, self._comes)
        self._until(lambda: self._index(IFNAME) != 0)
        took = (time.monotonic() - began) * 1000
        time.sleep(QUIET_SECONDS)
        return took

    def unplug(self) -> None:
        """Remove it."""
        self._annotate(self._stays)
        self._until(lambda: self._index(IFNAME) == 0)
        time.sleep(QUIET_SECONDS)

    def delete(self) -> float:
        """Delete the interface; milliseconds until it is there again."""
        before = self._index(IFNAME)
        with PodNetns(self._netns) as pod, pod.inside():
            kernel = pod.pod
            began = time.monotonic()
            kernel.delete_link(before)
        self._until(lambda: self._index(IFNAME) not in (0, before))
        took = (time.monotonic() - began) * 1000
        time.sleep(QUIET_SECONDS)
        return took

    def _annotate(self, *elements: dict[str, Any]) -> None:
        patch = {"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": json.dumps(elements)}}}
        self._made.server.client.merge(self._path, patch)

    def _index(self, ifname: str) -> int:
        """The index of the pod's interface if it is up, else 0."""
        with PodNetns(self._netns) as pod, pod.inside():
            link = pod.pod.find_link(ifname)
        return link.index if link and link.is_up else 0

    @staticmethod
    def _until(holds: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            if time.monotonic() > end:
                raise TimeoutError("the pod's networks do not follow")
            time.sleep(0.0005)


if __name__ == "__main__":
    main()
