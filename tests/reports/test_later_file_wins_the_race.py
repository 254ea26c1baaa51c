"""At boot Kube-OVN wrote its file before Cilium, whose sorts first: the first by name is taken, and a named one at
once.

k8snetworkplumbingwg/multus-cni#1499; kind: the choice of the primary network.
"""

import json
from pathlib import Path

import pytest

from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.node.primary.election import Election, NoPrimaryError


def put(directory: Path, name: str) -> None:
    config = {"cniVersion": "0.3.1", "name": name[3:], "plugins": [{"type": name[3:]}]}
    (directory / f"{name}.conflist").write_text(json.dumps(config))


async def test_the_order_of_writing_does_not_count(tmp_path: Path) -> None:
    now = [1000.0]
    election = Election(
        tmp_path, NodeConfFiles(), named="", plugin_type="multus-shim", clock=lambda: now[0], ours="00-multus.conf"
    )
    put(tmp_path, "10-kube-ovn")
    assert (await election.primary()).path.name == "10-kube-ovn.conflist"
    put(tmp_path, "05-cilium")
    await election.primary()
    now[0] += 60
    assert (await election.primary()).path.name == "05-cilium.conflist"


async def test_a_named_file_is_waited_for(tmp_path: Path) -> None:
    election = Election(
        tmp_path,
        NodeConfFiles(),
        named="05-cilium.conflist",
        plugin_type="multus-shim",
        clock=lambda: 0.0,
        ours="00-multus.conf",
    )
    put(tmp_path, "10-kube-ovn")
    with pytest.raises(NoPrimaryError, match="05-cilium.conflist"):
        await election.primary()
