"""Azure's list has capitals in `dns`, a capability `dns`, and an IPAM that is inside the plugin: pods get it.

Azure/azure-container-networking#2281; kind: configurations of primary networks.
"""

import json
from pathlib import Path
from typing import Any

from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.node.primary.election import Election
from multus_daemon.spec.netconf.generate import generate
from tests.reports.conftest import Site

CONFIG: dict[str, Any] = {
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
    election = Election(
        tmp_path, NodeConfFiles(), named="", plugin_type="multus-shim", clock=lambda: 0.0, ours="00-multus.conf"
    )
    primary = await election.primary()
    found = json.loads(generate({}, primary.config, str(primary.path)))
    assert found["capabilities"] == {"dns": True, "portMappings": True}
    assert found["cniVersion"] == CONFIG["cniVersion"]


def test_an_ipam_that_is_not_a_binary(site: Site) -> None:
    config = {
        "cniVersion": "0.3.0",
        "name": "azure",
        "plugins": [{**CONFIG["plugins"][0], "type": site.plugin("azure")}],
    }
    site.network("azure", config)
    site.add(default="azure")
    assert site.links() == ["eth0"]
    assert site.given("azure")["ipam"] == {"type": "azure-cns", "mode": "overlay"}
    assert site.call("DEL").code == 0
