"""OpenShift SDN's routes had no gateway for multicast, and the status crashed: only gateways of default routes are
shown.

k8snetworkplumbingwg/multus-cni#481; kind: results of third parties.
"""

import json

from multus_daemon.spec.cni import result
from multus_daemon.spec.nad import status

PRINTED = {
    "cniVersion": "0.3.1",
    "interfaces": [{"name": "eth0", "sandbox": "/proc/20411/ns/net"}],
    "ips": [{"version": "4", "interface": 0, "address": "10.129.0.18/23"}],
    "routes": [{"dst": "0.0.0.0/0", "gw": "10.129.0.1"}, {"dst": "224.0.0.0/4"}, {"dst": "::/0"}],
    "dns": {},
}


def test_the_gateway_is_shown_and_nothing_for_routes_without() -> None:
    decoded = result.decode(json.dumps(PRINTED).encode(), "0.3.1")
    (entry,) = status.entries_for("openshift-sdn", "eth0", decoded, cluster_network=True)
    assert entry["gateway"] == ["10.129.0.1"]
    assert "nil" not in status.render([entry])
