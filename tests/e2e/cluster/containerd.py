"""The node's containerd: how it is set up, and what it has."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.e2e.cluster import images
from tests.e2e.cluster.machine import Machine, MachineProcess

SOCKET: Final = "/run/containerd/containerd.sock"
CONFIG: Final = "/etc/kubernetes/containerd.toml"
_KIND: Final = "io.cri-containerd.kind"

# NB: without CAP_SYS_RESOURCE no process may lower its oom_score_adj; the option takes what is allowed.
_SETTINGS: Final = f"""\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "{SOCKET}"
[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{images.BUSYBOX}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
"""


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
    def read(cls, info: dict[str, Any], run: str) -> Sandbox:
        """Parse the output of `ctr containers info`. `run`: where `/var/run` of the machine leads."""
        labels = info["Labels"]
        paths = [item.get("path", "") for item in info["Spec"]["linux"]["namespaces"] if item["type"] == "network"]
        return cls(
            info["ID"],
            labels["io.kubernetes.pod.name"],
            labels["io.kubernetes.pod.namespace"],
            "".join(paths).replace("/var/run/", f"{run}/", 1),
            info["CreatedAt"],
        )


class Containerd:
    """containerd in a machine."""

    def __init__(self, machine: Machine, programs: Path | None = None) -> None:
        """`programs`: the directory of another containerd than that of the PATH, with its shim and `ctr`."""
        self._machine = machine
        # It looks for its shim on the PATH.
        self._env = {"PATH": f"{programs}:{os.environ['PATH']}"} if programs else {}
        self._containerd, self._ctr = (str(programs / name) if programs else name for name in ("containerd", "ctr"))
        self._process: MachineProcess | None = None
        self._imported: set[Path] = set()

    def configure(self, bin_dir: str, conf_dir: str) -> None:
        """Write its configuration. `bin_dir`, `conf_dir`: directories of CNI plugins, and of their configurations."""
        directories = f'    bin_dir = "{bin_dir}"\n    conf_dir = "{conf_dir}"\n'
        self._machine.path(CONFIG).write_text(_SETTINGS + directories)

    def start(self) -> None:
        """Start it; back at once."""
        self._process = self._machine.start("containerd", self._containerd, "--config", CONFIG, env=self._env)

    def answers(self) -> bool:
        """Return True if containerd answers requests."""
        try:
            self.ctr("plugins", "list")
        except AssertionError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL: the shims and the containers go on."""
        assert self._process is not None, "containerd is not started"
        self._process.stop(signal.SIGKILL)

    def ctr(self, *arguments: str, timeout: float = 60) -> str:
        """Standard output of `ctr`, in the namespace of Kubernetes; raises AssertionError where it fails."""
        return self._machine.run(self._ctr, "--address", SOCKET, "-n", "k8s.io", *arguments, timeout=timeout)

    def import_image(self, tar: Path) -> None:
        """Give the node an image, from a tar file of Docker's or OCI's layout; it stays."""
        if tar not in self._imported:
            self.ctr("images", "import", "--no-unpack", str(tar), timeout=300)
            self._imported.add(tar)

    def sandboxes(self, pod: str = "", namespace: str = "default") -> list[Sandbox]:
        """The sandboxes on the node, or those of one pod, that have a network namespace; the newest last.

        A sandbox that has been stopped has none, and is forgotten by the kubelet up to a minute later.
        """
        wanted = [f"labels.{json.dumps(_KIND)}==sandbox"]
        if pod:
            labels = {"io.kubernetes.pod.name": pod, "io.kubernetes.pod.namespace": namespace}
            wanted += [f"labels.{json.dumps(key)}=={value}" for key, value in labels.items()]
        found = []
        # A link of the machine's leads elsewhere for the tests.
        run = "/run" if self._machine.path("/var/run").is_symlink() else "/var/run"
        for identifier in self.ctr("containers", "list", "--quiet", ",".join(wanted)).split():
            # It may go in between.
            with contextlib.suppress(AssertionError):
                sandbox = Sandbox.read(json.loads(self.ctr("containers", "info", identifier)), run)
                if sandbox.netns and self._machine.path(sandbox.netns).exists():
                    found.append(sandbox)
        return sorted(found, key=lambda sandbox: sandbox.created)

    def netns(self, pod: str, namespace: str = "default") -> str:
        """Path, inside the machine, of a running pod's network namespace."""
        found = self.sandboxes(pod, namespace)
        assert found, f"no sandbox of {namespace}/{pod} is on the node"
        return found[-1].netns
