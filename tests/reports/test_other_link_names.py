"""A plugin made tap1 although eth1 was asked for: the status shows the links that the result names.

k8snetworkplumbingwg/multus-cni#901; kind: results of third parties.
"""

import json

from multus_daemon.spec.cni import result
from multus_daemon.spec.nad import status

PRINTED = {
    "cniVersion": "0.4.0",
    "interfaces": [{"name": "tap1", "mac": "02:aa:bb:cc:dd:01", "sandbox": "/n"}],
    "ips": [{"version": "4", "interface": 0, "address": "20.1.1.5/24"}],
}


def test_the_link_of_the_result_is_shown() -> None:
    decoded = result.decode(json.dumps(PRINTED).encode(), "0.4.0")
    (entry,) = status.entries_for("default/orange", "eth1", decoded, cluster_network=False)
    assert (entry["interface"], entry["ips"], entry["mac"]) == ("tap1", ["20.1.1.5"], "02:aa:bb:cc:dd:01")
