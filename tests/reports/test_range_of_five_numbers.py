"""A range began at an address of five numbers: the ADD fails with the value, and leaves nothing.

k8snetworkplumbingwg/multus-cni#240; kind: malformed configurations.
"""

from tests.reports.conftest import Site


def test_the_value_is_named(site: Site) -> None:
    ipam = {"type": "host-local", "subnet": "10.205.28.0/24", "rangeStart": "10.205.28.14.200"}
    site.network("lan", {"cniVersion": "0.3.0", "type": "bridge", "bridge": "br-range", "ipam": ipam})
    assert "10.205.28.14.200" in site.refused("lan")
    assert "br-range" not in site.node.links()
