"""`clusterNetwork` was the name of a file, not of the network in it: no network has that name.

k8snetworkplumbingwg/multus-cni#560; kind: configurations in files of the node.
"""

import json
from pathlib import Path

from multus_daemon.cluster.conf_files import NodeConfFiles


def test_networks_are_found_by_the_name_in_the_file(tmp_path: Path) -> None:
    config = {"cniVersion": "0.3.1", "name": "mynet", "plugins": [{"type": "bridge"}]}
    (tmp_path / "10-kuberouter.conflist").write_text(json.dumps(config))
    files = NodeConfFiles()
    assert files.by_name(str(tmp_path), "10-kuberouter") is None
    network = files.by_name(str(tmp_path), "mynet")
    assert network == files.at_path(str(tmp_path / "10-kuberouter.conflist"))
