"""A gateway was asked for that the network does not reach: the ADD fails with it, and nothing is left.

k8snetworkplumbingwg/multus-cni#847; kind: default routes.
"""

from tests.reports.conftest import Site


def test_the_gateway_is_named(site: Site) -> None:
    site.routed()
    message = site.refused('[{"name": "lan", "default-route": ["198.32.43.97"]}]', default="cluster")
    assert "198.32.43.97" in message
    assert site.links() == []
