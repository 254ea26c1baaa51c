"""Azure's list has capitals in `dns` and a capability `dns`: it is the primary network.

Azure/azure-container-networking#2281; kind: configurations of primary networks.
"""

import json
from pathlib import Path

from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.node.primary.election import Election
from multus_daemon.spec.netconf.generate import generate

CONFIG = {
    "cniVersion": "0.3.0",
    "name": "azure",
    "adapterName": "",
    "plugins": [
        {
            "type": "azure-vnet",
            "mode": "bridge",
            "bridge": "azure0",
            "capabilities": {"portMappings": True, "dns": True},
            "ipam": {"type": "azure-cns", "mode": "overlay"},
            "dns": {"Nameservers": ["10.0.0.10"], "Search": ["svc.cluster.local"]},
        }
    ],
}


async def test_it_is_elected_and_its_capabilities_are_passed(tmp_path: Path) -> None:
    (tmp_path / "10-azure.conflist").write_text(json.dumps(CONFIG))
    election = Election(tmp_path, NodeConfFiles(), named="", plugin_type="multus-shim", clock=lambda: 0.0)
    primary = await election.primary()
    found = json.loads(generate({}, primary.config, str(primary.path)))
    assert found["capabilities"] == {"dns": True, "portMappings": True}
    assert found["cniVersion"] == CONFIG["cniVersion"]
