"""A device was allocated for a network whose configuration is a list without a version: each plugin gets it.

k8snetworkplumbingwg/multus-cni#289; kind: incomplete configurations.
"""

from tests.reports.conftest import RESOURCE, Site

DEVICE = "0000:03:02.3"


def test_the_first_plugin_gets_the_device(site: Site) -> None:
    plugins = [{"type": site.plugin("sriov")}]
    site.network("sriov-net1", {"name": "sriov-network", "plugins": plugins}, **{RESOURCE: "intel.com/sriov"})
    site.allocate({"intel.com/sriov": [DEVICE]})
    site.add("sriov-net1")
    assert (site.given("sriov")["deviceID"], site.given("sriov")["pciBusID"]) == (DEVICE, DEVICE)
