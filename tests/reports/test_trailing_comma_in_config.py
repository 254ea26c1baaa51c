"""A configuration ended with a comma, or had a comment or a byte order mark: Go's JSON has none, and the place is
named.

k8snetworkplumbingwg/multus-cni#731; kind: malformed configurations.
"""

import pytest

from tests.reports.conftest import Site

PLUGIN = '"cniVersion": "0.4.0", "type": "ovs", "bridge": "br1"'


@pytest.mark.parametrize(
    "text",
    [f"{{{PLUGIN},}}", f"{{ // a bridge\n{PLUGIN}}}", f"\ufeff{{{PLUGIN}}}", f"{{{PLUGIN}}} x", "{'type': 'ovs'}"],
)
def test_the_network_and_the_place_are_named(site: Site, text: str) -> None:
    site.network("bgp", text)
    message = site.refused("bgp")
    assert f"{site.namespace}/bgp" in message
    assert "column" in message
