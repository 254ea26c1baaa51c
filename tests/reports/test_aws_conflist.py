"""The list of Amazon's VPC plugin has an egress plugin of its own and host ports: it is the primary network.

k8snetworkplumbingwg/multus-cni#688; kind: configurations of primary networks.
"""

import json
from pathlib import Path

from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.node.primary.election import Election
from multus_daemon.spec.netconf.generate import generate

CONFIG = {
    "cniVersion": "0.4.0",
    "name": "aws-cni",
    "disableCheck": True,
    "plugins": [
        {
            "name": "aws-cni",
            "type": "aws-cni",
            "vethPrefix": "eni",
            "mtu": "9001",
            "podSGEnforcingMode": "strict",
            "pluginLogFile": "/var/log/aws-routed-eni/plugin.log",
            "pluginLogLevel": "DEBUG",
        },
        {
            "name": "egress-cni",
            "type": "egress-cni",
            "mtu": "9001",
            "enabled": "false",
            "ipam": {"type": "host-local", "ranges": [[{"subnet": "fd00::ac:00/118"}]]},
        },
        {"type": "portmap", "capabilities": {"portMappings": True}, "snat": True},
    ],
}


async def test_it_is_elected_and_its_capabilities_are_passed(tmp_path: Path) -> None:
    (tmp_path / "10-aws.conflist").write_text(json.dumps(CONFIG))
    election = Election(
        tmp_path, NodeConfFiles(), named="", plugin_type="multus-shim", clock=lambda: 0.0, ours="00-multus.conf"
    )
    primary = await election.primary()
    found = json.loads(generate({}, primary.config, str(primary.path)))
    assert found["capabilities"] == {"portMappings": True}
    assert found["cniVersion"] == CONFIG["cniVersion"]
