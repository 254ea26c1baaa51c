"""The cluster network made two links in the pod, and both were its default: one entry is.

k8snetworkplumbingwg/network-attachment-definition-client#69; kind: results of third parties.
"""

import json

from multus_daemon.spec.cni import result
from multus_daemon.spec.nad import status

PRINTED = {
    "cniVersion": "1.0.0",
    "interfaces": [{"name": "eth0", "sandbox": "/n"}, {"name": "ovn-udn1", "sandbox": "/n"}],
    "ips": [
        {"address": "10.244.1.9/24", "gateway": "10.244.1.1", "interface": 0},
        {"address": "10.128.0.7/16", "gateway": "10.128.0.1", "interface": 1},
    ],
}


def test_one_is_the_default() -> None:
    decoded = result.decode(json.dumps(PRINTED).encode(), "1.0.0")
    entries = status.entries_for("ovn-kubernetes", "eth0", decoded, cluster_network=True)
    assert [(entry["interface"], entry["ips"], entry["default"]) for entry in entries] == [
        ("eth0", ["10.244.1.9"], True),
        ("ovn-udn1", ["10.128.0.7"], False),
    ]
