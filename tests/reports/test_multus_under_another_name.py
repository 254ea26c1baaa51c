"""An earlier installation left a file of Multus under another name, which became the primary network and called
itself: it is passed over.

k8snetworkplumbingwg/multus-cni#1200; kind: the choice of the primary network.
"""

import json
from pathlib import Path

from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.node.primary.election import Election


async def test_a_file_of_multus_is_never_the_primary(tmp_path: Path) -> None:
    for name, plugin in (("05-old.conf", "multus"), ("07-shim.conf", "multus-shim"), ("10-flannel.conf", "flannel")):
        config = {"cniVersion": "0.3.1", "name": "multus-cni-network", "type": plugin, "delegates": []}
        (tmp_path / name).write_text(json.dumps(config))
    election = Election(
        tmp_path, NodeConfFiles(), named="", plugin_type="multus-shim", clock=lambda: 0.0, ours="00-multus.conf"
    )
    assert (await election.primary()).path.name == "10-flannel.conf"
