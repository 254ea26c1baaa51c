"""Gateways of both families were asked for, and none was set: each family has its own.

k8snetworkplumbingwg/multus-cni#906; kind: default routes.
"""

from tests.reports.conftest import Site


def test_both_families_move(site: Site) -> None:
    site.routed()
    site.add(
        '[{"default-route": ["10.0.4.1", "2001:db8:4::1"], "interface": "main", "name": "lan"}]', default="cluster"
    )
    assert site.default_routes() == [("main", "10.0.4.1")]
    assert site.default_routes("-6") == [("main", "2001:db8:4::1")]
    shown = {entry["interface"]: entry.get("gateway") for entry in site.status}
    assert shown == {"eth0": None, "main": ["10.0.4.1", "2001:db8:4::1"]}
