"""A Kubernetes cluster of real nodes: control plane beside the tests, containerd and kubelet in a scratch machine.

There is no kube-proxy and no DNS. The API server reaches the kubelet (`way_in`), so there are `kubectl exec` and
`kubectl logs`, but not pods. The service `kubernetes` leads to the API server for what runs in the node's network.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests import packets
from tests.e2e import build_tools
from tests.e2e.apiserver import SERVICE_ADDRESS, ApiServer
from tests.e2e.cluster import images, programs
from tests.e2e.cluster.containerd import Containerd
from tests.e2e.cluster.kubelet import Kubelet
from tests.e2e.cluster.machine import ADDRESS, Machine
from tests.e2e.cluster.programs import NodeError
from tests.e2e.cluster.way_in import WayIn
from tests.e2e.kube_client import ApiError
from tests.e2e.server_process import ServerProcess

NAME: Final = "node-1"
"""Name of the node, of the first one where there are two."""

SECOND: Final = {"name": "node-2", "address": "192.0.2.11"}
"""Arguments of the second node: its name and its address."""

PRIMARY: Final[dict[str, Any]] = {
    "cniVersion": "1.0.0",
    "name": "primary",
    "plugins": [
        {"type": "ptp", "ipMasq": True, "ipam": {"type": "host-local", "subnet": "10.88.0.0/16"}},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ],
}
"""The node's primary network."""

LINKS: Final = ["eth0", "lo", "wire0"]
"""Links of a node without pods."""


@dataclass(frozen=True)
class Layout:
    """Directories of a distribution; the defaults are those of kubeadm with containerd."""

    bin_dir: str = "/opt/cni/bin"
    conf_dir: str = "/etc/cni/net.d"
    kubelet_dir: str = "/var/lib/kubelet"
    own_var_run: bool = False
    """True if `/var/run` is a directory of its own, False if it is a link to `/run`."""


class RealNode:
    """Use it as a context manager, then `start`."""

    def __init__(
        self,
        instead: Mapping[str, Path] | None = None,
        *,
        beside: RealNode | None = None,
        name: str = NAME,
        address: str = ADDRESS,
        gates: Sequence[str] = (),
    ) -> None:
        """`instead`: other programs than those of `build_tools` and the PATH, by name.

        `beside`: a node whose cluster this one joins; it is started first and closed last. `gates`: the feature gates
        of Kubernetes that are on besides those that are on anyway.

        Raises NodeError, `build_tools.ToolError`, `images.ImageError`, `certificates.OpensslError`.
        """
        programs.require()
        self._programs = build_tools.find_all(build_tools.NODE, instead)
        self.name = name
        self._is_first = beside is None
        self._gates = [f"--feature-gates={gate}=true" for gate in gates]
        self.layout = Layout()
        self._relays = contextlib.ExitStack()
        self._way_in = contextlib.ExitStack()
        self._controllers: list[ServerProcess] = []
        self.started_in: dict[str, float] = {}
        """Seconds from `start` to each step, for who measures."""
        with contextlib.ExitStack() as undo:
            if beside is None:
                self.server = ApiServer(*self._gates, is_controlled=True, instead=instead)
                undo.callback(self.server.__exit__)
            else:
                self.server = beside.server
            self.machine = Machine(name, SERVICE_ADDRESS, address=address)
            # Shared by the nodes of a cluster.
            self._namespaces: dict[str, Callable[[], str]] = beside._namespaces if beside else {}
            self._namespaces[address] = lambda: self.machine.netns
            undo.callback(self.machine.close)
            self._image = self.machine.root / "busybox.tar"
            images.busybox(self._image)
            other = (instead or {}).get("containerd")
            self.containerd = Containerd(self.machine, other and other.parent)
            kubeconfig = self.server.kubeconfig(f"system:node:{name}", ("system:nodes",))
            self.kubelet = Kubelet(self.machine, self._programs["kubelet"], name, kubeconfig, *self._gates)
            undo.pop_all()

    def __enter__(self) -> RealNode:
        return self

    def __exit__(self, *_: object) -> None:
        self._relays.close()
        self._way_in.close()
        try:
            self.machine.close()
        finally:
            for process in self._controllers:
                process.stop()
            if self._is_first:
                self.server.__exit__()

    # --- its life ----------------------------------------------------------------------------------------------------

    def start(self, primary: Mapping[str, Any] | None = None, timeout: float = 120) -> None:
        """Start the cluster, with `primary` as the node's CNI configuration.

        Back when the node is Ready; without a configuration, when it is registered.
        """
        begin = time.monotonic()

        def done(step: str) -> None:
            self.started_in[step] = round(time.monotonic() - begin, 2)

        if self._is_first:
            self._way_in.enter_context(WayIn(self.server.way_to_nodes, self._namespaces))
        with ThreadPoolExecutor(1) as beside:
            control_plane = beside.submit(self.server.__enter__) if self._is_first else None
            self.machine.boot()
            self._lay_out()
            if primary is not None:
                self.primary("10-primary.conflist", primary)
            self._start_containerd()
            self.containerd.import_image(self._image)
            done("containerd")
            if control_plane is not None:
                control_plane.result()
        done("API server")
        if self._is_first:
            self._start_controllers()
        self._connect()
        self._start_kubelet()
        self.wait_until(self._registered, "the node is registered", timeout)
        done("registered")
        if primary is not None:
            self.wait_ready(timeout)
            done("Ready")

    def reboot(self) -> None:
        """Power off without a warning, and on again: `/run` and the links are gone, `/var` and `/etc` are not.

        Back when the kubelet is started.
        """
        self._relays.close()
        self.machine.power_off()
        self.machine.boot()
        self._start_containerd()
        self._connect()
        self._start_kubelet()

    def move(self, layout: Layout, file: str, primary: Mapping[str, Any]) -> None:
        """Restart containerd and the kubelet with other directories, and `primary` as `file`. No pod may run."""
        self.kubelet.stop()
        self.containerd.kill()
        self.layout = layout
        self._lay_out()
        self.primary(file, primary)
        self._start_containerd()
        self._start_kubelet()
        self.wait_ready()

    def restart_kubelet(self) -> None:
        """SIGTERM and a new one."""
        self.kubelet.stop()
        self._start_kubelet()

    def kill_containerd(self, *, start: bool = True) -> None:
        """SIGKILL: the shims and the containers go on. `start`: and a new one."""
        self.containerd.kill()
        if start:
            self._start_containerd()

    def logs(self) -> str:
        """The ends of all logs, and the cluster's pods and events."""
        parts = [self.server.logs(), *(process.tail() for process in self._controllers), self.machine.tails()]
        for what in (["pods", "-A", "-o", "wide"], ["events", "-A"]):
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
                parts.append(f"--- {what[0]}:\n{self.kubectl('get', *what, timeout=10)}")
        return "\n".join(parts)

    # --- what a test does --------------------------------------------------------------------------------------------

    def kubectl(self, *arguments: str, stdin: str = "", timeout: float = 60) -> str:
        """Standard output of kubectl, as the cluster's administrator; raises AssertionError where it fails."""
        command = [str(self._programs["kubectl"]), "--kubeconfig", str(self.server.admin_kubeconfig), *arguments]
        # Its cache of what the server serves is this cluster's.
        env = {"PATH": os.environ["PATH"], "HOME": str(self.server.directory)}
        done = subprocess.run(command, input=stdin.encode(), env=env, capture_output=True, timeout=timeout, check=False)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr.decode().strip()}"
        return done.stdout.decode()

    def primary(self, file: str, config: Mapping[str, Any]) -> None:
        """Put a file into the runtime's directory, as the primary network's agent does."""
        directory = self.machine.path(self.layout.conf_dir)
        scratch = directory / f".{file}.new"
        scratch.write_text(json.dumps(config))
        scratch.rename(directory / file)

    def pod(self, name: str, *, networks: str | None = None, namespace: str = "default", **spec: Any) -> None:
        """Make a pod for the scheduler to place; it sleeps. `spec` adds to the pod's spec."""
        metadata: dict[str, Any] = {"name": name, "namespace": namespace}
        if networks is not None:
            metadata["annotations"] = {"k8s.v1.cni.cncf.io/networks": networks}
        # Its service account is made a moment after the namespace.
        self.wait_until(lambda: self._exists("ServiceAccount", "default", namespace), f"{namespace} has its account")
        pods = self.server.client.resource("v1", "Pod").path(namespace)
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**pod_spec(), **spec}}
        self.server.request("POST", pods, pod)

    def wait_running(self, *names: str, namespace: str = "default", timeout: float = 60) -> list[dict[str, Any]]:
        """Wait until pods are Running; the objects."""

        def running() -> bool:
            return all(self.server.get("v1", "Pod", name, namespace)["status"]["phase"] == "Running" for name in names)

        self.wait_until(running, f"{', '.join(names)} run", timeout)
        return [self.server.get("v1", "Pod", name, namespace) for name in names]

    def delete_pod(self, name: str, namespace: str = "default", timeout: float = 60) -> None:
        """Delete a pod as a user does; back when it is gone from the API and its sandbox from the node."""
        self.server.delete_pod(name, namespace, grace=1)
        self.wait_until(lambda: not self._exists("Pod", name, namespace), f"{name} is gone", timeout)
        self.wait_until(lambda: not self.containerd.sandboxes(name, namespace), f"{name}'s sandbox is gone", timeout)

    def remove_pods(self, namespace: str = "default", timeout: float = 120) -> None:
        """Delete all pods of a namespace, and wait until they are gone."""
        pods = self.server.client.resource("v1", "Pod").path(namespace)
        found = [pod["metadata"]["name"] for pod in self.server.request("GET", pods)["items"]]
        for name in found:
            self.server.delete_pod(name, namespace, grace=1)
        for name in found:
            self.delete_pod(name, namespace, timeout)

    def wait_ready(self, timeout: float = 60, *, ready: bool = True) -> None:
        """Wait until the node is Ready, or is not."""
        wanted = "True" if ready else "False"
        self.wait_until(lambda: self._condition("Ready") == wanted, f"Ready is {wanted}", timeout)

    def wait_until(self, holds: Callable[[], bool], what: str, timeout: float = 60) -> None:
        """Wait for something that the cluster does by itself. Raises NodeError, with the logs."""
        deadline = time.monotonic() + timeout
        while not holds():
            if time.monotonic() > deadline:
                raise NodeError(f"not within {timeout:.0f} s: {what}\n{self.logs()}")
            time.sleep(0.05)

    # --- what there is on the node -----------------------------------------------------------------------------------

    def in_pod(self, pod: str, *command: str, namespace: str = "default") -> str:
        """Standard output of a program of the machine's in a pod's network namespace."""
        return self.machine.run("nsenter", f"--net={self.containerd.netns(pod, namespace)}", *command)

    def replies(self, address: str, pod: str = "", **options: Any) -> int:
        """Send echo requests from the node, or from a pod; how many were answered: `packets.replies`."""
        inside = str(self.machine.path(self.containerd.netns(pod, "default"))) if pod else self.machine.netns
        return packets.replies(address, netns=inside, **options)

    def ip(self, *arguments: str, pod: str = "", namespace: str = "default") -> Any:
        """`ip -j ARGUMENTS` on the node, or in a pod."""
        command = ("ip", "-j", *arguments)
        text = self.in_pod(pod, *command, namespace=namespace) if pod else self.machine.run(*command)
        return json.loads(text or "[]")

    def links(self, pod: str = "", namespace: str = "default") -> list[str]:
        """Names of the links on the node, or in a pod."""
        return sorted(link["ifname"] for link in self.ip("link", pod=pod, namespace=namespace))

    def files(self, directory: str) -> list[str]:
        """The regular files below a directory of the machine's, relative to it."""
        top = self.machine.path(directory)
        return sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_file())

    def container_log(self, pod: str, namespace: str = "default") -> str:
        """Return the log of all containers of a pod."""
        logs = self.machine.path("/var/log/pods").glob(f"{namespace}_{pod}_*/*/*.log")
        return "".join(path.read_text() for path in sorted(logs))

    # --- how it is made ----------------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        layout = self.layout
        for path in (Layout.bin_dir, Layout.conf_dir, layout.bin_dir, layout.conf_dir):
            # What the outer machine, or another layout, has there is not the node's.
            shutil.rmtree(self.machine.path(path), ignore_errors=True)
        for path in (layout.bin_dir, layout.conf_dir, "/etc/kubernetes"):
            self.machine.path(path).mkdir(parents=True, exist_ok=True)
        for plugin in programs.REFERENCE.iterdir():
            shutil.copy(plugin, self.machine.path(layout.bin_dir) / plugin.name)
        run = "mkdir /var/run" if layout.own_var_run else "ln -s /run /var/run"
        self.machine.run("sh", "-c", f"rm -rf /var/run && {run}")
        self.containerd.configure(layout.bin_dir, layout.conf_dir)
        self.kubelet.configure(self.server.ca_file, layout.kubelet_dir)

    def _start_containerd(self) -> None:
        self.containerd.start()
        self.wait_until(self.containerd.answers, "containerd answers")

    def _start_controllers(self) -> None:
        common = [f"--kubeconfig={self.server.admin_kubeconfig}", "--leader-elect=false", "--secure-port=0"]
        common += self._gates
        manager = [
            *common,
            f"--service-account-private-key-file={self.server.sign_key}",
            f"--root-ca-file={self.server.ca_file}",
            "--node-monitor-period=1s",
        ]
        for name, flags in (("kube-controller-manager", manager), ("kube-scheduler", common)):
            process = ServerProcess(name, [str(self._programs[name]), *flags], self.server.directory)
            self._controllers.append(process)
            process.start()

    def _connect(self) -> None:
        for as_service in (False, True):
            self._relays.enter_context(self.server.reachable_in(self.machine.netns, as_service=as_service))

    def _start_kubelet(self) -> None:
        self.wait_until(self.kubelet.is_up, "the kubelet runs")

    def _registered(self) -> bool:
        return self._exists("Node", self.name)

    def _exists(self, kind: str, name: str, namespace: str = "default") -> bool:
        try:
            self.server.get("v1", kind, name, namespace)
        except ApiError as error:
            if error.code != 404:
                raise
            return False
        return True

    def _condition(self, kind: str) -> str:
        node = self.server.get("v1", "Node", self.name)
        found = [item["status"] for item in node["status"].get("conditions", []) if item["type"] == kind]
        return found[0] if found else "Unknown"


def pod_spec() -> dict[str, Any]:
    """The spec of a pod that sleeps, and ends when told."""
    container = {"name": "main", "image": images.BUSYBOX, "imagePullPolicy": "Never"}
    return {"containers": [container], "terminationGracePeriodSeconds": 1}
