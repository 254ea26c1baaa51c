"""Upstream's thin plugin on a real node: its entrypoint is a program of the node, as its DaemonSet's container is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.e2e import build_tools
from tests.e2e.apiserver import SERVICE_ADDRESS
from tests.e2e.cluster.multus import UpstreamProcess, _Process
from tests.e2e.cluster.real_node import RealNode

CONFIGURATION: Final = "/etc/cni/net.d/00-multus.conflist"
PROGRAM: Final = "/opt/cni/bin/multus"


class ThinProcess(UpstreamProcess):
    """The entrypoint of v4.3, with its manifest's rights; containerd calls the plugin, which has its kubeconfig."""

    def __init__(self, node: RealNode) -> None:
        """Raises `build_tools.ToolError` where a program is missing."""
        _Process.__init__(self, node, "thin")
        self._entrypoint, self._plugin = (
            build_tools.find(f"upstream-{name}") for name in ("thin_entrypoint", "multus")
        )
        self._shim = self._plugin

    def _configure(self, shim: Path, settings: Mapping[str, Any]) -> None:
        """Do nothing: the entrypoint copies the plugin, and writes its configuration."""

    def start(self) -> None:
        # That of an earlier start says nothing of this one; the plugin is there before it.
        self.node.machine.path(CONFIGURATION).unlink(missing_ok=True)
        self._launch(
            str(self._entrypoint),
            f"--multus-bin-file={self._plugin}",
            "--cni-bin-dir=/opt/cni/bin",
            "--cni-conf-dir=/etc/cni/net.d",
            "--multus-autoconfig-dir=/etc/cni/net.d",
            "--multus-cni-conf-dir=/etc/cni/multus/net.d",
            KUBERNETES_SERVICE_HOST=SERVICE_ADDRESS,
            KUBERNETES_SERVICE_PORT="443",
        )
        self.node.wait_until(lambda: self.node.machine.path(CONFIGURATION).exists(), "the thin plugin's configuration")
        self.node.wait_ready()

    def uninstall(self) -> None:
        super().uninstall()
        self.node.machine.run("rm", "-rf", CONFIGURATION, PROGRAM)
