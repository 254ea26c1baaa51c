"""The runtime has another UID of a static pod than the API, which has that of its mirror: the pod starts.

k8snetworkplumbingwg/multus-cni#773; kind: UIDs of a pod.
"""

from tests.reports.conftest import Site

STATIC = {"kubernetes.io/config.source": "file", "kubernetes.io/config.hash": "70a2d08f8ad8cd5d"}


def test_the_pod_gets_its_networks(site: Site) -> None:
    site.vendor("lan")
    site.declare("lan", others=STATIC)
    arguments = f"K8S_POD_NAMESPACE={site.namespace};K8S_POD_NAME={site.pod};K8S_POD_UID=70a2d08f8ad8cd5d"
    answer = site.call("ADD", CNI_ARGS=arguments)
    assert answer.code == 0, answer.stdout
    assert site.links() == ["eth0", "net1"]
