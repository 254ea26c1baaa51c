"""A configuration lacked a comma between two keys, and the address in it seemed ignored: the place of the fault is
named.

k8snetworkplumbingwg/multus-cni#278; kind: malformed configurations.
"""

from tests.reports.conftest import Site


def test_line_and_network_are_named(site: Site) -> None:
    site.network("macvlan-1g", '{\n  "cniVersion": "0.3.0",\n  "name": "macvlan-1g"\n  "type": "macvlan"\n}')
    message = site.refused("macvlan-1g")
    assert "line 4" in message
    assert f"{site.namespace}/macvlan-1g" in message
