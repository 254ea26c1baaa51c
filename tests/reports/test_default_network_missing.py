"""The pod's own default network could not be read, and the pod got the cluster's: the ADD fails instead.

k8snetworkplumbingwg/multus-cni#492; kind: the pod's own default network.
"""

from tests.reports.conftest import Site


def test_no_other_network_takes_its_place(site: Site) -> None:
    site.vendor("net1")
    message = site.refused(
        '[{"name": "net1", "interface": "eth1"}]',
        '[{"interface": "eth0", "namespace": "kube-system", "name": "calico"}]',
    )
    assert "kube-system/calico" in message
    assert site.links() == []
