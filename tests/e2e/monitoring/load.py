"""Pods that come and go on two nodes, with networks of built-in plugins and of a plugin that sometimes fails."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.e2e.monitoring.cluster import Cluster
from tests.e2e.monitoring.prometheus import METRICS_PORT, Prometheus
from tests.e2e.node import Node
from tests.fakes.apiserver import PODS
from tests.programs import needed

_ROOT = Path(__file__).parents[3]
NODES = ("node-a", "node-b")
NETWORKS = {"storage": "10.81.1.0/28", "backup": "10.81.2.0/28"}
"""Networks of the built-in `ptp`, each with 13 addresses for pods."""
SHARED = "lan"
"""A network with addresses of the whole cluster."""
PLUGIN = "fabric"
STANDING = 4
"""Pods of each node that stay."""

_SCRIPT = """
n=0
if [ $CNI_COMMAND = ADD ]; then
    n=$(cat {root}/calls 2>/dev/null || echo 0); n=$((n + 1)); echo $n > {root}/calls
    if [ $((n % 6)) = 0 ]; then echo '{{"code": 117, "msg": "the fabric is away"}}'; exit 1; fi
fi
sleep 0.0$((n % 8))
[ $CNI_COMMAND = DEL ] || echo '{{"cniVersion": "1.0.0"}}'
"""


class Loaded:
    """One node of a cluster of its own; its daemon follows the API server."""

    def __init__(self, node: Node, name: str, cluster: Cluster) -> None:
        self.node, self.name, self.cluster = node, name, cluster
        self._pings: list[subprocess.Popen[bytes]] = []
        node.settings |= {"metricsPort": METRICS_PORT, "metricsAddress": "127.0.0.1", "reconcileSeconds": 0.5}
        cluster.serve(node)
        ipam = {"type": "host-local", "dataDir": str(node.networks_dir)}
        ranges = {"cluster": "10.81.0.0/24"} | NETWORKS
        for network, subnet in ranges.items():
            plugin = {"type": "ptp", "ipam": ipam | {"subnet": subnet}}
            self._network(network, plugin, "kube-system" if network == "cluster" else "default")
        lan = {"type": "whereabouts", "range": "10.81.3.0/28", "range_start": "10.81.3.2", "gateway": "10.81.3.1"}
        self._network(SHARED, {"type": "ptp", "ipam": lan}, "default")
        self._network(PLUGIN, {"type": PLUGIN}, "default")
        node.plugin(PLUGIN, _SCRIPT.format(root=node.root))

    def _network(self, name: str, plugin: Mapping[str, object], namespace: str) -> None:
        config = json.dumps({"cniVersion": "1.0.0", "name": name, **plugin})
        self.cluster.do(lambda: self.cluster.server.add_network(name, namespace=namespace, config=config))

    def pod(self, name: str, networks: str) -> None:
        """Declare a pod of this node."""
        annotations = {"k8s.v1.cni.cncf.io/networks": networks}
        metadata = {"namespace": "default", "name": name, "uid": f"uid-{name}", "annotations": annotations}
        item = {"metadata": metadata, "spec": {"nodeName": self.name, "containers": [{"name": "c"}]}}
        self.cluster.do(lambda: self.cluster.server.put(PODS, item))

    def standing(self) -> None:
        """Start the pods that stay, each of which sends packets; a network of the last one is broken."""
        netns = ""
        for number in range(STANDING):
            name = f"stays-{number}"
            self.pod(name, ",".join((*NETWORKS, SHARED)))
            netns = self.node.add_netns()
            answer = self.node.cni("ADD", name, netns, name)
            assert answer.code == 0, answer.stdout
            sender = [sys.executable, "-m", "tests.packets", "10.81.1.1", "0.2", str(100 * number)]
            self._pings.append(subprocess.Popen([needed("nsenter"), f"--net={netns}", *sender], cwd=_ROOT))
        subprocess.run([needed("ip"), "-n", Path(netns).name, "link", "set", "net2", "down"], check=True)

    def end(self) -> None:
        """End what sends packets."""
        for ping in self._pings:
            ping.kill()
            ping.wait()

    def churn(self, stop: threading.Event) -> None:
        """Start pods and delete them, one after the other."""
        netns = self.node.add_netns()
        for number in itertools.count():
            if stop.is_set():
                return
            name = f"goes-{number}"
            self.pod(name, ("storage", "backup,fabric", "fabric")[number % 3])
            self.node.cni("ADD", name, netns, name)
            self.node.cni("CHECK", name, netns, name)
            self.node.cni("DEL", name, netns, name)
            self.cluster.do(lambda name=name: self.cluster.server.delete(PODS, "default", name))
            stop.wait(0.1)


@contextlib.contextmanager
def running(make_node: Callable[..., Node], directory: Path, prometheus: Prometheus) -> Iterator[list[Loaded]]:
    """Two nodes under load while the block runs."""
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        nodes = []
        for name in NODES:
            folder = directory / name
            folder.mkdir()
            nodes.append(Loaded(make_node(), name, stack.enter_context(Cluster(folder, name))))
            stack.callback(nodes[-1].end)
            nodes[-1].node.start()
            prometheus.scraped.add(name, nodes[-1].node)
            stack.callback(prometheus.scraped.remove, name)
            nodes[-1].standing()
        threads = [threading.Thread(target=loaded.churn, args=(stop,)) for loaded in nodes]
        for thread in threads:
            thread.start()
        try:
            yield nodes
        finally:
            stop.set()
            for thread in threads:
                thread.join()
