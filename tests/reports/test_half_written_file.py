"""The primary network's file was empty or half written when it was read, and 00-multus.conf was left empty: it is
waited for.

k8snetworkplumbingwg/multus-cni#1155; kind: the choice of the primary network.
"""

import json
from pathlib import Path

import pytest

from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.node.primary.election import Election, NoPrimaryError


@pytest.mark.parametrize("content", ["", "{", '{"cniVersion": "0.3.1", "name": "cbr0", "plugins": ['])
async def test_it_is_no_primary_until_it_is_whole(tmp_path: Path, content: str) -> None:
    path = tmp_path / "10-flannel.conflist"
    path.write_text(content)
    election = Election(
        tmp_path, NodeConfFiles(), named="", plugin_type="multus-shim", clock=lambda: 0.0, ours="00-multus.conf"
    )
    with pytest.raises(NoPrimaryError, match="10-flannel.conflist"):
        await election.primary()
    path.write_text(json.dumps({"cniVersion": "0.3.1", "name": "cbr0", "plugins": [{"type": "flannel"}]}))
    assert (await election.primary()).config.name == "cbr0"
