"""A pod did not ask for the resource of its network, and the plugin complained of an address: the missing resource
is named.

k8snetworkplumbingwg/sriov-network-device-plugin#258; kind: devices of a pod.
"""

from tests.reports.conftest import RESOURCE, Site


def test_the_resource_is_named(site: Site) -> None:
    site.network(
        "sriov", {"cniVersion": "0.3.1", "type": site.plugin("sriov")}, **{RESOURCE: "intel.com/sriov_netdevice"}
    )
    site.allocate({})
    assert "intel.com/sriov_netdevice" in site.refused("sriov")
    assert not site.called("sriov", "ADD")
