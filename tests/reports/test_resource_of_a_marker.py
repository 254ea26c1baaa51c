"""KubeVirt's networks name the resource of a bridge, which the node's status counts and no device plugin serves: the
pod starts without a device.

kubevirt/cluster-network-addons-operator#244; kind: devices of a pod.
"""

import pytest

from tests.reports.conftest import RESOURCE, Site


def test_a_built_in_bridge_is_called_without_a_device(site: Site) -> None:
    plugins = [{"type": "bridge", "bridge": f"br-{site.namespace}", "ipam": {}}, {"type": "tuning"}]
    config = {"cniVersion": "0.3.1", "plugins": plugins}
    site.network("br1", config, **{RESOURCE: "bridge.network.kubevirt.io/br1"})
    site.allocate({})
    site.add("br1,br1")
    assert site.links() == ["eth0", "net1", "net2"]
    assert site.call("CHECK").code == 0
    assert site.call("DEL").code == 0


@pytest.mark.parametrize("others", [{}, {"nvidia.com/gpu": ["g0"]}])
def test_a_binary_gets_the_configuration_of_its_network(site: Site, others: dict[str, list[str]]) -> None:
    config = {"cniVersion": "0.3.1", "type": site.plugin("ovs"), "bridge": "br1", "vlan": 100}
    site.network("ovs-conf", config, **{RESOURCE: "ovs-cni.network.kubevirt.io/br1"})
    site.allocate(others)
    site.add("ovs-conf")
    assert site.given("ovs") == {**config, "name": "ovs-conf"}
