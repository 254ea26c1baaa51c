"""The annotation was `networks` without its prefix, which nothing reads: the pod starts with the cluster network.

k8snetworkplumbingwg/multus-cni#134; kind: annotations that are absent, or that nothing reads.
"""

from tests.reports.conftest import Site


def test_the_key_asks_for_nothing(site: Site) -> None:
    site.vendor("macvlan3")
    site.declare(others={"networks": '[{"name": "macvlan3"}]'})
    assert site.call("ADD").code == 0
    assert site.links() == ["eth0"]
