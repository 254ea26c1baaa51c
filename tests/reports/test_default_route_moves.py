"""A network asked for the default route, and the pod had two: it has the one that was asked for.

k8snetworkplumbingwg/multus-cni#1444; kind: default routes.
"""

from tests.reports.conftest import Site


def test_the_pod_has_one(site: Site) -> None:
    site.routed()
    site.add('[{"name": "lan", "default-route": ["10.0.4.1"]}]', default="cluster")
    assert site.default_routes() == [("net1", "10.0.4.1")]
    assert [device for device, _ in site.default_routes("-6")] == ["eth0"]
