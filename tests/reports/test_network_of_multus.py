"""A network's plugin was the shim itself, so that each pod asked the daemon again: it is refused by name.

k8snetworkplumbingwg/multus-cni#1099; kind: networks that lead back to Multus.
"""

import pytest

from tests.reports.conftest import Site


@pytest.mark.parametrize("plugin_type", ["multus-shim", "multus"])
def test_multus_is_not_a_plugin_of_multus(site: Site, plugin_type: str) -> None:
    site.network("inner", {"cniVersion": "0.3.0", "type": plugin_type, "delegate": {"isDefaultGateway": True}})
    message = site.refused("inner")
    assert plugin_type in message
    assert f"{site.namespace}/inner" in message
