"""A Kubernetes cluster of one real node: control plane beside the tests, containerd and kubelet in a scratch machine.

There is no kube-proxy and no DNS. The API server doesn't reach into the machine, so there is no `kubectl exec` or
`kubectl logs`: use `in_pod` and `container_log`. The service `kubernetes` leads to the API server for what runs in the
node's network.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.e2e import build_tools
from tests.e2e.apiserver import SERVICE_ADDRESS, ApiServer
from tests.e2e.cluster import boot, images
from tests.e2e.cluster.machine import Machine, MachineProcess
from tests.e2e.kube_client import ApiError
from tests.e2e.server_process import ServerProcess

NAME: Final = "node-1"
"""Of the node."""

PACKAGES: Final = {
    "containerd": "containerd",
    "ctr": "containerd",
    "containerd-shim-runc-v2": "containerd",
    "runc": "runc",
    "busybox": "busybox-static",
    "iptables": "iptables",
    "nsenter": "util-linux",
    "ip": "iproute2",
}
"""Debian's package of each program that is needed besides those that `build_tools` makes."""

REFERENCE: Final = Path(os.environ.get("CNI_REFERENCE_DIR", "/usr/lib/cni"))
"""Where the reference plugins come from."""

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
"""What a node without pods has."""

_CONTAINERD: Final = "/run/containerd/containerd.sock"
_KUBELET_RUNS: Final = b"Starting kubelet main sync loop"
_KIND: Final = "io.cri-containerd.kind"


class NodeError(Exception):
    """The machine can't run a node; the message says what is missing, or the node did not do what was asked in time."""


@dataclass(frozen=True)
class Sandbox:
    """A pod's sandbox, as containerd has it."""

    identifier: str
    """The container id that CNI plugins get."""
    pod: str
    namespace: str
    netns: str
    """Path inside the machine; empty where the pod is in the node's network."""
    created: str
    """RFC 3339."""

    @classmethod
    def read(cls, info: dict[str, Any]) -> Sandbox:
        """Of what `ctr containers info` says."""
        labels = info["Labels"]
        paths = [item.get("path", "") for item in info["Spec"]["linux"]["namespaces"] if item["type"] == "network"]
        return cls(
            info["ID"],
            labels["io.kubernetes.pod.name"],
            labels["io.kubernetes.pod.namespace"],
            "".join(paths).replace("/var/run/", "/run/", 1),
            info["CreatedAt"],
        )


class RealNode:
    """Use it as a context manager, then `start`."""

    def __init__(self) -> None:
        """Raises NodeError, `build_tools.ToolError`, `images.ImageError`, `certificates.OpensslError`."""
        _require_programs()
        self._programs = {name: build_tools.find(name) for name in build_tools.NODE}
        self._relays = contextlib.ExitStack()
        self._controllers: list[ServerProcess] = []
        self._containerd: MachineProcess | None = None
        self._kubelet: MachineProcess | None = None
        self._imported: set[Path] = set()
        self.started_in: dict[str, float] = {}
        """Seconds from `start` to each step, for who measures."""
        with contextlib.ExitStack() as undo:
            self.server = ApiServer(is_controlled=True)
            undo.callback(self.server.__exit__)
            self.machine = Machine(NAME, SERVICE_ADDRESS)
            undo.callback(self.machine.close)
            self._image = self.machine.root / "busybox.tar"
            images.busybox(self._image)
            self.kubeconfig = self.server.kubeconfig(f"system:node:{NAME}", ("system:nodes",))
            undo.pop_all()

    def __enter__(self) -> RealNode:
        return self

    def __exit__(self, *_: object) -> None:
        self._relays.close()
        try:
            self.machine.close()
        finally:
            for process in self._controllers:
                process.stop()
            self.server.__exit__()

    # --- its life ----------------------------------------------------------------------------------------------------

    def start(self, primary: Mapping[str, Any] | None = None, timeout: float = 120) -> None:
        """Start the cluster, with `primary` as the node's CNI configuration.

        Back when the node is Ready; without a configuration, when it is registered.
        """
        begin = time.monotonic()

        def done(step: str) -> None:
            self.started_in[step] = round(time.monotonic() - begin, 2)

        with ThreadPoolExecutor(1) as beside:
            control_plane = beside.submit(self.server.__enter__)
            self.machine.boot()
            self._lay_out()
            if primary is not None:
                self.primary("10-primary.conflist", primary)
            self._start_containerd()
            self.import_image(self._image)
            done("containerd")
            control_plane.result()
        done("API server")
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

    def restart_kubelet(self) -> None:
        """SIGTERM and a new one."""
        self.kubelet.stop()
        self._start_kubelet()

    def kill_containerd(self, *, start: bool = True) -> None:
        """SIGKILL: the shims and the containers go on. `start`: and a new one."""
        self.containerd.stop(signal.SIGKILL)
        if start:
            self._start_containerd()

    @property
    def kubelet(self) -> MachineProcess:
        """The kubelet's process."""
        assert self._kubelet is not None, "the node is not started"
        return self._kubelet

    @property
    def containerd(self) -> MachineProcess:
        """containerd's process."""
        assert self._containerd is not None, "the node is not started"
        return self._containerd

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

    def import_image(self, tar: Path) -> None:
        """Give the node an image, from a tar file of Docker's or OCI's layout; it stays."""
        if tar in self._imported:
            return
        command = ["ctr", "--address", _CONTAINERD, "-n", "k8s.io", "images", "import", "--no-unpack", str(tar)]
        self.machine.run(*command, timeout=300)
        self._imported.add(tar)

    def primary(self, file: str, config: Mapping[str, Any]) -> None:
        """Put a file into `/etc/cni/net.d`, as the primary network's agent does."""
        directory = self.machine.path("/etc/cni/net.d")
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
        self.wait_until(lambda: not self.sandboxes(name, namespace), f"{name}'s sandbox is gone", timeout)

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

    def sandboxes(self, pod: str = "", namespace: str = "default") -> list[Sandbox]:
        """The sandboxes on the node, or those of one pod, that have a network namespace; the newest last.

        A sandbox that has been stopped has none, and is forgotten by the kubelet up to a minute later.
        """
        wanted = [f"labels.{json.dumps(_KIND)}==sandbox"]
        if pod:
            labels = {"io.kubernetes.pod.name": pod, "io.kubernetes.pod.namespace": namespace}
            wanted += [f"labels.{json.dumps(key)}=={value}" for key, value in labels.items()]
        found = []
        for identifier in self.ctr("containers", "list", "--quiet", ",".join(wanted)).split():
            # It may go in between.
            with contextlib.suppress(AssertionError):
                sandbox = Sandbox.read(json.loads(self.ctr("containers", "info", identifier)))
                if sandbox.netns and self.machine.path(sandbox.netns).exists():
                    found.append(sandbox)
        return sorted(found, key=lambda sandbox: sandbox.created)

    def netns(self, pod: str, namespace: str = "default") -> str:
        """Path, inside the machine, of a running pod's network namespace."""
        found = self.sandboxes(pod, namespace)
        assert found, f"no sandbox of {namespace}/{pod} is on the node"
        return found[-1].netns

    def in_pod(self, pod: str, *command: str, namespace: str = "default") -> str:
        """Standard output of a program of the machine's in a pod's network namespace."""
        return self.machine.run("nsenter", f"--net={self.netns(pod, namespace)}", *command)

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

    def ctr(self, *arguments: str) -> str:
        """Standard output of containerd's `ctr`, in the namespace of Kubernetes."""
        return self.machine.run("ctr", "--address", _CONTAINERD, "-n", "k8s.io", *arguments)

    def container_log(self, pod: str, namespace: str = "default") -> str:
        """What a pod's containers have written."""
        logs = self.machine.path("/var/log/pods").glob(f"{namespace}_{pod}_*/*/*.log")
        return "".join(path.read_text() for path in sorted(logs))

    # --- how it is made ----------------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        plugins, configuration = (self.machine.path(path) for path in ("/opt/cni/bin", "/etc/cni/net.d"))
        for directory in (plugins, configuration):
            # What the outer machine has there is not the node's.
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        for plugin in REFERENCE.iterdir():
            shutil.copy(plugin, plugins / plugin.name)
        kubelet = self.machine.path("/etc/kubernetes")
        kubelet.mkdir(exist_ok=True)
        (kubelet / "containerd.toml").write_text(_CONTAINERD_CONFIG)
        (kubelet / "kubelet.yaml").write_text(yaml.safe_dump(self._kubelet_config()))

    def _start_containerd(self) -> None:
        self._containerd = self.machine.start("containerd", "containerd", "--config", "/etc/kubernetes/containerd.toml")
        self.wait_until(self._containerd_answers, "containerd answers")

    def _containerd_answers(self) -> bool:
        try:
            self.ctr("plugins", "list")
        except AssertionError:
            return False
        return True

    def _start_controllers(self) -> None:
        common = [f"--kubeconfig={self.server.admin_kubeconfig}", "--leader-elect=false", "--secure-port=0"]
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

    def _start_kubelet(self, timeout: float = 60) -> None:
        """Start it until it stays, as systemd does: it ends where containerd is still looking at its sandboxes."""
        log = self.machine.logs / "kubelet.log"
        deadline = time.monotonic() + timeout
        begin = 0
        while time.monotonic() < deadline:
            if self._kubelet is None or not self._kubelet.running:
                begin = log.stat().st_size if log.exists() else 0
                self._run_kubelet()
            if _KUBELET_RUNS in log.read_bytes()[begin:]:
                return
            time.sleep(0.05)
        raise NodeError(f"the kubelet does not start within {timeout:.0f} s\n{self.logs()}")

    def _run_kubelet(self) -> None:
        self._kubelet = self.machine.start(
            "kubelet",
            str(self._programs["kubelet"]),
            "--config=/etc/kubernetes/kubelet.yaml",
            f"--kubeconfig={self.kubeconfig}",
            f"--hostname-override={NAME}",
            f"--node-ip={boot.ADDRESS}",
        )

    def _kubelet_config(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{_CONTAINERD}",
            "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": str(self.server.ca_file)}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self.machine.cgroup,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            # It is the outer machine whose disk and memory it would watch.
            "evictionHard": dict.fromkeys(("imagefs.available", "memory.available", "nodefs.available"), "0%"),
            "imageGCHighThresholdPercent": 100,
            "makeIPTablesUtilChains": False,
            "resolvConf": "",
            "nodeStatusUpdateFrequency": "1s",
            "syncFrequency": "10s",
            "shutdownGracePeriod": "0s",
            "maxPods": 250,
            "serializeImagePulls": False,
        }

    def _registered(self) -> bool:
        return self._exists("Node", NAME)

    def _exists(self, kind: str, name: str, namespace: str = "default") -> bool:
        try:
            self.server.get("v1", kind, name, namespace)
        except ApiError as error:
            if error.code != 404:
                raise
            return False
        return True

    def _condition(self, kind: str) -> str:
        node = self.server.get("v1", "Node", NAME)
        found = [item["status"] for item in node["status"].get("conditions", []) if item["type"] == kind]
        return found[0] if found else "Unknown"


def pod_spec() -> dict[str, Any]:
    """The spec of a pod that sleeps, and ends when told."""
    container = {"name": "main", "image": images.BUSYBOX, "imagePullPolicy": "Never"}
    return {"containers": [container], "terminationGracePeriodSeconds": 1}


def _require_programs() -> None:
    """Raises NodeError."""
    if os.geteuid() != 0:
        raise NodeError("a node needs root")
    missing = {package for program, package in PACKAGES.items() if not shutil.which(program)}
    if not (REFERENCE / "bridge").exists():
        missing.add("containernetworking-plugins")
    if missing:
        raise NodeError(f"a node needs programs that are not here: apt-get install {' '.join(sorted(missing))}")
    if not any(line.split()[-1] == "overlay" for line in Path("/proc/filesystems").read_text().splitlines()):
        raise NodeError("a node needs the overlay file system, which this kernel does not have: modprobe overlay")


# NB: without CAP_SYS_RESOURCE no process may lower its oom_score_adj; the option takes what is allowed.
_CONTAINERD_CONFIG: Final = f"""\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "{_CONTAINERD}"
[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{images.BUSYBOX}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/opt/cni/bin"
    conf_dir = "/etc/cni/net.d"
"""
