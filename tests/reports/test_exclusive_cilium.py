"""Cilium renamed every other file of the directory, that of Multus too: its own is the primary network.

k8snetworkplumbingwg/multus-cni#972; kind: the choice of the primary network.
"""

import json
from pathlib import Path

from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.node.primary.election import Election


async def test_renamed_files_and_those_of_engines_are_passed_over(tmp_path: Path) -> None:
    def put(name: str, network: str, plugin: str) -> None:
        config = {"cniVersion": "0.3.1", "name": network, "plugins": [{"type": plugin}]}
        (tmp_path / name).write_text(json.dumps(config))

    put("00-multus.conf.cilium_bak", "multus-cni-network", "multus-shim")
    put("01-crio-bridge.conflist.cilium_bak", "crio", "bridge")
    put("02-weave.conflist.cilium_bak", "weave", "weave-net")
    put("05-cilium.conflist", "cilium", "cilium-cni")
    (tmp_path / "multus.d").mkdir()
    election = Election(
        tmp_path, NodeConfFiles(), named="", plugin_type="multus-shim", clock=lambda: 0.0, ours="00-multus.conf"
    )
    assert (await election.primary()).path.name == "05-cilium.conflist"
