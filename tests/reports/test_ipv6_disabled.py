"""The runtime had switched IPv6 off in the pod, and an address of both families failed with `Permission denied`:
both are set.

k8snetworkplumbingwg/multus-cni#1141; kind: the state of the node or of the pod's namespace.
"""

from tests.reports.conftest import Site


def test_both_addresses_are_set(site: Site) -> None:
    site.inside("sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1")
    site.network("lan", {"cniVersion": "0.3.1", "type": "ptp", "ipam": site.ipam("10.62.0.0/24", "fd62::/64")})
    site.add("lan")
    (link,) = site.node.ip("address", "show", "net1", netns=site.netns)
    found = {item["local"] for item in link["addr_info"] if item["scope"] == "global"}
    assert found == set(site.status[1]["ips"])
    assert len(found) == 2
