"""The host's end came first in the result, and no entry was the default: links of the host do not count.

k8snetworkplumbingwg/network-attachment-definition-client#71; kind: results of third parties.
"""

import json

from multus_daemon.spec.cni import result
from multus_daemon.spec.nad import status

PRINTED = {
    "cniVersion": "1.0.0",
    "interfaces": [{"name": "veth12"}, {"name": "eth0", "sandbox": "/n"}, {"name": "eth1", "sandbox": "/n"}],
    "ips": [{"address": "10.0.0.2/24", "gateway": "10.0.0.1", "interface": 1}],
}


def test_the_first_link_of_the_pod_is_the_default() -> None:
    decoded = result.decode(json.dumps(PRINTED).encode(), "1.0.0")
    entries = status.entries_for("net", "eth0", decoded, cluster_network=True)
    assert [(entry["interface"], entry["default"]) for entry in entries] == [("eth0", True), ("eth1", False)]
