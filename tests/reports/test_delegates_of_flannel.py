"""A configuration by hand has delegates with a list of CNI 0.2.0, an indicator, and no version of its own: it is
read.

k8snetworkplumbingwg/multus-cni#491; kind: configurations of the daemon.
"""

import json

from multus_daemon.spec.netconf import model


def test_the_list_is_the_cluster_network() -> None:
    flannel = {"type": "flannel", "delegate": {"hairpinMode": True, "isDefaultGateway": True}}
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    config = {
        "name": "multus-cni-network",
        "type": "multus",
        "readinessindicatorfile": "/var/run/flannel/subnet.env",
        "delegates": [{"cniVersion": "0.2.0", "name": "cbr0", "plugins": [flannel, portmap]}],
        "kubeconfig": "/etc/cni/net.d/multus.d/multus.kubeconfig",
    }
    found = model.load(json.dumps(config).encode(), {})
    assert [(item.name, item.cni_version, item.type) for item in found.delegates] == [("cbr0", "0.2.0", "flannel")]
    assert found.delegates[0].capabilities == {"portMappings"}
