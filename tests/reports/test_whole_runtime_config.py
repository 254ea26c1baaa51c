"""A runtime without a version in the configuration of Multus found no network: a version is implied.

k8snetworkplumbingwg/multus-cni#654; kind: incomplete configurations.
"""

from tests.reports.conftest import Site


def test_the_pod_starts_and_ends(site: Site) -> None:
    printed = {
        "interfaces": [{"name": "eth0", "sandbox": "$CNI_NETNS"}],
        "ips": [{"address": "10.5.0.2/24", "interface": 0}],
    }
    site.vendor("flannel", printed)
    result = site.add(default="flannel", stdin={"cniVersion": None})
    assert result["ip4"]["ip"] == "10.5.0.2/24"
    assert site.call("DEL", {"cniVersion": None}).code == 0
