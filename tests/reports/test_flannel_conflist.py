"""Flannel's list, as its package ships it, is the primary network.

k8snetworkplumbingwg/multus-cni#392; kind: configurations of primary networks.
"""

import json
from pathlib import Path

from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.node.primary.election import Election
from multus_daemon.spec.netconf.generate import generate

CONFIG = {
    "name": "cbr0",
    "cniVersion": "0.3.1",
    "plugins": [
        {"type": "flannel", "delegate": {"hairpinMode": True, "isDefaultGateway": True}},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ],
}


async def test_it_is_elected_and_its_capabilities_are_passed(tmp_path: Path) -> None:
    (tmp_path / "10-flannel.conflist").write_text(json.dumps(CONFIG))
    election = Election(
        tmp_path, NodeConfFiles(), named="", plugin_type="multus-shim", clock=lambda: 0.0, ours="00-multus.conf"
    )
    primary = await election.primary()
    found = json.loads(generate({}, primary.config, str(primary.path)))
    assert found["capabilities"] == {"portMappings": True}
    assert found["cniVersion"] == CONFIG["cniVersion"]
