"""A cluster for a bench: a real API server, and nodes on it where our daemon runs, or another implementation's.

The nodes reach the server over a veth pair each, not through a relay in this process: that would take part in the
time. The server listens in the bench's own network namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from bench import sides, verdict
from bench.program import Run, processor_seconds, run
from bench.sides import Daemon, Size, Spaces
from tests.e2e import build_tools
from tests.e2e.apiserver import SERVICE_ADDRESS, ApiServer
from tests.e2e.build_tools import ToolError
from tests.e2e.memory_group import MemoryGroup
from tests.e2e.node import NAD, Node
from tests.e2e.server_process import ServerProcess

MANIFESTS: Final = Path(__file__).parents[1] / "manifests" / "base"
USER: Final = "system:serviceaccount:kube-system:multus-daemon"
"""User name of our daemon in the cluster."""


@dataclass(frozen=True)
class Implementation:
    """Another implementation's two programs."""

    shim: Path
    daemon: Path
    version: str


def implementation() -> Implementation | None:
    """Return the pair that BENCH_PEER_SHIM and BENCH_PEER_DAEMON name, else upstream from `make e2e`, else None."""
    named = [os.environ.get(f"BENCH_PEER_{name}") for name in ("SHIM", "DAEMON")]
    if named[0] and named[1]:
        return Implementation(Path(named[0]), Path(named[1]), os.environ.get("BENCH_PEER_VERSION", "BENCH_PEER_DAEMON"))
    try:
        daemon, shim = (build_tools.find(name) for name in build_tools.PREDECESSOR)
    except ToolError:
        return None
    module = (build_tools.UPSTREAM / "go.mod").read_text()
    version = re.search(r"multus-cni\.v4 (v\S+)", module)
    return Implementation(shim, daemon, f"upstream {version[1] if version else ''}".strip())


class Cluster:
    """Use it as a context manager."""

    def __init__(self, server: ApiServer, sizes: Sequence[Size], workers: int) -> None:
        """Every node that is added later has pods of these sizes, for so many workers."""
        self.server = server
        self._sizes, self._workers = sizes, workers
        self._stack = contextlib.ExitStack()
        self._numbers = iter(range(1, 250))
        self.uids: dict[str, dict[str, str]] = {}

    def __enter__(self) -> Cluster:
        self._stack.enter_context(self.server)
        subprocess.run(["ip", "address", "add", f"{SERVICE_ADDRESS}/32", "dev", "lo"], check=True)
        for name in ("crd.yaml", "rbac.yaml"):
            documents = [item for item in yaml.safe_load_all((MANIFESTS / name).read_text()) if item]
            if name == "crd.yaml":
                self.server.install_crd(*documents)
            else:
                self.server.apply(*documents)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ours(self, name: str, *, binaries: bool = False, group: MemoryGroup | None = None, **settings: Any) -> Daemon:
        """Our daemon on a new node; not started."""
        node = self._node(name, group=group)
        token = node.root / "token"
        token.write_text(self.server.service_account_token("kube-system", "multus-daemon"))
        node.settings |= {
            "logLevel": "error",
            "kubeconfig": str(self._reached_from_nodes(self.server.kubeconfig_for_token(token))),
            "multusNamespace": name,
            **settings,
        }
        node.node_name = name
        side = Daemon(node, name, binaries=binaries, pods=self.uids)
        side.namespace = name
        return side

    def peer(self, program: Implementation, name: str = "peer", wrapper: Sequence[str] = ()) -> Peer:
        """The other implementation's daemon on a new node; not started."""
        return Peer(self, self._node(name, wrapper=tuple(wrapper)), name, program)

    def pod(self, node_name: str, name: str, size: Size) -> None:
        """Make a pod of the node known, and remember its UID."""
        annotations = sides.pod_annotations(size, node_name)
        made = self.server.create_pod(name, namespace=node_name, node=node_name, annotations=annotations, running=False)
        self.uids.setdefault(node_name, {})[name] = made["metadata"]["uid"]

    def _node(self, name: str, **how: Any) -> Node:
        """A node with its objects and its way to the server."""
        node = self._stack.enter_context(Node(standalone=False, **how))
        number = next(self._numbers)
        space, inside, outside = Path(node.host).name, "uplink", f"bench{number}"
        for command in (
            f"ip link add {outside} type veth peer name {inside} netns {space}",
            f"ip address add 192.0.2.{number}/32 peer 198.51.100.{number} dev {outside}",
            f"ip link set {outside} up",
            f"ip -n {space} address add 198.51.100.{number}/32 peer 192.0.2.{number} dev {inside}",
            f"ip -n {space} link set {inside} up",
            f"ip -n {space} route add {SERVICE_ADDRESS} via 192.0.2.{number}",
        ):
            subprocess.run(command.split(), check=True)
        server = self.server
        server.create_namespace(name)
        server.create_node(name)
        for network, config in sides.definitions(node.networks_dir).items():
            metadata = {"namespace": name, "name": network}
            server.apply({**NAD, "metadata": metadata, "spec": {"config": json.dumps(config)}})
        for size in self._sizes:
            for worker in range(self._workers):
                self.pod(name, f"pod{size}-{worker}", size)
        return node

    def _reached_from_nodes(self, kubeconfig: Path) -> Path:
        text = kubeconfig.read_text()
        kubeconfig.write_text(text.replace("https://127.0.0.1:", f"https://{SERVICE_ADDRESS}:"))
        return kubeconfig

    def credentials_of_the_peer(self, node: Node, node_name: str) -> dict[str, Any]:
        """A certificate of the node, where upstream's daemon looks for it, with the rights of upstream's manifest."""
        user = f"system:multus:{node_name}"
        pair = self.server.authority.client(user.replace(":", "-"), user, ("system:multus",))
        folder = node.root / "certificates"
        folder.mkdir(mode=0o700)
        current = folder / "multus-client-current.pem"
        current.write_bytes(pair.certificate.read_bytes() + pair.key.read_bytes())
        current.chmod(0o600)
        rules = [
            {"apiGroups": ["k8s.cni.cncf.io"], "resources": ["*"], "verbs": ["*"]},
            {"apiGroups": [""], "resources": ["pods", "pods/status"], "verbs": ["get", "list", "watch", "update"]},
            {"apiGroups": ["", "events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch", "update"]},
        ]
        named = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": f"peer-{node_name}"}}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": f"peer-{node_name}"}
        subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}
        self.server.apply(
            {**named, "kind": "ClusterRole", "rules": rules},
            {**named, "kind": "ClusterRoleBinding", "roleRef": role, "subjects": [subject]},
        )
        return {
            "enabled": True,
            "bootstrapKubeconfig": str(self._reached_from_nodes(self.server.kubeconfig(user, ["system:multus"]))),
            "certDir": str(folder),
            "certDuration": "24h",
        }


class Peer:
    """Another implementation with upstream's configuration and socket: its daemon, and its shim.

    It runs as upstream's manifest has it, with the reference plugins as binaries.
    """

    def __init__(self, cluster: Cluster, node: Node, name: str, program: Implementation) -> None:
        self.name = name
        self.node = node
        self._cluster, self._program = cluster, program
        self.netns = Spaces(node)
        sides.copy_programs(node.bin_dir, sides.ALL_TYPES)
        folder = node.root / "net.d"
        folder.mkdir()
        (folder / "10-cluster.conf").write_text(json.dumps(sides.definitions(node.networks_dir)["cluster"]))
        self._generated = folder / "00-multus.conf"
        settings = {key: value for key, value in node.settings.items() if key != "clusterNetwork"} | {
            # The other directory is mounted for our daemon only.
            "chrootDir": "/",
            "cniConfigDir": str(folder),
            "multusAutoconfigDir": str(folder),
            "multusConfigFile": "auto",
            "logLevel": "error",
            "logToStderr": True,
            "perNodeCertificate": cluster.credentials_of_the_peer(node, name),
        }
        node.config.write_text(json.dumps(settings))
        inside = ["ip", "netns", "exec", Path(node.host).name, *node.wrapper, "env", f"MULTUS_NODE_NAME={name}"]
        self.process = ServerProcess("peer", [*inside, str(program.daemon), "-config", str(node.config)], node.root)
        self._stdin = b""

    def start(self, timeout: float = sides.START) -> None:
        """Start it; back when it answers on its socket and has written the runtime's configuration."""
        self._generated.unlink(missing_ok=True)
        self.process.start()
        deadline = time.monotonic() + timeout
        while not (self._generated.exists() and self._generated.stat().st_size) or self.node.get("/healthz")[0] != 200:
            if not self.process.running or time.monotonic() > deadline:
                raise sides.FailedError(f"{self._program.daemon} is not ready\n{self.process.tail()}")
            time.sleep(0.005)
        self._stdin = self._generated.read_bytes()

    def stop(self) -> None:
        """End it."""
        self.process.stop(signal.SIGKILL)

    def call(self, verb: str, container: str, size: Size, worker: int = 0, pod: str = "") -> Run:
        """Run its shim."""
        pod = pod or f"pod{size}-{worker}"
        uid = self._cluster.uids[self.name][pod]
        environment = self.node.environment(verb, container, self.netns[worker], pod, self.name, uid)
        stdin = sides.with_runtime_config(self._stdin, size, worker)
        return run(self._program.shim, environment | {"PATH": os.environ["PATH"]}, stdin)

    def processor(self) -> float:
        """The daemon's, and that of the plugin processes that it has started."""
        return processor_seconds(self.process.pid)


@contextlib.contextmanager
def started(sizes: Sequence[Size], workers: int) -> Iterator[Cluster]:
    """A cluster without nodes; skips the bench where its programs are missing."""
    if shutil.which("openssl") is None:
        verdict.skip("needs the program `openssl`: install openssl")
    try:
        server = ApiServer("--bind-address=0.0.0.0")
    except ToolError as error:
        verdict.skip(str(error))
    with Cluster(server, sizes, workers) as cluster:
        yield cluster
