"""A VF of DPDK has no address and its plugin an empty result, and the status failed: the pod starts and the network
is listed.

k8snetworkplumbingwg/multus-cni#211; kind: results of third parties.
"""

import pytest

from tests.reports.conftest import Site

NULLS = '{"cniVersion": "0.3.1", "interfaces": null, "ips": null, "routes": null, "dns": null}'


@pytest.mark.parametrize("printed", ["{}", "null", '{"cniVersion": "0.3.1", "dns": {}}', NULLS])
def test_the_network_is_listed(site: Site, printed: str) -> None:
    config = {"cniVersion": "0.3.1", "type": site.plugin("sriov", printed, commands="")}
    site.network("dpdk", config)
    site.add("dpdk")
    assert site.status[1]["name"] == f"{site.namespace}/dpdk"
    assert not site.status[1].get("ips")
