"""Our daemon on a real node: `MultusProcess`, a program of the node, `MultusPod`, as the manifests install it, and
`MultusRelease`, as the chart does.

The first needs no image, and runs the sources as they are. `UpstreamProcess` and `UpstreamPod` are the ones that ours
takes over from.
"""

from __future__ import annotations

import abc
import http.client
import json
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

import multus_shim
from tests.e2e import build_tools, chart, upstream_manifest
from tests.e2e.apiserver import SERVICE_ADDRESS
from tests.e2e.cluster import images
from tests.e2e.cluster.machine import MachineProcess
from tests.e2e.cluster.real_node import RealNode
from tests.e2e.rights import Container
from tests.repo.manifests import CHART

GENERATED: Final = "/etc/cni/net.d/00-multus.conf"
CONFIG: Final = "/etc/cni/net.d/multus.d/daemon-config.json"
STORE: Final = "/var/lib/cni/multus"
SHIM: Final = "/opt/cni/bin/multus-shim"
_MANIFESTS: Final = Path(__file__).parents[3] / "manifests"
_NAMESPACE: Final = "kube-system"
_DAEMON_SET: Final = "daemonset/kube-multus-ds"
_PODS: Final = f"/api/v1/namespaces/{_NAMESPACE}/pods"


class Multus(abc.ABC):
    """Common base of the two ways to run the daemon."""

    def __init__(self, node: RealNode) -> None:
        self.node = node

    @abc.abstractmethod
    def install(self) -> None:
        """Everything that an administrator does before the daemon starts."""

    @abc.abstractmethod
    def start(self) -> None:
        """Start it; back when it is ready, the runtime's configuration is in place and the node is Ready."""

    @abc.abstractmethod
    def kill(self) -> None:
        """SIGKILL."""

    @abc.abstractmethod
    def uninstall(self) -> None:
        """Take everything off the node and out of the cluster but the definitions of objects."""

    @abc.abstractmethod
    def log(self) -> str:
        """All that it has logged."""

    def readyz(self) -> tuple[int, str]:
        """Status and body of `/readyz?gates`; status 0 where nobody listens."""
        connection = http.client.HTTPConnection("localhost", timeout=5)
        try:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(5)
            connection.sock.connect(str(self.node.machine.path("/run/multus/multus.sock")))
            connection.request("GET", "/readyz?gates")
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            return 0, ""
        finally:
            connection.close()

    def wait_ready(self, timeout: float = 60) -> None:
        """Wait until it serves and the node is Ready."""
        self.node.wait_until(self._serves, "the daemon is ready", timeout)
        self.node.wait_ready()

    def _serves(self) -> bool:
        return self._is_ready() and (self.node.machine.path(self.node.layout.conf_dir) / Path(GENERATED).name).exists()

    def _is_ready(self) -> bool:
        """Return True if the daemon reports that it is ready."""
        return self.readyz()[0] == 200

    def _clear(self) -> None:
        self.node.machine.run("rm", "-rf", GENERATED, SHIM)
        # A shim that waits for a daemon writes its DEL into the store at last.
        running = ("sh", "-c", "grep -lx multus-shim /proc/[0-9]*/comm || :")
        self.node.wait_until(lambda: not self.node.machine.run(*running), "no shim runs")
        made = (str(Path(CONFIG).parent), STORE, "/run/multus", "/etc/cni/multus")
        self.node.machine.run("rm", "-rf", *made)


class _Process(Multus):
    """A daemon that is a program of the node."""

    def __init__(self, node: RealNode, name: str) -> None:
        """`name`: of its log."""
        super().__init__(node)
        self._name = name
        self._process: MachineProcess | None = None

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it; its exit status."""
        assert self._process is not None, "the daemon does not run"
        return self._process.stop(number)

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def uninstall(self) -> None:
        if self._process is not None and self._process.running:
            self.stop()
        self._clear()

    def log(self) -> str:
        return (self.node.machine.logs / f"{self._name}.log").read_text()

    def _launch(self, *command: str, **env: str) -> None:
        self._process = self.node.machine.start(self._name, *command, env=env)

    def _configure(self, shim: Path, settings: Mapping[str, Any]) -> None:
        self.node.machine.run("install", "-m", "0755", str(shim), "/opt/cni/bin/multus-shim")
        config = self.node.machine.path(CONFIG)
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(json.dumps(settings))

    def _serves(self) -> bool:
        assert self._process is not None
        assert self._process.running, f"the daemon has ended:\n{self.log()}"
        return super()._serves()


class MultusProcess(_Process):
    """The daemon of the environment that the tests run in, with the rights that the manifests give it."""

    def __init__(self, node: RealNode, **settings: Any) -> None:
        super().__init__(node, "multus")
        self._container = Container(node.machine.root)
        self.settings: dict[str, Any] = {
            "multusAutoconfigDir": "/etc/cni/net.d",
            "multusConfigFile": "auto",
            "chrootDir": str(self._container.host_root),
            **settings,
        }

    def install(self) -> None:
        """Definitions, rights, the shim, the configuration."""
        for name in ("crd.yaml", "rbac.yaml"):
            for item in filter(None, yaml.safe_load_all((_MANIFESTS / "base" / name).read_text())):
                if item["kind"] == "CustomResourceDefinition":
                    self.node.server.install_crd(item)
                else:
                    self.node.server.apply(item)
        token = self.node.server.service_account_token("kube-system", "multus-daemon")
        kubeconfig = self.node.server.kubeconfig_for_token(token)
        settings = {"kubeconfig": str(kubeconfig), **self.settings}
        self._configure(multus_shim.binary(), settings)

    def launch(self) -> None:
        """Start it; nothing is known yet about its readiness."""
        env = {"MULTUS_NODE_NAME": self.node.name, "PYTHONSAFEPATH": "1"}
        self._launch(*self._container.daemon(self.settings, "--config", CONFIG), **env)

    def uninstall(self) -> None:
        super().uninstall()
        self._container.__exit__()

    def start(self) -> None:
        self.launch()
        self.wait_ready()

    @property
    def pid(self) -> int:
        """The daemon's, as the outer machine counts."""
        assert self._process is not None, "the daemon does not run"
        return self._process.pid


class UpstreamProcess(_Process):
    """Upstream's v4.3 thick daemon (see `build_tools`), a program of the node, with the rights of its own manifest."""

    _ACCOUNT: Final = "/run/secrets/kubernetes.io/serviceaccount"

    def __init__(self, node: RealNode) -> None:
        """Raises `build_tools.ToolError` where a program is missing."""
        super().__init__(node, "upstream")
        self._daemon, self._shim = (build_tools.find(name) for name in build_tools.PREDECESSOR)

    def install(self) -> None:
        server = self.node.server
        for item in yaml.safe_load_all((_MANIFESTS / "base" / "crd.yaml").read_text()):
            server.install_crd(item)
        rules = [
            {"apiGroups": ["k8s.cni.cncf.io"], "resources": ["*"], "verbs": ["*"]},
            {"apiGroups": [""], "resources": ["pods", "pods/status"], "verbs": ["get", "list", "watch", "update"]},
            {"apiGroups": ["", "events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch", "update"]},
        ]
        rbac = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "multus"}}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "multus"}
        subject = {"kind": "ServiceAccount", "name": "multus", "namespace": _NAMESPACE}
        server.apply(
            {**rbac, "kind": "ClusterRole", "rules": rules},
            {**rbac, "kind": "ClusterRoleBinding", "roleRef": reference, "subjects": [subject]},
        )
        account = self.node.machine.path(self._ACCOUNT)
        account.mkdir(parents=True)
        (account / "token").write_text(server.service_account_token(_NAMESPACE, "multus"))
        (account / "ca.crt").write_bytes(server.ca_file.read_bytes())
        (account / "namespace").write_text(_NAMESPACE)
        settings = {
            "cniVersion": "0.3.1",
            "cniConfigDir": "/etc/cni/net.d",
            "multusAutoconfigDir": "/etc/cni/net.d",
            "multusConfigFile": "auto",
            "socketDir": "/run/multus/",
            "logLevel": "verbose",
            "logToStderr": True,
        }
        self._configure(self._shim, settings)

    def start(self) -> None:
        env = {
            "KUBERNETES_SERVICE_HOST": SERVICE_ADDRESS,
            "KUBERNETES_SERVICE_PORT": "443",
            "MULTUS_NODE_NAME": self.node.name,
        }
        self._launch(str(self._daemon), "-config", CONFIG, **env)
        self.wait_ready()

    def uninstall(self) -> None:
        super().uninstall()
        self.node.machine.run("rm", "-rf", self._ACCOUNT)

    def _is_ready(self) -> bool:
        # It can't say: it writes the runtime's configuration once it serves.
        return True


class MultusPod(Multus):
    """The DaemonSet of `manifests/multus-daemonset.yaml`."""

    def __init__(self, node: RealNode, image: Path) -> None:
        """`image`: a tar file with the image that the manifest names."""
        super().__init__(node)
        self._image = image

    def install(self) -> None:
        """The image onto the node."""
        self.node.containerd.import_image(self._image)

    def apply(self) -> None:
        """Apply the manifest; back at once."""
        manifest = str(_MANIFESTS / "multus-daemonset.yaml")
        self.node.kubectl("apply", "-f", manifest)

    def start(self) -> None:
        self.apply()
        self.wait_rolled_out()
        self.wait_ready()

    def rollout_restart(self) -> None:
        """Restart the DaemonSet, as after a change of the configuration. Does not wait for the rollout."""
        self.node.kubectl("-n", _NAMESPACE, "rollout", "restart", _DAEMON_SET)

    def wait_rolled_out(self, timeout: int = 120) -> None:
        """Wait until the newest pod of the DaemonSet is Ready."""
        self.node.kubectl(
            *("-n", _NAMESPACE, "rollout", "status", _DAEMON_SET, f"--timeout={timeout}s"), timeout=timeout + 10
        )

    def kill(self) -> None:
        """SIGKILL; the kubelet starts it again."""
        self.node.machine.run("kill", "-KILL", str(self.pid))

    @property
    def uid(self) -> str:
        """UID of the daemon's newest pod."""
        found = self.node.server.request("GET", _PODS, labelSelector="name=multus")["items"]
        newest = max(found, key=lambda pod: pod["metadata"]["creationTimestamp"])
        return str(newest["metadata"]["uid"])

    @property
    def pid(self) -> int:
        """The daemon's, as the node counts."""
        ctr = self.node.containerd.ctr
        tasks = ctr("tasks", "list").splitlines()[1:]
        mine = ctr("containers", "list", "--quiet", 'labels."io.kubernetes.container.name"==kube-multus')
        (found,) = (
            int(pid) for identifier, pid, state in map(str.split, tasks) if identifier in mine and state == "RUNNING"
        )
        return found

    def uninstall(self) -> None:
        self.delete()
        self._clear()

    def delete(self) -> None:
        """Delete the DaemonSet, as an administrator does before the nodes are cleaned; back when its pods are gone."""
        self.node.kubectl("-n", _NAMESPACE, "delete", "--ignore-not-found", "--wait=true", _DAEMON_SET)
        self._wait_gone()

    def log(self) -> str:
        return self.node.container_log("kube-multus-ds-*", _NAMESPACE)

    def _wait_gone(self) -> None:
        self.node.wait_until(lambda: self.readyz()[0] == 0, "the daemon has ended")
        self.node.wait_until(lambda: not self.pods(), "the daemon's pods are gone")

    def pods(self) -> list[str]:
        """Names of the daemon's pods."""
        found = self.node.server.request("GET", _PODS, labelSelector="name=multus")
        return [item["metadata"]["name"] for item in found["items"]]


class MultusRelease(MultusPod):
    """The chart, installed by helm."""

    def __init__(self, node: RealNode, image: Path) -> None:
        """Raises `build_tools.ToolError` where helm is not there."""
        super().__init__(node, image)
        build_tools.find("helm")
        self.values: dict[str, Any] = {}
        """The next `apply` installs or upgrades the chart with these values."""

    def apply(self) -> None:
        # Those that came before leave objects in the cluster, a service account for one.
        options = ("--install", "--take-ownership", "--values", "-")
        self._helm("upgrade", *options, "multus", CHART, stdin=json.dumps(self.values))

    def remove(self) -> None:
        """`helm uninstall`; back when the pods are gone."""
        self._helm("uninstall", "--ignore-not-found", "multus")
        self._wait_gone()

    def uninstall(self) -> None:
        self.remove()
        super().uninstall()

    def _helm(self, *arguments: str | Path, stdin: str = "") -> None:
        cluster = ("--namespace", _NAMESPACE, "--kubeconfig", self.node.server.admin_kubeconfig)
        chart.helm(*arguments, *cluster, stdin=stdin)


class UpstreamPod(MultusPod):
    """Upstream's thick manifest, in which nothing but the image is changed; that of upstream's own release, or ours."""

    _OBJECTS: Final = ("clusterrole/multus", "clusterrolebinding/multus", "serviceaccount/multus",
                       "configmap/multus-daemon-config")  # fmt: skip

    def __init__(self, node: RealNode, archive: Path, image: str = upstream_manifest.IMAGE) -> None:
        """`archive`: a tar file with `image`. Raises `build_tools.ToolError` where the manifest is not there."""
        super().__init__(node, archive)
        self._manifest = upstream_manifest.text(image)
        self._is_ours = image != upstream_manifest.IMAGE

    @classmethod
    def released(cls, node: RealNode, directory: Path, others: Mapping[str, Path] | None = None) -> UpstreamPod:
        """With an image of its release's programs, written into the directory; `others` take the place of some.

        Raises ToolError, ImageError.
        """
        archive = directory / "upstream.tar"
        names = ("multus-daemon", "multus-shim", "install_multus", "passthru")
        programs = {name: (others or {}).get(name) or build_tools.find(f"upstream-{name}") for name in names}
        found = {f"/usr/src/multus-cni/bin/{name}": program for name, program in programs.items()}
        images.with_programs(archive, upstream_manifest.IMAGE, found)
        return cls(node, archive)

    def apply(self) -> None:
        self.node.kubectl("apply", "-f", "-", stdin=self._manifest)

    def uninstall(self) -> None:
        super().uninstall()
        for name in self._OBJECTS:
            self.node.kubectl("-n", _NAMESPACE, "delete", "--ignore-not-found", name)
        self.node.machine.run("rm", "-f", "/opt/cni/bin/passthru")

    def _is_ready(self) -> bool:
        # Upstream's can't say.
        return super()._is_ready() if self._is_ours else True
