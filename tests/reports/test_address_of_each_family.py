"""One element asked for an IPv4 and an IPv6 address of a network of both: the pod has both.

k8snetworkplumbingwg/multus-cni#647; kind: keys and values of a selection element.
"""

from tests.reports.conftest import Site


def test_both_are_given(site: Site) -> None:
    config = {"cniVersion": "1.0.0", "type": "ptp", "capabilities": {"ips": True}}
    site.network("dual", {**config, "ipam": site.ipam("10.254.0.0/24", "fd17:d84:5c7::/64")})
    site.add('[{"name": "dual", "interface": "net1", "ips": ["10.254.0.22", "fd17:d84:5c7::8"]}]')
    assert site.status[1]["ips"] == ["10.254.0.22", "fd17:d84:5c7::8"]
