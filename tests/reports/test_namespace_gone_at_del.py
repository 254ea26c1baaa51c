"""The pod had failed and its namespace was gone at DEL, and no plugin was called: each is.

k8snetworkplumbingwg/multus-cni#267; kind: DEL with less than ADD had.
"""

import pytest

from tests.reports.conftest import Site


@pytest.mark.parametrize("netns", ["/run/netns/never-was", "", None])
def test_every_plugin_gets_the_del(site: Site, netns: str | None) -> None:
    site.vendor("lan")
    site.add("lan")
    assert site.call("DEL", CNI_NETNS=netns).code == 0
    assert site.called("lan", "DEL")
    assert not site.record.exists()
