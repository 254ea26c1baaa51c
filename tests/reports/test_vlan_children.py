"""One ADD made a link and VLANs on it, and all addresses were shown on one: each link has its own.

k8snetworkplumbingwg/network-attachment-definition-client#36; kind: results of third parties.
"""

import json

from multus_daemon.spec.cni import result
from multus_daemon.spec.nad import status

PRINTED = {
    "cniVersion": "1.0.0",
    "interfaces": [
        {"name": "vethab", "mac": "02:00:00:00:00:01"},
        {"name": "net1", "mac": "02:00:00:00:00:02", "sandbox": "/n"},
        {"name": "net1.100", "mac": "02:00:00:00:00:02", "sandbox": "/n"},
    ],
    "ips": [{"address": "10.1.0.2/24", "interface": 1}, {"address": "10.1.100.2/24", "interface": 2}],
}


def test_each_link_has_an_entry() -> None:
    decoded = result.decode(json.dumps(PRINTED).encode(), "1.0.0")
    entries = status.entries_for("default/trunk", "net1", decoded, cluster_network=False)
    assert [(entry["interface"], entry["ips"]) for entry in entries] == [
        ("net1", ["10.1.0.2"]),
        ("net1.100", ["10.1.100.2"]),
    ]
