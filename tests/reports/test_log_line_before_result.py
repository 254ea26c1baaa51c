"""A plugin printed a line of its log before its result: the error names the plugin and shows the line.

k8snetworkplumbingwg/multus-cni#1330; kind: plugins that are missing or print something else.
"""

from tests.reports.conftest import Site


def test_plugin_and_text_are_named(site: Site) -> None:
    site.vendor("calico", 'debug: looking for a pool\n{"cniVersion": "0.3.1"}')
    message = site.refused("calico")
    assert f"{site.namespace}-calico" in message
    assert "debug: looking" in message
