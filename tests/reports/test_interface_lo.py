"""A runtime asked for an interface `lo`, which the pod has: the ADD fails and names it, and `lo` stays.

harvester/harvester#210; kind: the state of the node or of the pod's namespace.
"""

from tests.reports.conftest import Site


def test_the_name_is_taken(site: Site) -> None:
    site.declare()
    answer = site.call("ADD", CNI_IFNAME="lo")
    assert answer.code == 1
    assert "lo" in answer.json["msg"]
    assert site.call("DEL", CNI_IFNAME="lo").code == 0
    assert "lo" in site.node.links(site.netns)
