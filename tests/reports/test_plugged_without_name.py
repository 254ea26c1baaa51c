"""A network whose configuration has no name was hot-plugged into a pod without networks, and could not be taken out:
both work.

k8snetworkplumbingwg/multus-dynamic-networks-controller#52; kind: incomplete configurations.
"""

from tests.reports.conftest import Site


def test_it_comes_and_goes(site: Site) -> None:
    site.network("tenant", {"cniVersion": "0.3.1", "type": site.plugin("tenant")})
    site.add()
    status, body = site.plug("ADD", "tenant", "ens58")
    assert status == 200, body
    assert site.plug("DEL", "tenant", "ens58")[0] == 200
    assert site.called("tenant", "DEL")
