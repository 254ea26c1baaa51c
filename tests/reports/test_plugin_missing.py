"""The binary of a network's plugin was not on the node: the ADD names it and the directory, and the pod ends.

k8snetworkplumbingwg/multus-cni#386; kind: plugins that are missing or print something else.
"""

from tests.reports.conftest import Site


def test_the_plugin_is_named(site: Site) -> None:
    site.network("lan", {"cniVersion": "0.3.1", "type": "sriov-of-nobody"})
    message = site.refused("lan")
    assert "sriov-of-nobody" in message
    assert str(site.node.bin_dir) in message
