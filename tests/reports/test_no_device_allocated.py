"""A pod did not ask for the resource of its network, and the plugin complained of an address: the missing resource is
named.

k8snetworkplumbingwg/sriov-network-device-plugin#258; kind: devices of a pod.
"""

from tests.reports.conftest import RESOURCE, Site


def test_the_error_of_the_plugin_names_the_resource(site: Site) -> None:
    fails = """echo '{"cniVersion":"1.0.0","code":100,"msg":"VF pci addr is required"}'; exit 1"""
    config = {"cniVersion": "0.3.1", "type": site.plugin("sriov", commands=fails)}
    site.network("sriov", config, **{RESOURCE: "intel.com/sriov_netdevice"})
    site.allocate({"nvidia.com/gpu": ["g0"]})
    message = site.refused("sriov")
    assert "VF pci addr is required" in message
    assert "no device of intel.com/sriov_netdevice" in message
    assert "nvidia.com/gpu" in message
