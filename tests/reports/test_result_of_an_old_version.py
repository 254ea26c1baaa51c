"""A plugin of CNI 0.2.0 has no interfaces in its result, and the network had no event and no status: both families
are listed.

k8snetworkplumbingwg/multus-cni#1095; kind: results of third parties.
"""

from tests.reports.conftest import Site

PRINTED = """{"cniVersion": "0.2.0", "dns": {},
 "ip4": {"ip": "10.1.1.2/24", "gateway": "10.1.1.1", "routes": [{"dst": "0.0.0.0/0"}]}, "ip6": {"ip": "fd11::2/64"}}"""


def test_the_network_is_listed_with_its_addresses(site: Site) -> None:
    site.network("weave", {"cniVersion": "0.2.0", "name": "weave", "type": site.plugin("weave", PRINTED)})
    site.add("weave")
    entry = site.status[1]
    assert (entry["name"], entry["interface"]) == (f"{site.namespace}/weave", "net1")
    assert entry["ips"] == ["10.1.1.2", "fd11::2"]
