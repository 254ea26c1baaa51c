"""A pod named one network twice, which is also its default network: each mention is an interface.

k8snetworkplumbingwg/multus-cni#618; kind: keys and values of a selection element.
"""

from tests.reports.conftest import Site


def test_each_mention_is_an_interface(site: Site) -> None:
    site.vendor("lan")
    site.add("lan,lan", default="lan")
    assert site.links() == ["eth0", "net1", "net2"]
    assert [(entry["name"], entry["interface"]) for entry in site.status] == [
        (f"{site.namespace}/lan", name) for name in ("eth0", "net1", "net2")
    ]
