"""A network had a gateway and a route to one prefix, and the pod a second default route: a gateway alone makes none.

k8snetworkplumbingwg/multus-cni#749; kind: default routes.
"""

from tests.reports.conftest import Site


def test_the_default_route_stays_with_eth0(site: Site) -> None:
    site.routed()
    ipam = site.ipam(
        "fd5d:d50a:8c17:2030::/64", routes=[{"dst": "fd5d:d50a:8c17:2040::/64", "gw": "fd5d:d50a:8c17:2030::ff"}]
    )
    ipam["ranges"][0][0]["gateway"] = "fd5d:d50a:8c17:2030::ff"
    bridge = {"type": "bridge", "bridge": f"br-{site.namespace}", "ipam": ipam}
    site.network("v6", {"cniVersion": "0.3.1", "name": "v6", "plugins": [bridge]})
    site.add("v6", default="cluster")
    assert [device for device, _ in site.default_routes("-6")] == ["eth0"]
    (route,) = site.node.ip("-6", "route", "show", "fd5d:d50a:8c17:2040::/64", netns=site.netns)
    assert route["gateway"] == "fd5d:d50a:8c17:2030::ff"
