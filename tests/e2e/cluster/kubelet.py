"""The node's kubelet: how it is set up and started."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from tests.e2e.cluster import containerd
from tests.e2e.cluster.machine import Machine, MachineProcess

CONFIG: Final = "/etc/kubernetes/kubelet.yaml"
_RUNS: Final = b"Starting kubelet main sync loop"


class Kubelet:
    """A kubelet in a machine."""

    def __init__(self, machine: Machine, program: Path, name: str, kubeconfig: Path, *flags: str) -> None:
        """`name`: of its node. `flags`: further arguments."""
        self._machine = machine
        self._command = (
            str(program),
            f"--config={CONFIG}",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={name}",
            f"--node-ip={machine.address}",
            *flags,
        )
        self._root = ""
        self._process: MachineProcess | None = None
        self._begin = 0
        """Offset in the log at which the output of the current process begins."""

    def configure(self, client_ca: Path, root: str) -> None:
        """Write its configuration. `client_ca`: who signs those that may ask it. `root`: its directory."""
        self._root = root
        self._machine.path(CONFIG).write_text(yaml.safe_dump(self._settings(client_ca)))

    def is_up(self) -> bool:
        """Return True if the kubelet works. Start it if it is not running.

        Call this until it returns True, as systemd restarts a unit: the kubelet exits while containerd is still loading
        its sandboxes.
        """
        log = self._machine.logs / "kubelet.log"
        if self._process is None or not self._process.running:
            self._begin = log.stat().st_size if log.exists() else 0
            self._process = self._machine.start("kubelet", *self._command, f"--root-dir={self._root}")
        return _RUNS in log.read_bytes()[self._begin :]

    def stop(self) -> None:
        """SIGTERM."""
        assert self._process is not None, "the kubelet is not started"
        self._process.stop()

    def _settings(self, client_ca: Path) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{containerd.SOCKET}",
            "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": str(client_ca)}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self._machine.cgroup,
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
