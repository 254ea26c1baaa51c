"""`clusterNetwork` names a network in the directory of the runtime, where Multus has its own file, and a system
namespace is empty.

Cray-HPE/docs-csm#5956; kind: configurations in files of the node.
"""

import json
from pathlib import Path

from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.spec.netconf import model


def test_the_network_is_found_by_its_name(tmp_path: Path) -> None:
    own: dict[str, object] = {
        "name": "multus-cni-network",
        "cniVersion": "0.3.1",
        "type": "multus",
        "clusterNetwork": "cilium",
    }
    own |= {"confDir": str(tmp_path), "systemNamespaces": [""]}
    (tmp_path / "00-multus.conf").write_text(json.dumps(own))
    cilium = {"type": "cilium-cni", "enable-debug": False, "log-file": "/var/run/cilium/cilium-cni.log"}
    config = {"cniVersion": "0.3.1", "name": "cilium", "plugins": [cilium]}
    (tmp_path / "05-cilium.conflist").write_text(json.dumps(config))
    (tmp_path / "10-weave.conflist.cilium_bak").write_text("{")
    found = model.load(json.dumps(own).encode(), {})
    assert found.system_namespaces == ("",)
    network = NodeConfFiles().by_name(found.conf_dir, found.cluster_network)
    assert network is not None
    assert network.type == "cilium-cni"
