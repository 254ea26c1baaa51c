"""The host had a link net1, and a pod got none of that name: names are counted in the pod.

k8snetworkplumbingwg/multus-cni#353; kind: the state of the node or of the pod's namespace.
"""

from tests.reports.conftest import Site


def test_the_pod_has_its_own_net1(site: Site) -> None:
    site.node.ip("link", "add", "net1", "type", "bridge")
    try:
        site.network("lan", {"cniVersion": "1.0.0", "type": "ptp", "ipam": site.ipam("10.61.0.0/24")})
        site.add("lan")
        assert site.links() == ["eth0", "net1"]
    finally:
        site.node.ip("link", "delete", "net1")
