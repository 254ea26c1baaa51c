"""Calico named its host link only, without sandbox and indexes: its addresses are the pod's.

k8snetworkplumbingwg/network-attachment-definition-client#72; kind: results of third parties.
"""

import json

from multus_daemon.spec.cni import result
from multus_daemon.spec.nad import status

PRINTED = {
    "cniVersion": "0.3.1",
    "interfaces": [{"name": "cali05f4a1849c5"}],
    "ips": [{"version": "4", "address": "10.244.196.152/32"}, {"version": "6", "address": "fd10:244::c497/128"}],
    "dns": {},
}


def test_both_addresses_are_shown_and_the_host_link_is_not() -> None:
    decoded = result.decode(json.dumps(PRINTED).encode(), "0.3.1")
    (entry,) = status.entries_for("k8s-pod-network", "eth0", decoded, cluster_network=True)
    assert entry["ips"] == ["10.244.196.152", "fd10:244::c497"]
    assert entry["default"] is True
    assert entry.get("interface") != "cali05f4a1849c5"
