"""The pods of `bench.density`: made at a rate, watched until they are Ready, and deleted; what a pod's group takes."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.e2e import build_tools
from tests.e2e.cluster import images
from tests.e2e.cluster.machine import hierarchies
from tests.e2e.cluster.real_node import RealNode
from tests.e2e.cluster.workload import host_local, network

NETWORK: Final = "density"
PORT: Final = 8080
PATIENCE_SECONDS: Final = 900.0
_CHAIN: Final = "DENSITY"
_TRAPPED: Final = "trap 'exit 0' TERM INT; {}while :; do sleep 3600 & wait; done"
_COLUMNS: Final = (
    r'{.metadata.name}{"|"}{.status.podIP}{"|"}{.status.conditions[?(@.type=="Ready")].status}'
    r'{"|"}{.metadata.deletionTimestamp}{"\n"}'
)
# Its own metric of this name, `kubelet_run_podsandbox_duration_seconds`, has the time before the call (v1.35).
_SANDBOXES: Final = r'(?m)^kubelet_runtime_operations_duration_seconds_{}\{{operation_type="run_podsandbox"\}} (\S+)$'


@dataclass
class Started:
    """How long the pods of a round took, in seconds."""

    servers: list[float] = field(default_factory=list)
    """From the creation of each web server until it is Ready."""
    clients: list[float] = field(default_factory=list)
    all: float = 0.0
    """From the first creation until the last pod is Ready."""


class Watch:
    """Notes when each pod is Ready for the first time; a context manager. A web server's service leads there then."""

    def __init__(self, node: RealNode) -> None:
        self._node = node
        self.ready: dict[str, float] = {}
        """Reading of the monotonic clock by the pod's name."""
        self._served: set[str] = set()
        command = [str(build_tools.find("kubectl")), "--kubeconfig", str(node.server.admin_kubeconfig)]
        self._command = [*command, "get", "pods", "--watch", "-o", f"jsonpath={_COLUMNS}"]

    def __enter__(self) -> Watch:
        iptables = ("iptables", "-w", "-t", "nat")
        self._node.machine.run(*iptables, "-N", _CHAIN)
        self._node.machine.run(*iptables, "-A", "PREROUTING", "-j", _CHAIN)
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()
        iptables = ("iptables", "-w", "-t", "nat")
        self._node.machine.run(*iptables, "-D", "PREROUTING", "-j", _CHAIN)
        self._node.machine.run(*iptables, "-F", _CHAIN)
        self._node.machine.run(*iptables, "-X", _CHAIN)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            name, address, ready, deleted = line.rstrip("\n").split("|")
            if ready == "True" and not deleted:
                self.ready.setdefault(name, time.monotonic())
            if address and name.startswith("server-") and name not in self._served:
                self._served.add(name)
                self._lead(service(int(name.partition("-")[2])), address)

    def _lead(self, at: str, address: str) -> None:
        """Do what kube-proxy does for a service."""
        rule = ("-d", at, "-p", "tcp", "--dport", str(PORT), "-j", "DNAT", "--to-destination", f"{address}:{PORT}")
        self._node.machine.run("iptables", "-w", "-t", "nat", "-A", _CHAIN, *rule)


def service(number: int) -> str:
    """Address of the service of a web server."""
    return f"10.96.1.{number + 1}"


def pod(name: str, number: int, *, attached: bool) -> dict[str, Any]:
    """A web server or a client."""
    container: dict[str, Any] = {"name": "main", "image": images.BUSYBOX, "imagePullPolicy": "Never"}
    serve = f"httpd -p {PORT} -h /etc; " if name.startswith("server-") else ""
    container["command"] = ["/bin/sh", "-c", _TRAPPED.format(serve)]
    if not serve:
        # Each container has the file /etc/hostname.
        ask = ["wget", "-q", "-O", "/dev/null", f"http://{service(number)}:{PORT}/hostname"]
        container["startupProbe"] = {"exec": {"command": ask}, "periodSeconds": 1, "failureThreshold": 600}
    spec = {
        "containers": [container],
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
    }
    annotations = {"k8s.v1.cni.cncf.io/networks": NETWORK} if attached else {}
    metadata = {"name": name, "annotations": annotations, "labels": {"bench": "density"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def define(node: RealNode) -> None:
    """Define the network that each pod has besides the cluster network."""
    ipam = host_local("192.168.200.0/24")
    network(node, NETWORK, {"type": "macvlan", "master": "eth0", "mode": "bridge", "ipam": ipam})


def start(node: RealNode, iterations: int, rate: float, *, attached: bool) -> Started:
    """Make the pods, `rate` of them a second, and wait until all are Ready. Raises NodeError."""
    path = node.server.client.resource("v1", "Pod").path("default")
    names = [(kind + str(number), number) for number in range(iterations) for kind in ("server-", "client-")]
    made: dict[str, float] = {}
    with Watch(node) as watch:
        begin = time.monotonic()
        for place, (name, number) in enumerate(names):
            time.sleep(max(0.0, begin + place / rate - time.monotonic()))
            made[name] = time.monotonic()
            node.server.request("POST", path, pod(name, number, attached=attached))
        node.wait_until(lambda: len(watch.ready) == len(names), "all pods are Ready", PATIENCE_SECONDS)
        found = Started(all=max(watch.ready.values()) - begin)
        for name, ready in watch.ready.items():
            (found.servers if name.startswith("server-") else found.clients).append(ready - made[name])
    return found


def delete(node: RealNode) -> float:
    """Delete the pods at once; seconds until all are gone. Raises NodeError."""
    begin = time.monotonic()
    path = "/api/v1/namespaces/default/pods"
    node.server.request("DELETE", path, gracePeriodSeconds=1, labelSelector="bench=density")
    node.wait_until(lambda: not node.server.request("GET", path)["items"], "all pods are gone", PATIENCE_SECONDS)
    return time.monotonic() - begin


def sandboxes(node: RealNode) -> tuple[float, float]:
    """Number of the sandboxes that the kubelet has had made, and the seconds that they took together."""
    text = node.kubectl("get", "--raw", f"/api/v1/nodes/{node.name}/proxy/metrics")
    count, total = (sum(map(float, re.findall(_SANDBOXES.format(what), text))) for what in ("count", "sum"))
    return count, total


class Group:
    """Control group of the pod with the daemon; in it are the plugins that the daemon starts, too."""

    def __init__(self, node: RealNode, uid: str) -> None:
        tops = [hierarchy / node.machine.root.name for hierarchy in hierarchies()]
        self._paths = [path for top in tops if top.exists() for path in top.rglob(f"pod{uid}")]

    def processor(self) -> float:
        """Seconds of processor time so far."""
        if path := self._file("cpuacct.usage"):
            return int(path.read_text()) / 1e9
        return self._count("cpu.stat", "usage_usec") / 1e6

    def anonymous(self) -> int:
        """Bytes of anonymous memory."""
        return self._count("memory.stat", "total_rss|anon")

    def _count(self, file: str, name: str) -> int:
        path = self._file(file)
        found = path and re.search(rf"(?m)^(?:{name}) (\d+)$", path.read_text())
        assert found, f"no {name} in {file} of {self._paths}"
        return int(found[1])

    def _file(self, name: str) -> Path | None:
        return next((path / name for path in self._paths if (path / name).exists()), None)
