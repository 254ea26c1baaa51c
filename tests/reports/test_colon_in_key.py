"""The second plugin of a list had the key `type:`: the list is refused at that plugin, before the first one runs.

k8snetworkplumbingwg/multus-cni#1351; kind: malformed configurations.
"""

from tests.reports.conftest import Site


def test_the_plugin_is_named_and_nothing_ran(site: Site) -> None:
    plugins = [{"type": site.plugin("bridge")}, {"type:": "vrf", "vrfname": "blue"}]
    site.network("br0", {"cniVersion": "0.3.1", "name": "br0", "plugins": plugins})
    assert "plugins[1]: 'type' is missing" in site.refused("br0")
    assert not site.called("bridge", "ADD")
