"""podman had a network on the node before the cluster's came, and pods got that: networks of engines are never the
primary one.

rancher/rke2#10360; kind: the choice of the primary network.
"""

import json
from pathlib import Path

import pytest

from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.node.primary.election import Election, NoPrimaryError


async def test_the_clusters_network_is_waited_for(tmp_path: Path) -> None:
    podman = {"type": "bridge", "bridge": "cni-podman0", "isGateway": True}
    for name, network in (("05-podman.conflist", "podman"), ("cni-podman1.conflist", "mine")):
        config = {"cniVersion": "0.4.0", "name": network, "plugins": [{**podman, "bridge": network}]}
        (tmp_path / name).write_text(json.dumps(config))
    election = Election(
        tmp_path, NodeConfFiles(), named="", plugin_type="multus-shim", clock=lambda: 0.0, ours="00-multus.conf"
    )
    with pytest.raises(NoPrimaryError, match="05-podman.conflist"):
        await election.primary()
    config = {"cniVersion": "0.3.1", "name": "k8s-pod-network", "plugins": [{"type": "calico"}]}
    (tmp_path / "99-calico.conflist").write_text(json.dumps(config))
    assert (await election.primary()).path.name == "99-calico.conflist"
