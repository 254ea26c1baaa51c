"""Upstream's thin plugin on a node: its own entrypoint makes its configuration, and a runtime's part is played here.

A runtime reads the first file of its directory and calls the program that the file names. With `/run` of the node as
`/run`, both programs find what they look for by default: the shim its daemon, the thin plugin namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests import packets
from tests.e2e import build_tools
from tests.e2e.node import NAD, Answer
from tests.e2e.rights import Container, of_folder
from tests.e2e.server_process import ServerProcess
from tests.e2e.takeover import Takeover
from tests.namespaces import entered
from tests.programs import needed

V3: Final = "v3.9.3"
V4: Final = "v4.3.0"

VERSIONS: Final = {V3: "0.3.1", V4: "1.0.0"}
"""CNI version of the networks: the newest that v3 and the oldest packages of plugins have in common, and a list's."""

RESOURCE: Final = "example.com/fast"
KINDS: Final = ("alone", "two", "ports", "chosen")
INTERFACES: Final = {
    "alone": ["eth0", "lo"],
    "two": ["data0", "eth0", "lo", "net1"],
    "ports": ["eth0", "lo", "net1", "net2"],
    "chosen": ["eth0", "lo", "net1"],
    "device": ["eth0", "lo", "net1"],
}
_DEFAULT: Final = "v1.multus-cni.io/default-network"
_INTERVAL: Final = 0.01


def program(release: str) -> Path:
    """Path of a release's thin plugin. Raises `build_tools.ToolError`."""
    return build_tools.find("upstream-multus" if release == V4 else "upstream-v3-multus")


def entrypoint(release: str, root: Path) -> list[str]:
    """Return the command line of a release's own entrypoint. Raises `build_tools.ToolError`."""
    if release == V4:
        return [str(build_tools.find("upstream-thin_entrypoint")), f"--multus-bin-file={program(V4)}"]
    module = build_tools.source("gopkg.in/k8snetworkplumbingwg/multus-cni.v3", build_tools.THIN_V3)
    script = (module / "images" / "entrypoint.sh").read_text()
    # Its option for the program's place does not work.
    before = "/usr/src/multus-cni/bin/multus"
    assert before in script
    copy = root / "entrypoint.sh"
    copy.write_text(script.replace(before, str(program(V3))))
    return [needed("bash"), str(copy)]


class Thin(Takeover):
    """A node whose pods the thin plugin attaches, and our daemon deletes; and the other way round."""

    release: str

    def lay_out_thin(self, reference: Path, release: str) -> None:
        """Networks, plugins and the cluster network's file; nothing of Multus is installed."""
        self.release = release
        self.version = VERSIONS[release]
        self.cached: dict[str, dict[str, Any]] = {}
        """The configuration of each pod's ADD, which CRI-O uses for its DEL."""
        self.results: dict[str, Any] = {}
        self.net_d = self.node.root / "net.d"
        self.lay_out(reference, cniVersion=self.version)
        # The built-ins that new pods get are no part of this; what is taken over is deleted by the binaries of its ADD.
        self._account()
        ipam = self.ipam("10.91.0.0/24", routes=[{"dst": "0.0.0.0/0"}])
        plugins = [
            {"type": "ptp", "mtu": 1450, "ipMasq": True, "ipam": ipam},
            {"type": "portmap", "snat": True, "capabilities": {"portMappings": True}},
        ]
        primary = {"cniVersion": self.version, "name": "pods", "plugins": plugins}
        (self.net_d / "10-pods.conflist").write_text(json.dumps(primary))
        run = self.node.root / "host-run"
        (run / "netns").mkdir(parents=True)
        (run / "multus").mkdir()
        (self.node.root / "run").mkdir(exist_ok=True)
        secret = run / "secrets" / "kubernetes.io" / "serviceaccount"
        secret.mkdir(parents=True)
        (secret / "token").write_text(self.server.service_account_token("kube-system", "thin"))
        shutil.copy(self.server.ca_file, secret / "ca.crt")
        options = [
            f"--cni-bin-dir={self.node.bin_dir}",
            f"--cni-conf-dir={self.net_d}",
            f"--multus-autoconfig-dir={self.net_d}",
            f"--multus-kubeconfig-file-host={self.net_d}/multus.d/multus.kubeconfig",
            "--multus-conf-file=auto",
            *([f"--multus-cni-conf-dir={self.node.root}/conf.d"] if release == V4 else []),
            *([f"--cni-version={self.version}"] if release == V3 else []),
        ]
        where = ["env", "KUBERNETES_SERVICE_HOST=127.0.0.1", f"KUBERNETES_SERVICE_PORT={self.server.port}"]
        command = self._on_host(*where, *entrypoint(release, self.node.root), *options)
        self._entrypoint = ServerProcess("thin", command, self.node.root)

    def _account(self) -> None:
        """The rights of upstream's thin manifest."""
        self.server.create_service_account("kube-system", "thin")
        rbac = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": f"thin-{self.name}"}}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": f"upstream-{self.name}"}
        subject = {"kind": "ServiceAccount", "name": "thin", "namespace": "kube-system"}
        self.server.apply({**rbac, "kind": "ClusterRoleBinding", "roleRef": reference, "subjects": [subject]})

    def _networks(self) -> None:
        version = self.version
        bridge = {"type": "bridge", "bridge": "br-two", "isGateway": True, "ipam": self.ipam("10.92.0.0/24")}
        # With a version and a name: of a list without, upstream's own DEL loses the addresses (its issue 1449).
        listed = {"cniVersion": version, "name": "listed", "plugins": [bridge, {"type": "tuning", "mtu": 1400}]}
        self.definition("listed", json.dumps(listed))
        ptp = {"type": "ptp", "ipam": self.ipam("10.95.0.0/24")}
        self.definition("ptp", json.dumps({"cniVersion": version, "name": "ptp", **ptp}))
        addressed = {"type": "bridge", "bridge": "br-lan", "ipam": {"type": "static"}}
        capabilities = {"capabilities": {"ips": True, "mac": True}}
        self.definition(
            "addressed", json.dumps({"cniVersion": version, "name": "addressed", **addressed, **capabilities})
        )
        plugins = [
            {"type": "ptp", "ipMasq": True, "ipam": self.ipam("10.96.0.0/24")},
            {"type": "portmap", "snat": True, "capabilities": {"portMappings": True}},
        ]
        self.definition("ports", json.dumps({"cniVersion": version, "name": "ports", "plugins": plugins}))
        chosen = {"type": "bridge", "bridge": "br-own", "isGateway": True, "ipam": self.ipam("10.97.0.0/24")}
        self.definition("chosen", json.dumps({"cniVersion": version, "name": "chosen", **chosen}))
        # Any plugin gets the device's id, and ptp has no use for it.
        device = {"cniVersion": version, "name": "device", "type": "ptp", "ipam": self.ipam("10.98.0.0/24")}
        annotations = {"k8s.v1.cni.cncf.io/resourceName": RESOURCE}
        metadata = {"namespace": self.namespace, "name": "device", "annotations": annotations}
        self.server.apply({**NAD, "metadata": metadata, "spec": {"config": json.dumps(device)}})

    def annotated(self, kind: str, number: int) -> dict[str, str]:
        """The annotations of a pod of that kind; what must not be twice on a node is the pod's own."""
        networks = "k8s.v1.cni.cncf.io/networks"
        ports = [{"hostPort": 18100 + number, "containerPort": 81, "protocol": "tcp"}]
        addressed = {"name": "addressed", "ips": [f"10.94.0.{10 + number}/24"], "mac": f"02:00:00:00:01:{number:02}"}
        return {
            "alone": {},
            "two": {networks: "listed,ptp@data0"},
            "ports": {networks: json.dumps([addressed, {"name": "ports", "portMappings": ports}])},
            "chosen": {networks: "listed", _DEFAULT: f"{self.namespace}/chosen"},
            "device": {networks: "device"},
        }[kind]

    # --- Multus on the node ------------------------------------------------------------------------------------------

    def _on_host(self, *command: str) -> list[str]:
        """Return the command line of a program of the node: in its network namespace, with its own /run and kubelet."""
        run, kubelet = self.node.root / "host-run", self.node.root / "kubelet"
        kubelet.mkdir(exist_ok=True)
        mounts = [
            # Its place for the kubelet's socket is no option.
            "mount -t tmpfs tmpfs /var/lib && mkdir /var/lib/kubelet",
            f"mount --bind {kubelet} /var/lib/kubelet",
            f"mount --rbind /run/netns {run}/netns",
            f"mount --bind {self.node.root}/run {run}/multus",
            f"mount --rbind {run} /run",
        ]
        inside = [needed("ip"), "netns", "exec", Path(self.node.host).name]
        own = [needed("unshare"), "--mount", "--propagation", "private", "sh", "-ec"]
        return [*inside, *own, f'{"; ".join(mounts)}; exec "$@"', "sh", *command]

    def start_thin(self, *options: str) -> None:
        """The thin plugin's pod starts: program, kubeconfig and configuration are in place when this returns."""
        written = self.net_d / ("00-multus.conf" if self.release == V3 else "00-multus.conflist")
        written.unlink(missing_ok=True)
        self._entrypoint.command += options
        self._entrypoint.start()
        deadline = time.monotonic() + 60
        while not (written.exists() and written.stat().st_size):
            assert self._entrypoint.running, self._entrypoint.tail()
            assert time.monotonic() < deadline, self._entrypoint.tail()
            time.sleep(0.02)
        kubeconfig = self.net_d / "multus.d" / "multus.kubeconfig"
        # v3 puts an IPv4 address into brackets, which its Go accepted.
        kubeconfig.write_text(kubeconfig.read_text().replace("[127.0.0.1]", "127.0.0.1"))

    def stop_thin(self) -> None:
        """The thin plugin's pod ends: its files stay."""
        # v3's shell script waits for a child.
        self._entrypoint.stop(signal.SIGTERM if self.release == V4 else signal.SIGKILL)

    def install(self, *options: str) -> None:
        """Our init container."""
        command = [f"{sysconfig.get_path('scripts')}/multus-daemon", "install", "--bin-dir", str(self.node.bin_dir)]
        subprocess.run([*command, *options], check=True, capture_output=True)

    def uninstall(self, *options: str) -> str:
        """Our uninstaller, in its container."""
        container = Container(self.node.root, of_folder("uninstall/base", "uninstall"))
        places = [f"--bin-dir={self.node.bin_dir}", f"--cni-config-dir={self.net_d}"]
        command = container.cli("uninstall", writable=[self.node.root])
        inside = [needed("ip"), "netns", "exec", Path(self.node.host).name]
        done = subprocess.run(
            [*inside, *command, "--config", str(self.node.config), *places, *options],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    # --- the runtime's part ------------------------------------------------------------------------------------------

    def current(self) -> dict[str, Any]:
        """The plugin configuration in the first file of the runtime's directory, as libcni makes it."""
        first = sorted(path for path in self.net_d.iterdir() if path.suffix in (".conf", ".conflist"))[0]
        found: dict[str, Any] = json.loads(first.read_bytes())
        if "plugins" in found:
            (plugin,) = found["plugins"]
            found = plugin | {"cniVersion": found["cniVersion"], "name": found["name"]}
        return found

    def call(self, verb: str, pod: str, config: dict[str, Any] | None = None, timeout: float = 120) -> Answer:
        """One call of the runtime, by `config` or the current configuration; the program is the one of its type."""
        if pod not in self.spaces:
            self.spaces[pod] = self.node.add_netns()
        # Where records are is not in the configuration that the entrypoint makes: a default, here another.
        stdin = {**(config or self.current()), "cniDir": str(self.node.cni_dir)}
        if verb == "ADD":
            self.cached[pod] = dict(stdin)
        elif pod in self.results and stdin.get("cniVersion", "") >= "0.4.0":
            stdin["prevResult"] = self.results[pod]
        if pod in self.host_ports and stdin.get("capabilities", {}).get("portMappings"):
            stdin["runtimeConfig"] = {"portMappings": self.host_ports[pod]}
        environment = self.node.environment(
            verb, f"c-{pod}", self.spaces[pod], pod, self.namespace, self.uids.get(pod, "")
        )
        start = time.perf_counter()
        done = subprocess.run(
            self._on_host(str(self.node.bin_dir / stdin["type"])),
            env=environment | {"PATH": os.environ["PATH"]},
            input=json.dumps(stdin).encode(),
            capture_output=True,
            timeout=timeout,
            check=False,
        )
        answer = Answer(done.returncode, done.stdout, done.stderr, time.perf_counter() - start)
        if verb == "ADD" and answer.code == 0:
            self.results[pod] = answer.json
        return answer

    def add(self, kind: str, number: int) -> str:
        """A pod of that kind starts; its name."""
        pod = f"{kind}-{number}"
        self.pod(pod, **self.annotated(kind, number))
        if kind == "alone":
            self.host_ports[pod] = [{"hostPort": 18000 + number, "containerPort": 80, "protocol": "tcp"}]
        added = self.call("ADD", pod)
        assert added.code == 0, f"{pod}: {added.stdout!r} {added.stderr!r}"
        assert self.node.links(self.spaces[pod]) == INTERFACES[kind]
        # Upstream leaves interfaces out of some, and has some networks twice.
        assert len({item["name"] for item in self.status(pod)}) == len(INTERFACES[kind]) - 1, self.status(pod)
        return pod

    def files(self, pod: str) -> list[str]:
        """What is left of a pod in files of records, results and addresses."""
        return [path for path in self.node.leftovers() if f"c-{pod}" in path or self._is_lease_of(path, pod)]

    def _is_lease_of(self, path: str, pod: str) -> bool:
        if not path.startswith("networks/"):
            return False
        return (self.node.root / path).read_text("utf-8", "replace").startswith(f"c-{pod}\r")


class Line:
    """A TCP connection between two pods that stays open: a message every 10 ms, each is answered."""

    def __init__(self, server: str, client: str, address: str) -> None:
        self.sent = self.answered = self.lost = 0
        self._end = threading.Event()
        with entered(server):
            self._listener = socket.create_server((address, 7007))
        with entered(client):
            self._client = socket.create_connection((address, 7007), timeout=10)
        self._client.settimeout(10)
        self._peer, _ = self._listener.accept()
        self._threads = [threading.Thread(target=self._echo), threading.Thread(target=self._talk)]
        self._threads.append(threading.Thread(target=self._ping, args=(client, address)))

    def _echo(self) -> None:
        while data := self._peer.recv(8):
            self._peer.sendall(data)

    def _talk(self) -> None:
        while not self._end.is_set():
            message = self.sent.to_bytes(8, "big")
            self._client.sendall(message)
            self.sent += 1
            self.answered += self._client.recv(8, socket.MSG_WAITALL) == message
            time.sleep(_INTERVAL)
        self._client.shutdown(socket.SHUT_WR)

    def _ping(self, netns: str, address: str) -> None:
        while not self._end.is_set():
            self.lost += 100 - packets.replies(address, netns=netns, count=100, interval=_INTERVAL)

    def __enter__(self) -> Line:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(timeout=30)
        for each in (self._client, self._peer, self._listener):
            each.close()


@contextlib.contextmanager
def running(made: Thin) -> Iterator[Thin]:
    """The node, reachable; whatever runs on it is ended."""
    with made.server.reachable_in(made.node.host):
        try:
            yield made
        finally:
            made.stop_thin()
            made.node.kill()
