"""Host ports did nothing, as the generated configuration lacked the capabilities of Calico's list: it has those of
all its plugins.

k8snetworkplumbingwg/multus-cni#544; kind: capability arguments.
"""

import json

from multus_daemon.spec.cni import conf
from multus_daemon.spec.netconf.generate import generate

PATH = "/host/etc/cni/net.d/10-calico.conflist"
PLUGINS = [
    {"type": "calico", "mtu": 0, "ipam": {"type": "calico-ipam"}, "policy": {"type": "k8s"}},
    {"type": "portmap", "snat": True, "capabilities": {"portMappings": True}},
    {"type": "bandwidth", "capabilities": {"bandwidth": True}},
]


def test_the_runtime_passes_them() -> None:
    primary = conf.parse(json.dumps({"name": "k8s-pod-network", "cniVersion": "0.3.1", "plugins": PLUGINS}).encode())
    found = json.loads(generate({}, primary, PATH))
    assert found["capabilities"] == {"bandwidth": True, "portMappings": True}
    assert (found["clusterNetwork"], found["cniVersion"]) == (PATH, "0.3.1")
