"""An element had an empty `default-route`, and eth0 lost its own: an empty list asks for nothing.

k8snetworkplumbingwg/multus-cni#1011; kind: default routes.
"""

import pytest

from tests.reports.conftest import Site


@pytest.mark.parametrize("value", ["[]", "null"])
def test_eth0_keeps_its_default_route(site: Site, value: str) -> None:
    site.routed()
    site.add(f'[{{"name": "lan", "default-route": {value}}}]', default="cluster")
    assert site.default_routes() == [("eth0", "10.244.1.1")]
    assert [device for device, _ in site.default_routes("-6")] == ["eth0"]
