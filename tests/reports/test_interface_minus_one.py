"""A plugin marked an address of no interface with the index -1: the address is shown, and the pod starts.

cni-genie/CNI-Genie#139; kind: results of third parties.
"""

from tests.reports.conftest import Site

PRINTED = {
    "interfaces": [{"name": "$CNI_IFNAME", "sandbox": "$CNI_NETNS"}],
    "ips": [{"address": "10.1.0.2/24", "interface": -1}],
}


def test_the_address_is_not_lost(site: Site) -> None:
    site.vendor("net", PRINTED)
    result = site.add(default="net")
    assert result["ips"][0]["address"] == "10.1.0.2/24"
    assert site.status[0]["ips"] == ["10.1.0.2"]
    assert site.call("DEL").code == 0
