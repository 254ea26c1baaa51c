"""A plugin left out an interface that its addresses refer to: the pod starts and ends, and its other networks are
listed.

danm-cni/danm#255; kind: results of third parties.
"""

from tests.reports.conftest import Site

PRINTED = {
    "interfaces": [{"name": "cali1"}, {"name": "$CNI_IFNAME", "sandbox": "$CNI_NETNS"}],
    "ips": [{"address": "10.1.0.2/24", "interface": 7}, {"address": "10.1.0.3/24", "interface": 1}],
}


def test_the_pod_starts_and_ends(site: Site) -> None:
    site.vendor("net", PRINTED)
    site.add("net")
    assert "10.1.0.3" in site.status[1]["ips"]
    assert site.call("CHECK").code == 0
    assert site.call("DEL").code == 0
