"""host-device knows a device by `pciBusID` and not by `deviceID`: a device plugin's choice is in both.

k8snetworkplumbingwg/sriov-network-device-plugin#188; kind: devices of a pod.
"""

from tests.reports.conftest import RESOURCE, Site


def test_both_keys_name_the_device(site: Site) -> None:
    site.vendor("host-device")
    config = {"cniVersion": "0.3.1", "type": site.plugin("host-device"), "ipam": {}}
    site.network("sriov-host", config, **{RESOURCE: "intel.com/pool_a"})
    site.allocate({"intel.com/pool_a": ["0000:00:07.0"], "intel.com/pool_b": ["0000:00:08.0"]})
    site.add("sriov-host")
    given = site.given("host-device")
    assert (given["deviceID"], given["pciBusID"], given["ipam"]) == ("0000:00:07.0", "0000:00:07.0", {})
