"""Calico's file sorts behind Cilium's, which is only for additional networks: the operator names the primary one.

k8snetworkplumbingwg/multus-cni#911; kind: the choice of the primary network.
"""

import json
from pathlib import Path

from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.node.primary.election import Election


async def test_the_named_file_is_the_primary(tmp_path: Path) -> None:
    for name in ("05-cilium.conf", "10-calico.conf"):
        config = {"cniVersion": "0.3.1", "name": name[3:-5], "type": name[3:-5]}
        (tmp_path / name).write_text(json.dumps(config))
    election = Election(
        tmp_path,
        NodeConfFiles(),
        named="10-calico.conf",
        plugin_type="multus-shim",
        clock=lambda: 0.0,
        ours="00-multus.conf",
    )
    assert (await election.primary()).config.type == "calico"
