"""A result had a host link, a link of the pod, and an address of neither: the pod's link has it.

k8snetworkplumbingwg/network-attachment-definition-client#74; kind: results of third parties.
"""

import json

from multus_daemon.spec.cni import result
from multus_daemon.spec.nad import status

PRINTED = {
    "cniVersion": "0.3.1",
    "interfaces": [{"name": "cali1"}, {"name": "eth0", "sandbox": "/var/run/netns/p"}],
    "ips": [{"version": "4", "address": "10.10.66.36/32"}],
}


def test_the_address_is_not_lost() -> None:
    decoded = result.decode(json.dumps(PRINTED).encode(), "0.3.1")
    (entry,) = status.entries_for("calico", "eth0", decoded, cluster_network=True)
    assert (entry["interface"], entry["ips"], entry["default"]) == ("eth0", ["10.10.66.36"], True)
