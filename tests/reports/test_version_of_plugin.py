"""Multus was set to CNI 1.1.0 and Calico's list said 0.3.1, and no pod started: each network is called in its own
version.

tigera/operator#4969; kind: CNI versions.
"""

from tests.reports.conftest import Site


def test_calico_is_called_in_its_own_version(site: Site) -> None:
    printed = {
        "cniVersion": "0.3.1",
        "ips": [{"version": "4", "address": "10.1.0.2/32"}],
        "interfaces": [{"name": "cali1"}],
    }
    config = {"cniVersion": "0.3.1", "name": "k8s-pod-network", "plugins": [{"type": site.plugin("calico", printed)}]}
    site.network("calico", config)
    result = site.add(default="calico", stdin={"cniVersion": "1.1.0"})
    assert site.given("calico")["cniVersion"] == "0.3.1"
    assert (result["cniVersion"], result["ips"][0]["address"]) == ("1.1.0", "10.1.0.2/32")
