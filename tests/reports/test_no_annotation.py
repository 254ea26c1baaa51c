"""A pod without the annotation, and one with an empty text, were an error: they get the cluster network.

k8snetworkplumbingwg/multus-cni#642; kind: annotations that are absent, or that nothing reads.
"""

import pytest

from tests.reports.conftest import Site


@pytest.mark.parametrize("networks", [None, "", "[]"])
def test_the_pod_has_the_cluster_network(site: Site, networks: str | None) -> None:
    site.add(networks)
    assert site.links() == ["eth0"]
    assert [entry["default"] for entry in site.status] == [True]
